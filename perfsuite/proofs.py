"""The proofs of a pair: one list, for pytest's items and for `perfsuite.check`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perfsuite import execution
from perfsuite.pair import Pair, Side, as_side
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


@dataclass(frozen=True, slots=True)
class Proof:
    """One proof of a pair: of `side` in `dtype`, for kinds that concern one side."""

    kind: str
    dtype: str
    side_name: str = OPTIMIZED
    side: Side | None = None
    ranks: int = 1
    """The number of processes in which both sides are called."""

    @property
    def name(self) -> str:
        """Name as in the node id of its item, e.g. "gradients[bfloat16-triton]"."""
        if self.kind == RANKS:
            return f"{self.kind}[{self.ranks}]"
        if self.side is None:
            return self.kind
        return f"{self.kind}[{self.dtype}{'' if self.side_name == OPTIMIZED else f'-{self.side_name}'}]"


def of(pair: Pair) -> Iterator[Proof]:
    """Yield the pair's proofs, in the order in which they are made."""
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
