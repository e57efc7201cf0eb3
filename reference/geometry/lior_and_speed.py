"""lior and speed from two quadratic forms (trainer2, technique 000.3)."""

import torch


def quad_form_batch(
    v: torch.Tensor, g: torch.Tensor | None, eps: float = 1e-8, g_diag: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `sqrt(max(v' g v, 0) + eps)` for each vector v, [B, K]. With `g_diag`, v' g v is `sum g_i v_i^2`.

    v       [B, K, n]
    g       [n, n] or [B, n, n]; None if g_diag is given
    g_diag  [n] or None
    """
    form = (g_diag * v * v).sum(-1) if g_diag is not None else ((v @ g) * v).sum(-1)
    return torch.sqrt(torch.clamp(form, min=0) + eps)


def lior_and_speed(
    velocity: torch.Tensor,
    curvature: torch.Tensor,
    metric: torch.Tensor | None,
    metric_diag: torch.Tensor | None = None,
    eps: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (lior, speed), each [B]: speed is the length of the velocity in the metric, lior is curvature * speed.

    velocity     [B, n]
    curvature    [B], R_sc
    metric       [n, n] or [B, n, n]; None if metric_diag is given
    metric_diag  [n] or None; if given, it is used instead of metric

    Source: trainer2, technique 000.3.
    """
    v = velocity[:, None]
    lior = curvature * quad_form_batch(v, metric, eps, metric_diag).squeeze(1)
    speed = quad_form_batch(v, metric, eps, metric_diag).squeeze(1)
    return lior, speed
