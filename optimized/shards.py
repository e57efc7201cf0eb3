"""Tensors that are sharded over the ranks as FSDP2 shards them (ups, technique 002.7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Collectives by the names for which this version of torch does not warn: torch 2.13 renamed them."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Cut tensors along their first dimension, as `torch.chunk` does, and reassemble them from the ranks' parts.

    Each of r ranks has ceil(n / r) of n rows; the last ranks have fewer or none.
    """

    rank: int
    ranks: int

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, as a view."""
        rows = self._rows(whole.shape)
        return whole[self.rank * rows : (self.rank + 1) * rows]

    def whole(self, parts: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """Return the whole tensors, of these shapes, by one all-gather. All ranks must call it."""
        if not parts:
            return []
        padded = []
        for part, shape in zip(parts, shapes, strict=True):
            rows = part.new_zeros(self._rows(shape), *shape[1:])
            rows[: len(part)] = part
            padded.append(rows)
        own = torch.cat([rows.flatten() for rows in padded])
        every = own.new_empty(self.ranks * own.numel())
        gather(every, own)
        sizes = [rows.numel() for rows in padded]
        of_each = zip(every.view(self.ranks, -1).split(sizes, 1), padded, shapes, strict=True)
        return [rows.reshape(-1, *one.shape[1:])[: shape[0]].clone() for rows, one, shape in of_each]

    def _rows(self, shape: torch.Size) -> int:
        return -(-shape[0] // self.ranks)
