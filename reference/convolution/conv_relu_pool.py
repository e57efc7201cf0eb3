"""Convolution, ReLU and max-pooling, one after the other (leak_cnn, technique 001.F4)."""

import torch
from torch.nn import functional


def conv_relu_pool(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`max_pool(relu(conv(x)))`: convolution 3×3 with padding 1, the larger of every two rows; [N, C', H // 2, W].

    x       [N, C, H, W], H 2 or more
    weight  [C', C, 3, 3]
    bias    [C']

    Source: leak_cnn, technique 001.F4.
    """
    return functional.max_pool2d(functional.relu(functional.conv2d(x, weight, bias, padding=1)), (2, 1))
