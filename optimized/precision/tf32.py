"""The network with TF32 convolutions and matrix products (leak_cnn, technique 001.9; eigenstate_lm, 004.6)."""

from contextlib import AbstractContextManager

import torch

from suite.backends import tf32_products
from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss, with_gradients


def tf32(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of a batch, 0-d, and the gradient of each weight; factors are rounded to TF32, sums are float32.

    The settings, torch.set_float32_matmul_precision and torch.backends.cudnn.allow_tf32, are global. They apply to the
    forward and backward pass and are restored afterwards. By default, torch allows TF32 for convolutions. The sources
    claim 20–30% of the convolutions' time (together with channels-last and autocast), and 2–3x for matrix products. On
    a CPU the settings have no effect.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.9; eigenstate_lm, technique 004.6.
    """
    with products():
        return with_gradients(training_loss, weights, segments, labels, class_weights)


def products() -> AbstractContextManager[None]:
    """Return a context in which the factors of float32 products and convolutions are rounded to TF32."""
    return tf32_products(allowed=True)
