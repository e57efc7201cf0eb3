"""The network under bfloat16 autocast (leak_cnn, technique 001.F2; ups, technique 002.6)."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from suite.leak_cnn.loss import leak_cnn_loss
from suite.leak_cnn.model import Weights, forward


def autocast_bf16(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the loss of a batch, 0-d: convolutions and linear layers in bfloat16, the loss in class_weights' dtype.

    bfloat16 has the range of float32, so no gradient scaler is needed. The source claims 5–10% over float16.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.F2.
    """
    with context(segments.device.type):
        classes, leak = forward(weights, segments)
    return leak_cnn_loss(classes.to(class_weights.dtype), leak.to(class_weights.dtype), labels, class_weights)


Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def sgd_step(weights: Weights, lr: float = 0.1) -> Step:
    """Build `step(segments, labels, class_weights)`: SGD under bfloat16 autocast, without a gradient scaler.

    A step updates the weights in place and returns the loss, 0-d, and the gradient of each weight. The host does not
    wait for the device. If a gradient is not finite, for example because a segment is not, the weights are still
    updated; the gradient scaler that float16 needs would skip the update. The source claims 1.10x over float16 with a
    scaler.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: ups, technique 002.6.
    """
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=lr)

    def step(
        segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = autocast_bf16(leaves, segments, labels, class_weights)
            loss.backward()
        optimizer.step()
        return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    return step


def context(device: str) -> AbstractContextManager[object]:
    """Return a context of bfloat16 autocast on devices of this type."""
    return torch.autocast(device, dtype=torch.bfloat16)
