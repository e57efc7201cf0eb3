"""Gradients in flat buffers, averaged over all ranks (eigenstate_lm, 004.15; ups, 002.7)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from optimized.process_groups import CAPTURED, group_with

ALIGNED_TO = 16
"""Each gradient begins at a multiple of so many elements, for vector accesses."""


class _Bucket:
    """The gradients of some weights in one buffer, whose last element is for a number that is summed along."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = list(weights)
        places, total = [], 0
        for weight in weights:
            places.append(total)
            total += -(-weight.numel() // ALIGNED_TO) * ALIGNED_TO
        self.buffer = torch.zeros(total + 1, dtype=weights[0].dtype, device=weights[0].device)
        both = zip(places, weights, strict=True)
        self.views = [self.buffer[at : at + w.numel()].view(w.shape) for at, w in both]
        self.is_begun = False
        """Whether it has gradients of the step."""
        self.work: Any = None
        """The all-reduce under way."""

    @torch.no_grad()
    def add(self, gradients: Iterator[torch.Tensor]) -> None:
        """Add the next gradients; those of a step's first micro-batch are copied."""
        found = list(itertools.islice(gradients, len(self.views)))
        (torch._foreach_add_ if self.is_begun else torch._foreach_copy_)(self.views, found)
        self.is_begun = True

    def reduce(self, ranks: int) -> None:
        """Begin to sum the buffer over the ranks."""
        if ranks > 1:
            group = group_with(CAPTURED, self.buffer.device)
            self.work = dist.all_reduce(self.buffer, group=group, async_op=True)

    def wait(self) -> None:
        """Let the device wait for the sum."""
        if self.work is not None:
            self.work.wait()
            self.work = None


@dataclass(frozen=True)
class Boundary:
    """Results of a first part of a network, from which its second part is computed."""

    made: tuple[torch.Tensor, ...]
    """As the first part made them."""
    leaves: tuple[torch.Tensor, ...]
    """The same without the first part's graph, as the second part gets them."""

    @classmethod
    def after(cls, made: Sequence[torch.Tensor]) -> Boundary:
        """Cut the graph after these results."""
        return cls(tuple(made), tuple(t.detach().requires_grad_() for t in made))


class FlatGradients:
    """Gradients of named groups of weights, summed over the micro-batches of a step and then over the ranks.

    An all-reduce runs beside what the device is given next. A gradient is a view of a buffer, at the same address in
    each step, so that a CUDA graph can record the step. The process group has no watch for errors: where a rank is
    missing the others wait for ever.

    groups  name → weights; each has an all-reduce a step
    ranks   processes of the default group; with 1 nothing is reduced
    early   weights of what is computed first, whose gradients come last: they have an all-reduce of their own
    """

    def __init__(
        self, groups: Mapping[str, Sequence[torch.Tensor]], ranks: int, early: Iterable[torch.Tensor] = ()
    ) -> None:
        self.ranks = ranks
        apart = set(map(id, early))
        self._late: dict[str, _Bucket] = {}
        self._early: dict[str, _Bucket] = {}
        self._views: dict[str, list[torch.Tensor]] = {}
        for name, weights in groups.items():
            for buckets, chosen in (
                (self._late, [w for w in weights if id(w) not in apart]),
                (self._early, [w for w in weights if id(w) in apart]),
            ):
                if chosen:
                    buckets[name] = _Bucket(chosen)
            views = {id(w): v for bucket in self._of(name) for w, v in zip(bucket.weights, bucket.views, strict=True)}
            self._views[name] = [views[id(w)] for w in weights]

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        buckets = itertools.chain(self._late.values(), self._early.values())
        return sum(bucket.buffer.nbytes for bucket in buckets)

    def backward(
        self,
        loss: torch.Tensor,
        names: Sequence[str],
        last: Collection[str],
        boundary: Boundary | None = None,
    ) -> None:
        """Add a micro-batch's gradients of these groups; those of `last` have no further micro-batch in the step.

        boundary  between what the early weights have computed and the rest. With it the all-reduces of `last` begin
                  before the backward of the early weights; without it `begin` begins all
        """
        late = [self._late[name] for name in names if name in self._late]
        early = [self._early[name] for name in names if name in self._early]
        first, second = (late, early) if boundary is not None else ([*late, *early], [])
        leaves = boundary.leaves if boundary is not None else ()
        # They are copied: those of a compiled network lie in a graph's own memory until its next call.
        found = torch.autograd.grad(loss / self.ranks, [*_weights(first), *leaves])
        gradients = iter(found)
        for bucket in first:
            bucket.add(gradients)
        if boundary is None:
            return
        for name in names:
            if name in last and name in self._late and name in self._early:
                self._late[name].reduce(self.ranks)
        gradients = iter(torch.autograd.grad(boundary.made, _weights(second), grad_outputs=list(gradients)))
        for bucket in second:
            bucket.add(gradients)

    def begin(self, name: str, number: torch.Tensor) -> None:
        """Begin to sum what is left of a group over the ranks, and with it the mean of a number, 0-d."""
        *others, bucket = self._of(name)
        bucket.buffer[-1] = number / self.ranks
        for one in (*others, bucket):
            if one.work is None:
                one.reduce(self.ranks)

    def finished(self, name: str) -> list[torch.Tensor]:
        """Return the group's reduced gradients. On a GPU the device waits for them, and the host does not."""
        for bucket in self._of(name):
            bucket.wait()
            bucket.is_begun = False
        return self._views[name]

    def number(self, name: str) -> torch.Tensor:
        """Return the mean of the number over the ranks, 0-d: a view."""
        return self._of(name)[-1].buffer[-1]

    def reset(self) -> None:
        """Begin a new step: its first gradients are written over those of the last one."""

    def agreed(self, *, finite: bool) -> bool:
        """Return whether the gradients are finite in all ranks: reduced, they are the same in each."""
        return finite

    def _of(self, name: str) -> list[_Bucket]:
        """Return a group's buckets, in the order in which their gradients come."""
        return [buckets[name] for buckets in (self._late, self._early) if name in buckets]


def _weights(buckets: Sequence[_Bucket]) -> list[torch.Tensor]:
    return [weight for bucket in buckets for weight in bucket.weights]
