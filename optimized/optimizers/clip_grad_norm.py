"""Gradient clipping by the global norm, for all tensors at once on the device (eigenstate_lm, technique 004.7)."""

from collections.abc import Sequence

import torch

EPS = 1e-6


def clip_grad_norm(grads: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale all gradients in place to a global norm of at most about `max_norm`; return the norm before, 0-d.

    Each gradient is multiplied by `min(1, max_norm / (norm + 1e-6))`, even if this factor is NaN. The host never waits
    for the device, so a CUDA graph can capture the call.

    grads  of any shapes, of one dtype and device; at least one

    Source: eigenstate_lm, technique 004.7.
    """
    own = grads[0].dtype
    # In float16, the norm of all gradients may overflow and a small factor underflow.
    wide = torch.float32 if own == torch.float16 else own
    total = torch.stack(torch._foreach_norm(list(grads))).norm(dtype=wide)
    torch._foreach_mul_(list(grads), (max_norm / (total + EPS)).clamp(max=1.0))
    return total.to(own)
