"""The outputs of ranks, put together as one process has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from perfsuite.execution import Leaves


def whole(of_ranks: Sequence[Leaves], truth: Leaves) -> list[Leaves]:
    """For each rank, the outputs as the truth has them: an output of which each rank has a part is put together."""
    parts = {name: joined for name, t in truth.items() if (joined := _joined(of_ranks, name, t)) is not None}
    return [{name: parts.get(name, leaf) for name, leaf in leaves.items()} for leaves in of_ranks]


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
