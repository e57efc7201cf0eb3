"""The network under autocast to float16, its loss scaled (leak_cnn, technique 001.F2; eigenstate_lm, 004.1)."""

import torch

from suite.leak_cnn.loss import leak_cnn_loss
from suite.leak_cnn.model import Weights, forward
from suite.leak_cnn.step import with_gradients

# A power of two, so that it rounds nothing. float16 ends at 65504: a batch's gradients, of the order of 1, stay within
# with room for outliers, and what would be lost below 6e-8 is not. A trainer's gradient scaler finds its own.
SCALE = 1024.0


def autocast_fp16(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch, 0-d, and its gradient by each weight; convolutions and linear layers in float16.

    The loss is in the weights' dtype, and scaled by 1024 for the backward, as float16's smallest gradients need; what
    is returned is not scaled. The source (eigenstate_lm) claims 2x, and half the memory.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.F2, whose own loop has float16; eigenstate_lm, technique 004.1.
    """
    loss, gradients = with_gradients(_scaled_loss, weights, segments, labels, class_weights)
    return loss / SCALE, {name: gradient / SCALE for name, gradient in gradients.items()}


def _scaled_loss(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    with torch.autocast(segments.device.type, dtype=torch.float16):
        classes, leak = forward(weights, segments)
    dtype = class_weights.dtype
    return SCALE * leak_cnn_loss(classes.to(dtype), leak.to(dtype), labels, class_weights)
