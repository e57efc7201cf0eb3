"""The outputs of ranks, put together as one process has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from perfsuite.execution import Leaves


def joined(of_ranks: Sequence[Leaves], truth: Leaves) -> Leaves:
    """The outputs of which each rank has a part, put together in the order of the ranks."""
    return {name: whole for name, t in truth.items() if (whole := _joined(of_ranks, name, t)) is not None}


def _joined(of_ranks: Sequence[Leaves], name: str, truth: Any) -> torch.Tensor | None:
    """The ranks' parts of this output in one tensor; None where each rank has all of it, or something else."""
    tensors = [leaf for leaves in of_ranks if isinstance(leaf := leaves.get(name), torch.Tensor)]
    if not isinstance(truth, torch.Tensor) or len(tensors) < len(of_ranks):
        return None
    if all(t.shape == truth.shape for t in tensors):
        return None
    for dim in range(truth.dim()):
        others = [(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors if t.dim() == truth.dim()]
        if len(others) < len(tensors) or any(o != (*truth.shape[:dim], *truth.shape[dim + 1 :]) for o in others):
            continue
        if sum(t.shape[dim] for t in tensors) == truth.shape[dim]:
            return torch.cat(tensors, dim)
    return None
