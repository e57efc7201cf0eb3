"""Gradients in one buffer for each group of weights, averaged over all ranks (eigenstate_lm, 004.15; ups, 002.7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from optimized.process_groups import CAPTURED, group_with

ALIGNED_TO = 16
"""Each gradient begins at a multiple of so many elements, for vector accesses."""


class FlatGradients:
    """Gradients of named groups of weights, summed over the micro-batches of a step and then over the ranks.

    Each group has one all-reduce a step, which runs beside what the device is given next. A gradient is a view of its
    group's buffer, at the same address in each step, so that a CUDA graph can record the step. The process group has no
    watch for errors: where a rank is missing the others wait for ever.

    groups  name → weights
    ranks   processes of the default group; with 1 nothing is reduced
    """

    def __init__(self, groups: Mapping[str, Sequence[torch.Tensor]], ranks: int) -> None:
        self.ranks = ranks
        self.buffers: dict[str, torch.Tensor] = {}
        self.views: dict[str, list[torch.Tensor]] = {}
        self._begun: set[str] = set()
        self._under_way: dict[str, Any] = {}
        for name, weights in groups.items():
            places, total = [], 0
            for weight in weights:
                places.append(total)
                total += -(-weight.numel() // ALIGNED_TO) * ALIGNED_TO
            # The last element is for a number of the step, as its loss, which is summed along.
            buffer = torch.zeros(total + 1, dtype=weights[0].dtype, device=weights[0].device)
            self.buffers[name] = buffer
            self.views[name] = [
                buffer[at : at + w.numel()].view(w.shape) for at, w in zip(places, weights, strict=True)
            ]

    @torch.no_grad()
    def add(self, name: str, gradients: Sequence[torch.Tensor]) -> None:
        """Add a micro-batch's gradients of a group; those of a step's first one are copied."""
        if name in self._begun:
            torch._foreach_add_(self.views[name], list(gradients))
        else:
            torch._foreach_copy_(self.views[name], list(gradients))
            self._begun.add(name)

    def begin(self, name: str, number: torch.Tensor | None = None) -> None:
        """Begin to sum a group that was added to over the ranks, and with it a number, 0-d."""
        self._begun.discard(name)
        if number is not None:
            self.buffers[name][-1] = number
        if self.ranks > 1:
            buffer = self.buffers[name]
            self._under_way[name] = dist.all_reduce(buffer, group=group_with(CAPTURED, buffer.device), async_op=True)

    def finished(self, name: str) -> list[torch.Tensor]:
        """The group's gradients; what the device is given next waits for them, and the host does not on a GPU."""
        if (work := self._under_way.pop(name, None)) is not None:
            work.wait()
        return self.views[name]

    def number(self, name: str) -> torch.Tensor:
        """The number that was summed with a group, 0-d: a view."""
        return self.buffers[name][-1]
