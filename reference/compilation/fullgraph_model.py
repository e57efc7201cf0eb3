"""The network and its loss, operation by operation (leak_cnn, technique 001.5)."""

import torch

from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss


def fullgraph_model(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """The loss of a batch, 0-d, run eagerly.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.5.
    """
    return training_loss(weights, segments, labels, class_weights)
