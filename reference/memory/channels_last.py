"""The network in the default layout (leak_cnn, technique 001.9)."""

import torch

from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss


def channels_last(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the loss of a batch, 0-d, in the default layout, contiguous [N, C, H, W].

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.9.
    """
    return training_loss(weights, segments, labels, class_weights)
