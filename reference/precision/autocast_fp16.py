"""The network and its gradients in the dtype of its weights (leak_cnn, technique 001.F2; eigenstate_lm, 004.1)."""

from contextlib import AbstractContextManager, nullcontext

import torch

from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss, with_gradients


def autocast_fp16(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of a batch, 0-d, and the gradient of each weight, all in the dtype of the weights.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.F2, whose own training loop uses float16; eigenstate_lm, technique 004.1.
    """
    return with_gradients(training_loss, weights, segments, labels, class_weights)


def context(device: str) -> AbstractContextManager[object]:
    """Return a context that changes no dtype."""
    return nullcontext()
