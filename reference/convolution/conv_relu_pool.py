"""Convolution, ReLU and max-pooling as three operations (leak_cnn, technique 001.F4)."""

import torch
from torch.nn import functional


def conv_relu_pool(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return `max_pool(relu(conv(x)))`, [N, C', H // 2, W]: 3×3 convolution, padding 1, maximum of every two rows.

    x       [N, C, H, W], H 2 or more
    weight  [C', C, 3, 3]
    bias    [C']

    Source: leak_cnn, technique 001.F4.
    """
    return functional.max_pool2d(functional.relu(functional.conv2d(x, weight, bias, padding=1)), (2, 1))
