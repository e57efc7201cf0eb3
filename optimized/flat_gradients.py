"""Gradients in flat buffers, averaged over all ranks (eigenstate_lm, 004.15; ups, 002.7)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from optimized.buckets import Bucket
from optimized.over_ranks import agreed


@dataclass(frozen=True)
class Boundary:
    """Results of the first part of a network, which are the inputs of the second part."""

    made: tuple[torch.Tensor, ...]
    """The results with the graph of the first part."""
    leaves: tuple[torch.Tensor, ...]
    """The same results, detached: the leaves of the second part's graph."""

    @classmethod
    def after(cls, made: Sequence[torch.Tensor]) -> Boundary:
        """Cut the autograd graph after these results."""
        return cls(tuple(made), tuple(t.detach().requires_grad_() for t in made))


class FlatGradients:
    """Gradients of named groups of weights, summed over the micro-batches of a step and averaged over the ranks.

    An all-reduce overlaps with the device's next operations. A gradient is a view of a buffer and has the same address
    in each step, so that a CUDA graph can capture the step. The process group has no error watchdog: if a rank is
    missing, the others wait forever.

    groups  name → weights; each group has one collective per step
    ranks   processes of the default group; with 1 nothing is reduced
    early   weights that the forward uses first, whose gradients come last: they have a collective of their own
    owner   this rank, if each rank updates a share of the weights (ZeRO, stage 1; Rajbhandari and others, 2020): it
            then gets only the gradients of its share. None: each rank updates all weights
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[torch.Tensor]],
        ranks: int,
        early: Iterable[torch.Tensor] = (),
        owner: int | None = None,
    ) -> None:
        self.ranks, self.owner = ranks, owner
        apart = set(map(id, early))
        self._late: dict[str, Bucket] = {}
        self._early: dict[str, Bucket] = {}
        self._views: dict[str, list[torch.Tensor]] = {}
        self._owned: dict[str, list[int]] = {}
        self._place = {id(w): place for weights in groups.values() for place, w in enumerate(weights)}
        for name, weights in groups.items():
            for buckets, chosen in (
                (self._late, [w for w in weights if id(w) not in apart]),
                (self._early, [w for w in weights if id(w) in apart]),
            ):
                if chosen:
                    buckets[name] = Bucket(chosen, ranks, owner)
            views = {id(bucket.weights[i]): bucket.views[i] for bucket in self._of(name) for i in bucket.owned}
            self._owned[name] = [i for i, w in enumerate(weights) if id(w) in views]
            self._views[name] = [views[id(weights[i])] for i in self._owned[name]]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all gradients."""
        return sum(bucket.buffer.nbytes for bucket in self.buckets)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of all groups."""
        return [*self._late.values(), *self._early.values()]

    def backward(
        self,
        loss: torch.Tensor,
        names: Sequence[str],
        last: Collection[str],
        boundary: Boundary | None = None,
    ) -> None:
        """Add a micro-batch's gradients to these groups.

        last      groups without a further micro-batch in the step
        boundary  the cut between the part with the early weights and the rest. With it, the all-reduces of `last` start
                  before the backward of the early weights. Without it, `begin` starts all of them
        """
        late = [self._late[name] for name in names if name in self._late]
        early = [self._early[name] for name in names if name in self._early]
        first, second = (late, early) if boundary is not None else ([*late, *early], [])
        leaves = boundary.leaves if boundary is not None else ()
        # `add` copies these gradients: those of a compiled network are in graph memory, which its next call overwrites.
        found = torch.autograd.grad(loss / self.ranks, [*_weights(first), *leaves])
        gradients = iter(found)
        for bucket in first:
            bucket.add(gradients)
        if boundary is None:
            return
        for name in names:
            if name in last and name in self._late and name in self._early:
                self._late[name].reduce()
        gradients = iter(torch.autograd.grad(boundary.made, _weights(second), grad_outputs=list(gradients)))
        for bucket in second:
            bucket.add(gradients)

    def begin(self, name: str, number: torch.Tensor) -> None:
        """Start the remaining collectives of a group, which also compute the mean of a number, 0-d, over the ranks."""
        buckets = self._of(name)
        buckets[-1].note(number / self.ranks)
        for bucket in buckets:
            bucket.reduce()

    def finished(self, name: str) -> list[torch.Tensor]:
        """Return the reduced gradients of the weights whose indices `owned` returns.

        On a GPU, the device waits for them and the host does not.
        """
        for bucket in self._of(name):
            bucket.wait()
        return self._views[name]

    def owned(self, name: str) -> list[int]:
        """Return the indices in the group of the weights that this rank updates."""
        return self._owned[name]

    def send(self, name: str) -> None:
        """Start to send the group's weights that this rank has updated to all other ranks."""
        for bucket in self._of(name):
            bucket.send()

    def gathered(self, name: str, own: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return one tensor for each weight of a group, of its shape. All ranks must call it.

        own  index in the group → tensor, for weights that this rank updates. A tensor that no rank passes is 0
        """
        found: dict[int, torch.Tensor] = {}
        for bucket in self._of(name):
            places = [self._place[id(w)] for w in bucket.weights]
            tensors = bucket.gathered({i: own[place] for i, place in enumerate(places) if place in own})
            found |= dict(zip(places, tensors, strict=True))
        return [found[place] for place in sorted(found)]

    def number(self, name: str) -> torch.Tensor:
        """Return a view of the mean of the number over the ranks, 0-d."""
        return self._of(name)[-1].number

    def reset(self) -> None:
        """Begin a new step. This does nothing: the first gradients overwrite those of the previous step."""

    def agreed(self, *, finite: bool) -> bool:
        """Return whether the gradients are finite on all ranks. Without an owner, all ranks have the same gradients."""
        return finite if self.owner is None else agreed(finite=finite)

    def _of(self, name: str) -> list[Bucket]:
        """Return a group's buckets, in the order in which their gradients are computed."""
        return [buckets[name] for buckets in (self._late, self._early) if name in buckets]


def _weights(buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    return [weight for bucket in buckets for weight in bucket.weights]
