"""Gradient clipping by the global norm, one tensor at a time (eigenstate_lm, technique 004.7)."""

import math
from collections.abc import Sequence

import torch

EPS = 1e-6


def clip_grad_norm(grads: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale all gradients in place to a global norm of at most about `max_norm`; return the norm before, 0-d.

    Each gradient is multiplied by `min(1, max_norm / (norm + 1e-6))`, even if this factor is NaN. The host reads the
    norm of each gradient.

    grads  of any shapes, of one dtype and device; at least one

    Source: eigenstate_lm, technique 004.7.
    """
    total = math.sqrt(sum(grad.norm().item() ** 2 for grad in grads))
    scale = max_norm / (total + EPS)
    for grad in grads:
        grad.mul_(1.0 if scale > 1 else scale)
    return grads[0].new_tensor(total)
