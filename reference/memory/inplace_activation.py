"""The network with each ReLU's result beside its input (leak_cnn, technique 001.4)."""

import torch

from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss


def inplace_activation(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """The loss of a batch, 0-d; a ReLU writes to memory of its own.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.4.
    """
    return training_loss(weights, segments, labels, class_weights)
