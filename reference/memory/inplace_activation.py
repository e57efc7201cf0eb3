"""The network with out-of-place ReLUs (leak_cnn, technique 001.4)."""

import torch

from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss


def inplace_activation(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the loss of a batch, 0-d. Each ReLU writes its result to new memory.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.4.
    """
    return training_loss(weights, segments, labels, class_weights)


def relu(x: torch.Tensor) -> torch.Tensor:
    """Apply ReLU; the result is in new memory."""
    return torch.relu(x)
