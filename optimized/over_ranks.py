"""Collective decisions about gradients that are sharded over the ranks (ups, technique 002.7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from optimized.optimizers.clip_grad_norm import EPS
from optimized.process_groups import CAPTURED, group_with


def agreed(*, finite: bool) -> bool:
    """Return whether the gradients are finite on all ranks."""
    found = torch.tensor(int(finite))
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


def clip_over_ranks(grads: Sequence[torch.Tensor], max_norm: float, *, like: torch.Tensor) -> torch.Tensor:
    """Clip this rank's gradients in place, as `clip_grad_norm` does, by the norm over all ranks; return that norm.

    A CUDA graph can capture the call.

    like  a tensor of the gradients' dtype and device. A rank without gradients takes part with a zero
    """
    own = list(grads) or [like.new_zeros(1)]
    squares = torch.stack(torch._foreach_norm(own)).square().sum()
    dist.all_reduce(squares, group=group_with(CAPTURED, squares.device))
    norm = squares.sqrt()
    torch._foreach_mul_(own, (max_norm / (norm + EPS)).clamp(max=1.0))
    return norm
