"""Produce the outputs of a side in one rank, and join those of all ranks into the outputs of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from perfsuite.correctness import execution, forms, side_calls
from perfsuite.correctness.execution import Leaves
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.draws import inputs as make
from perfsuite.draws import rank_parts
from perfsuite.records import Case


class ChangedInputError(Exception):
    """A side changed an input that the pair does not declare as changed."""


def prepared(
    pair: Pair, side: Side, case: Case, device: str, *, rank: int, ranks: int, home: Path | None
) -> Callable[[], Leaves]:
    """Build this rank's part of the case's inputs, and return a function that calls the side on them.

    That function returns the outputs. It raises ChangedInputError if the side changed an undeclared input.
    """

    def step_inputs(step: int) -> dict[str, Any]:
        return rank_parts.of_rank(pair.step_inputs, make.build_step(pair, case, device, step), rank, ranks)

    values = rank_parts.of_rank(pair.inputs, make.build(pair, case, device, home=home), rank, ranks)

    def call() -> Leaves:
        before = make.clone(values)
        returned = side_calls.run(side, pair, values, case, False, step_inputs)
        leaves = execution.copies_of(returned)  # at once, as a caller may read it
        for (path, now), (_, was) in zip(make.unchanging(pair, values), make.unchanging(pair, before), strict=True):
            if not forms.identical(now, was):
                # The reference is called first: if it changes the input, the optimized side is not called.
                by_reference = side.call is as_side(pair.reference).call
                raise ChangedInputError(make.undeclared_change(pair, path, now, by_reference=by_reference))
        return leaves

    return call


def placed_as(leaves: Leaves, truth: Leaves, device: str) -> Leaves:
    """Return outputs that were received in host memory, moved to the devices of the truth's outputs; those that the
    truth lacks are moved to `device`."""

    def place(name: str) -> torch.device | str:
        like = truth.get(name)
        return like.device if isinstance(like, torch.Tensor) else device

    return {n: leaf.to(place(n)) if isinstance(leaf, torch.Tensor) else leaf for n, leaf in leaves.items()}


def joined(of_ranks: Sequence[Leaves], truth: Leaves) -> Leaves:
    """Return the outputs of which each rank has a part, concatenated in the order of the ranks."""
    return {name: whole for name, t in truth.items() if (whole := _joined(of_ranks, name, t)) is not None}


def _joined(of_ranks: Sequence[Leaves], name: str, truth: Any) -> torch.Tensor | None:
    """Return the ranks' parts of this output as one tensor; None if each rank has the whole output, or if the parts do
    not fit together."""
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
