"""Gradients in one buffer, so that one collective reduces them all.

Source: eigenstate_lm, technique 004.15; ups, technique 002.7.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from optimized.process_groups import CAPTURED, group_with
from optimized.shards import gather, reduce_scatter

ALIGNED_TO = 16
"""Each tensor begins at a multiple of this number of elements, for vector accesses."""


class Bucket:
    """The gradients of some weights, summed over the ranks by one collective.

    Without an `owner`, each rank gets all summed gradients. With one, each rank gets only the gradients of the weights
    that it owns, and sends these weights to the other ranks after it has updated them. The bucket then stores the
    weights in a buffer, too.

    The calls of a step, in order: `add` for each micro-batch, `note`, `reduce`, `wait`; with an owner also `send` and
    `receive`.

    weights  of one dtype and device
    ranks    processes of the default group; with 1, `reduce` does nothing
    owner    this rank, if each rank updates a share of the weights; None: each rank updates all of them
    """

    def __init__(self, weights: Sequence[torch.Tensor], ranks: int, owner: int | None = None) -> None:
        self.weights, self.ranks, self.owner = list(weights), ranks, owner
        self.places, shape = _layout([w.numel() for w in weights], 1 if owner is None else ranks)
        self.buffer = weights[0].new_zeros(shape)
        self.views = self._views(self.buffer)
        self.values = None if owner is None else torch.zeros_like(self.buffer)
        self.has_gradients = False
        """True if the buffer already has gradients of this step."""
        self.work: Any = None
        """The running collective of the gradients, or None."""
        self.sending: Any = None
        """The running collective of the weights, or None."""
        if self.values is not None:
            for weight, view in zip(self.weights, self._views(self.values), strict=True):
                view.copy_(weight.detach())
                weight.data = view

    @property
    def owned(self) -> list[int]:
        """Indices of the weights that this rank updates."""
        return [i for i, (owner, _) in enumerate(self.places) if self.owner is None or owner == self.owner]

    @torch.no_grad()
    def add(self, gradients: Iterator[torch.Tensor]) -> None:
        """Add the next gradients of the iterator; those of a step's first micro-batch overwrite the buffer."""
        found = list(itertools.islice(gradients, len(self.views)))
        (torch._foreach_add_ if self.has_gradients else torch._foreach_copy_)(self.views, found)
        self.has_gradients = True

    def note(self, number: torch.Tensor) -> None:
        """Store a number, 0-d, such as the step's loss, that is summed over the ranks together with the gradients."""
        self.buffer[:, -1] = number

    @property
    def number(self) -> torch.Tensor:
        """View of the sum over the ranks of the numbers that `note` stored, 0-d."""
        return self._own(self.buffer)[-1]

    def reduce(self) -> None:
        """Start to sum the buffer over the ranks."""
        if self.ranks == 1 or self.work is not None:
            return
        if self.owner is None:
            self.work = dist.all_reduce(self.buffer, group=self._group, async_op=True)
        else:
            self.work = reduce_scatter(self._own(self.buffer), self.buffer.view(-1), group=self._group, async_op=True)

    def wait(self) -> None:
        """Make the device wait for the sum. The next `add` begins a new step."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        self.has_gradients = False

    def send(self) -> None:
        """Start to send the weights that this rank has updated to all other ranks."""
        if self.values is not None:
            self.sending = gather(self.values.view(-1), self._own(self.values), group=self._group, async_op=True)

    def receive(self) -> None:
        """Make the device wait for the weights of the other ranks."""
        if self.sending is not None:
            self.sending.wait()
            self.sending = None

    def gathered(self, own: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return one tensor for each weight, of its shape, from the rank that owns the weight.

        All ranks must call it. A tensor that its rank does not pass is 0.

        own  index of a weight → its tensor, for weights that this rank owns
        """
        buffer = torch.zeros_like(self.buffer)
        views = self._views(buffer)
        for i, tensor in own.items():
            views[i].copy_(tensor)
        if self.owner is not None:
            gather(buffer.view(-1), self._own(buffer))
        return [view.clone() for view in views]

    @property
    def _group(self) -> dist.ProcessGroup:
        return group_with(CAPTURED, self.buffer.device)

    def _own(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.owner or 0]

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        placed = zip(self.places, self.weights, strict=True)
        return [buffer[owner, begin : begin + w.numel()].view(w.shape) for (owner, begin), w in placed]


def _layout(sizes: Sequence[int], owners: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Return (owner, begin) of each tensor, and the buffer's shape [owners, length].

    The last element of each owner's row belongs to no tensor: `Bucket.note` stores its number there.

    With several owners, the largest tensors are assigned first, each to the owner with the fewest elements.
    """
    places = [(0, 0)] * len(sizes)
    ends = [(0, owner) for owner in range(owners)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]) if owners > 1 else range(len(sizes)):
        end, owner = heapq.heappop(ends)
        places[i] = (owner, end)
        heapq.heappush(ends, (end + _aligned(sizes[i]), owner))
    return places, (owners, _aligned(max(ends)[0] + 1))


def _aligned(size: int) -> int:
    return -(-size // ALIGNED_TO) * ALIGNED_TO
