"""The network without TF32 (leak_cnn, technique 001.9; eigenstate_lm, 004.6)."""

from contextlib import AbstractContextManager

import torch

from suite.backends import tf32_products
from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss, with_gradients


def tf32(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of a batch, 0-d, and the gradient of each weight; factors are not rounded to TF32.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.9; eigenstate_lm, technique 004.6.
    """
    with products():
        return with_gradients(training_loss, weights, segments, labels, class_weights)


def products() -> AbstractContextManager[None]:
    """Return a context in which the factors of float32 products and convolutions are not rounded to TF32."""
    return tf32_products(allowed=False)
