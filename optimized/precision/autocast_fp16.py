"""The network under float16 autocast, with a scaled loss (leak_cnn, technique 001.F2; eigenstate_lm, 004.1)."""

from contextlib import AbstractContextManager

import torch

from suite.leak_cnn.loss import leak_cnn_loss
from suite.leak_cnn.model import Weights, forward
from suite.leak_cnn.step import with_gradients

# A power of two, so scaling rounds nothing. The gradients of a batch are of the order of 1. Scaled, they stay below
# 65504, the largest float16, with room for outliers, and gradients below 6e-8, the smallest float16, are not lost. A
# trainer's gradient scaler finds its own scale.
SCALE = 1024.0


def autocast_fp16(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of a batch, 0-d, and the gradient of each weight; convolutions and linear layers in float16.

    The loss is in the dtype of `class_weights`. It is scaled by 1024 for the backward pass, so that small gradients do
    not underflow in float16. The returned loss and gradients are unscaled. The source (eigenstate_lm) claims 2x the
    speed, and half the memory.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.F2, whose own training loop uses float16; eigenstate_lm, technique 004.1.
    """
    loss, gradients = with_gradients(_scaled_loss, weights, segments, labels, class_weights)
    return loss / SCALE, {name: gradient / SCALE for name, gradient in gradients.items()}


def _scaled_loss(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    with context(segments.device.type):
        classes, leak = forward(weights, segments)
    dtype = class_weights.dtype
    return SCALE * leak_cnn_loss(classes.to(dtype), leak.to(dtype), labels, class_weights)


def context(device: str) -> AbstractContextManager[object]:
    """Return a context of float16 autocast on devices of this type."""
    return torch.autocast(device, dtype=torch.float16)
