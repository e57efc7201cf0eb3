"""Choose the draws of a proof that are not random."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from perfsuite.correctness import incoming_gradients, proofs
from perfsuite.correctness.tally import Tally
from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import RANKS, Size
from perfsuite.draws import coverage
from perfsuite.draws.cases import case_line
from perfsuite.draws.input_kinds import Extent
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case
from perfsuite.session import aot_compile

WITH_LARGE = {proofs.INTEGRITY: None, proofs.CONTEXTS: 1, proofs.EFFECTS: 1}
"""Kind of proof that calls the sides often on each draw → number of draws with a large size, or None for all of them.
Only these draws have several blocks of a kernel."""

FURTHER = 3
"""Most plain draws after random ones that prove too little. If a pair has few draws, all may be tiny by chance."""
FEW_STEPS = 17
"""Most steps of a draw that is planned for kinds of inputs. Random draws run all steps."""


def every_kind(
    pair: Pair, proof: str, dtype: str, seed: int, device: str, *, compiles: Callable[[], bool] = lambda: False
) -> Iterator[Case]:
    """Yield draws that together contain every kind of inputs; none for a pair that limits its draws. See
    `coverage.draws`.

    If the `proof` is of gradients, the draws cycle through the kinds of incoming gradients.
    """
    if pair.max_examples is not None:
        return iter(())
    cases = coverage.draws(pair, dtype, seed, extent=extent(pair, device), compiles=compiles)
    if pair.is_stateful:
        return (replace(case, steps=FEW_STEPS) for case in cases)
    return incoming_gradients.in_turn(cases) if proof == proofs.GRADIENTS else cases


def cut_after_failure(prove: Callable[[Case], None]) -> Callable[[Case], None]:
    """Return a function that proves a draw of a stateful pair. After a failure, it runs draws only for the steps after
    which that one was wrong, because dozens of other draws shrink it. A draw that failed is run for the same steps
    again."""
    failed: dict[str, int] = {}

    def prove_some_steps(case: Case) -> None:
        drawn = case_line(case)
        if failed:
            case = replace(case, steps=failed.get(drawn) or min(failed.values()))
        try:
            prove(case)
        except NotEquivalent as error:
            if error.steps is not None:
                failed[drawn] = error.steps
            raise

    return prove_some_steps


def large(pair: Pair, proof: str, dtype: str, seed: int, device: str) -> Iterator[Case]:
    """Yield the draws with a large size for a kind of `proof`; none for a pair that limits its draws."""
    if proof not in WITH_LARGE or pair.max_examples is not None or not extent(pair, device).large:
        return iter(())
    return itertools.islice(coverage.large_draws(pair, dtype, seed), WITH_LARGE[proof])


def further(pair: Pair, dtype: str, seed: int, device: str, tally: Tally) -> Iterator[Case]:
    """Yield plain draws, at most FURTHER, while the draws in the tally prove too little, perhaps by chance."""
    draws = coverage.plain_draws(pair, dtype, seed, extent=extent(pair, device))
    for _ in range(FURTHER):
        if not tally.proves_too_little or (case := next(draws, None)) is None:
            return
        yield case


def in_ranks(pair: Pair, dtype: str, seed: int, device: str) -> Iterator[Case]:
    """Yield draws in which all sizes are multiples of the number of ranks, all except one, and all are 1, as far as the
    pair allows them; none for a pair that limits its draws. A side may divide any of its tensors among the ranks."""
    if pair.max_examples is not None:
        return
    names, ranks = sorted(pair.symbols - {RANKS}), pair.at_ranks
    plans: list[dict[str, int | None]] = [
        {name: _near(pair, name, ranks, divides=name != other) for name in names} for other in (None, *names)
    ]
    plans.append({name: 1 for name in names if (pair.size_of(name) or Size()).allows(1)})
    for plan in plans:
        sizes = {name: Size(low=n, high=n) for name, n in plan.items() if n is not None}
        of = replace(pair, sizes={**pair.sizes, **sizes})
        for case in itertools.islice(coverage.plain_draws(of, dtype, seed, extent=extent(pair, device)), 1):
            yield replace(case, steps=FEW_STEPS) if pair.is_stateful else case


def _near(pair: Pair, name: str, ranks: int, *, divides: bool) -> int | None:
    """Return a size near twice the number of ranks, which is a multiple of it or is not; None if there is none."""
    size = pair.size_of(name) or Size(low=1, high=4 * ranks)
    fitting = [n for n in range(max(1, size.low), size.high + 1) if size.allows(n) and (n % ranks == 0) == divides]
    return min(fitting, key=lambda n: abs(n - 2 * ranks), default=None)


def extent(pair: Pair, device: str) -> Extent:
    """Return the range of the sizes. It is smaller on a CPU, where each block of an interpreted kernel takes
    milliseconds."""
    on_cpu = device == "cpu"
    return Extent(small=on_cpu, large=not on_cpu or not aot_compile.kernels_of(pair))
