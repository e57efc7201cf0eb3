"""Clipping gradients to a norm, all at once and on the device (eigenstate_lm, technique 004.7)."""

from collections.abc import Sequence

import torch

EPS = 1e-6


def clip_grad_norm(grads: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale all gradients in place so that their norm together is at most about `max_norm`; what it was, 0-d.

    They are multiplied by `min(1, max_norm / (norm + 1e-6))`, also where that is NaN. The host waits for nothing, so
    that it can be captured in a CUDA graph.

    grads  of any shapes, of one dtype and device; at least one

    Source: eigenstate_lm, technique 004.7.
    """
    total = torch.stack(torch._foreach_norm(list(grads))).norm()
    torch._foreach_mul_(list(grads), (max_norm / (total + EPS)).clamp(max=1.0))
    return total
