"""List the proofs of a pair, for pytest's items and for `perfsuite.check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.correctness import execution
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.records import OPTIMIZED

EQUIVALENCE, GRADIENTS, INTEGRITY, CONTEXTS, EFFECTS, OUTSIDE, RANKS, TRUTH = (
    "equivalence",
    "gradients",
    "integrity",
    "contexts",
    "effects",
    "outside",
    "ranks",
    "truth",
)
TURNS = 3
"""Checks that depend little on the draw take turns: each draw runs one in TURNS of them."""


@dataclass(frozen=True, slots=True)
class Proof:
    """One proof of a pair. `side` is None for kinds that are not run separately for each side and dtype."""

    kind: str
    dtype: str
    side_name: str = OPTIMIZED
    side: Side | None = None
    ranks: int = 1
    """Number of processes in which both sides are called."""

    @property
    def name(self) -> str:
        """Name in the node id of the proof's item, e.g. "gradients[bfloat16-triton]"."""
        if self.kind == RANKS:
            return f"{self.kind}[{self.ranks}]"
        if self.side is None:
            return self.kind
        return f"{self.kind}[{self.dtype}{'' if self.side_name == OPTIMIZED else f'-{self.side_name}'}]"


def has_turn(check: Callable[..., Any], in_turn: Sequence[Callable[..., Any]], number: int | None) -> bool:
    """Return whether this draw of a proof runs the check, which may be one of those that take turns.

    number  number of the draw, from 0; None for a draw that runs all checks
    """
    return number is None or check not in in_turn or (in_turn.index(check) + number) % TURNS == 0


def of(pair: Pair) -> Iterator[Proof]:
    """Yield the pair's proofs, in the order in which they run."""
    sides = {OPTIMIZED: as_side(pair.optimized), **{name: as_side(side) for name, side in pair.variants.items()}}
    kinds = [EQUIVALENCE]
    if pair.gradients and not pair.is_stateful and execution.differentiable(pair):
        kinds.append(GRADIENTS)
    for kind in kinds:
        for name, side in sides.items():
            for dtype in pair.dtypes:
                yield Proof(kind, dtype, name, side)
    for kind in (INTEGRITY, CONTEXTS, EFFECTS, OUTSIDE):
        yield Proof(kind, pair.dtypes[0])
    for ranks in pair.ranks:
        yield Proof(RANKS, pair.dtypes[0], ranks=ranks)
    if pair.truth is not None:
        yield Proof(TRUTH, "float64")
