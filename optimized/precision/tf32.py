"""The network with its products in TF32 (leak_cnn, technique 001.9; eigenstate_lm, 004.6)."""

import torch

from suite.backends import tf32_products
from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss, with_gradients


def tf32(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch, 0-d, and its gradient by each weight; factors are rounded to TF32, sums are float32.

    The setting is torch's own and global: it holds for the forward and the backward, and is put back. torch has it on
    for convolutions by default. The sources claim 20–30% of the convolutions' time (together with
    channels-last and autocast), and 2–3x for matrix products. On a CPU it changes nothing.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.9; eigenstate_lm, technique 004.6.
    """
    with tf32_products(allowed=True):
        return with_gradients(training_loss, weights, segments, labels, class_weights)
