"""Gradients in one buffer for each group of weights, averaged over all ranks (eigenstate_lm, 004.15; ups, 002.7)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
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
        self._weights = {name: list(weights) for name, weights in groups.items()}
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

    def backward(self, loss: torch.Tensor, names: Sequence[str], last: Collection[str]) -> None:
        """Add a micro-batch's gradients of these groups; `last` is not used, since `begin` reduces them."""
        weights = [w for name in names for w in self._weights[name]]
        # They are copied: those of a compiled network lie in a graph's own memory until its next call.
        found = iter(torch.autograd.grad(loss / self.ranks, weights))
        with torch.no_grad():
            for name in names:
                gradients = list(itertools.islice(found, len(self.views[name])))
                if name in self._begun:
                    torch._foreach_add_(self.views[name], gradients)
                else:
                    torch._foreach_copy_(self.views[name], gradients)
                    self._begun.add(name)

    def begin(self, name: str, number: torch.Tensor) -> None:
        """Begin to sum a group that was added to over the ranks, and with it the mean of a number, 0-d."""
        self._begun.discard(name)
        self.buffers[name][-1] = number / self.ranks
        if self.ranks > 1:
            buffer = self.buffers[name]
            self._under_way[name] = dist.all_reduce(buffer, group=group_with(CAPTURED, buffer.device), async_op=True)

    def finished(self, name: str) -> list[torch.Tensor]:
        """Return the group's reduced gradients. On a GPU the device waits for them, and the host does not."""
        if (work := self._under_way.pop(name, None)) is not None:
            work.wait()
        return self.views[name]

    def number(self, name: str) -> torch.Tensor:
        """Return the mean of the number over the ranks, 0-d: a view."""
        return self.buffers[name][-1]

    def reset(self) -> None:
        """Begin a new step: its first gradients are written over those of the last one."""

    def agreed(self, *, finite: bool) -> bool:
        """Return whether the gradients are finite in all ranks: reduced, they are the same in each."""
        return finite
