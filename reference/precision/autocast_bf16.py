"""The network in the precision of its weights (leak_cnn, technique 001.F2), and in float16 (ups, technique 002.6)."""

from collections.abc import Callable

import torch

from suite.leak_cnn.loss import leak_cnn_loss
from suite.leak_cnn.model import Weights, forward
from suite.leak_cnn.step import training_loss


def autocast_bf16(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """The loss of a batch, 0-d, in the dtype of the weights.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.F2.
    """
    return training_loss(weights, segments, labels, class_weights)


# A power of two, so that it rounds nothing. torch's own first scale, 65536, overflows in the first steps, which are
# then left out; the scale does not grow within a proof or a measurement.
INIT_SCALE = 1024.0
GROWTH_INTERVAL = 1 << 30

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def autocast_step(weights: Weights, lr: float = 0.1) -> Step:
    """Build `step(segments, labels, class_weights)`: SGD under autocast to float16, with a gradient scaler.

    A step changes the weights in place and returns the loss, 0-d, and the gradient by each weight. torch's GradScaler
    multiplies the loss before the backward pass and divides the gradients after it. It makes no step where one of them
    is not finite, for which the host waits. Autocast leaves float64 as it is.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: ups, technique 002.6.
    """
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=lr)
    device = next(iter(leaves.values())).device.type
    scaler = torch.amp.GradScaler(device, init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)

    def step(
        segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        optimizer.zero_grad()
        with torch.enable_grad():
            with torch.autocast(device, dtype=torch.float16):
                classes, leak = forward(leaves, segments)
            dtype = class_weights.dtype
            loss = leak_cnn_loss(classes.to(dtype), leak.to(dtype), labels, class_weights)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    return step
