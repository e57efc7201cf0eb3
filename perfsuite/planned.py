"""The draws that a proof of a pair makes before, or beside, the random ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from perfsuite import ahead, coverage, incoming, proofs
from perfsuite.kinds import Extent
from perfsuite.pair import Pair
from perfsuite.records import Case
from perfsuite.tally import Tally

WITH_LARGE = {proofs.INTEGRITY: None, proofs.CONTEXTS: 1, proofs.EFFECTS: 1}
"""Kinds of proofs that call the sides often on each draw → how many draws with a large size they take, or all (None).
Only these draws show what many blocks do together."""

FURTHER = 3
"""Most plain draws after random ones that prove too little. A pair with few draws has only tiny ones now and then."""
FEW_STEPS = 17
"""Most steps of a draw that holds kinds of inputs; the random draws take all steps."""


def every_kind(
    pair: Pair, proof: str, dtype: str, seed: int, device: str, *, compiles: Callable[[], bool] = lambda: False
) -> Iterator[Case]:
    """Yield the draws that hold every kind of inputs; none for a pair that limits its draws. See `coverage.draws`.

    Where the `proof` is of gradients, the draws take the kinds of incoming gradients in turn.
    """
    if pair.max_examples is not None:
        return iter(())
    cases = coverage.draws(pair, dtype, seed, extent=extent(pair, device), compiles=compiles)
    if pair.is_stateful:
        return (replace(case, steps=FEW_STEPS) for case in cases)
    return incoming.in_turn(cases) if proof == proofs.GRADIENTS else cases


def large(pair: Pair, proof: str, dtype: str, seed: int, device: str) -> Iterator[Case]:
    """Yield the draws with a large size that such a `proof` takes; none for a pair that limits its draws."""
    if proof not in WITH_LARGE or pair.max_examples is not None or not extent(pair, device).large:
        return iter(())
    return itertools.islice(coverage.large_draws(pair, dtype, seed), WITH_LARGE[proof])


def further(pair: Pair, dtype: str, seed: int, device: str, tally: Tally) -> Iterator[Case]:
    """Yield plain draws while the draws in the tally prove too little, perhaps by chance."""
    draws = coverage.plain_draws(pair, dtype, seed, extent=extent(pair, device))
    for _ in range(FURTHER):
        if not tally.proves_too_little or (case := next(draws, None)) is None:
            return
        yield case


def extent(pair: Pair, device: str) -> Extent:
    """Return the extent of the sizes. Where kernels are interpreted, on a CPU, each block takes milliseconds."""
    on_cpu = device == "cpu"
    return Extent(small=on_cpu, large=not on_cpu or not ahead.kernels_of(pair))
