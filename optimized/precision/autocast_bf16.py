"""The network under autocast to bfloat16 (leak_cnn, technique 001.F2)."""

import torch

from suite.leak_cnn.loss import leak_cnn_loss
from suite.leak_cnn.model import Weights, forward


def autocast_bf16(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """The loss of a batch, 0-d: convolutions and linear layers in bfloat16, the loss in the weights' dtype.

    bfloat16 has float32's range, so that no gradient scaler is needed. The source claims 5–10% over float16.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.F2.
    """
    with torch.autocast(segments.device.type, dtype=torch.bfloat16):
        classes, leak = forward(weights, segments)
    return leak_cnn_loss(classes.to(class_weights.dtype), leak.to(class_weights.dtype), labels, class_weights)
