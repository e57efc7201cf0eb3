"""Update of the diagonal metric, with a host synchronisation (trainer2)."""

import torch

LEAST, MOST = 0.01, 100.0


def metric_update(
    metric_diag: torch.Tensor,
    velocity_rotated: torch.Tensor,
    loss_delta: torch.Tensor,
    eta: float = 10.0,
) -> torch.Tensor:
    """Update the metric in place from the change of the loss along the velocity, and return `metric_diag`.

    `g += eta * loss_delta * v^2 / (sum v^2 + 1e-8)`, clamped to [0.01, 100]. If any element of that step is not finite,
    because the loss or the velocity is not finite or overflows, the whole metric stays unchanged.

    metric_diag       [n], changed in place
    velocity_rotated  [n], mean velocity over batch and window, rotated
    loss_delta        0-d, nudged loss minus free loss

    Source: trainer2, metric update.
    """
    square = velocity_rotated * velocity_rotated
    step = eta * loss_delta * square / (square.sum() + 1e-8)
    if not torch.isfinite(step).all().item():
        return metric_diag
    metric_diag += step
    metric_diag.clamp_(LEAST, MOST)
    return metric_diag
