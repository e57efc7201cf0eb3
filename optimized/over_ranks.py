"""Decisions about gradients of which each rank has a part (ups, technique 002.7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from optimized.optimizers.clip_grad_norm import EPS
from optimized.process_groups import CAPTURED, group_with


def agreed(*, finite: bool) -> bool:
    """Return whether the gradients are finite in all ranks."""
    found = torch.tensor(int(finite))
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


def clip_over_ranks(grads: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip this rank's gradients in place as `clip_grad_norm`, by the norm of all ranks' parts; return that norm.

    A CUDA graph can record it.
    """
    squares = torch.stack(torch._foreach_norm(list(grads))).square().sum()
    dist.all_reduce(squares, group=group_with(CAPTURED, squares.device))
    norm = squares.sqrt()
    torch._foreach_mul_(list(grads), (max_norm / (norm + EPS)).clamp(max=1.0))
    return norm
