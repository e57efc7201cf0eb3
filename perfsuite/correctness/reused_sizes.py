"""Reuse a few sizes and layouts in a pair's draws if its sides compile for each of them.

Compiling for a size, or for the strides of inputs, takes seconds each time. So new sizes and layouts are drawn only
until the draws that compile have taken `BUDGET_S` in this process. Later draws have new values, at sizes and layouts
that were drawn before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from perfsuite.correctness import compilations
from perfsuite.declare.pair import Pair
from perfsuite.draws.cases import SMALL_HIGH, case_line
from perfsuite.draws.input_kinds import FEWEST
from perfsuite.records import Case, InputCase

BUDGET_S = 1.0
"""Total seconds of draws that compile, after which no new sizes and layouts are drawn. Draws with a backward pass have
their own kernels, and so a separate budget of the same size."""


class ReusedSizes:
    """Sizes and layouts that one pair's draws have had in this process."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self.budget_s = budget_s
        self.compiles = False
        """Whether any draw has compiled something, or read it from a cache."""
        self.forward, self.backward = _Known(), _Known()
        """Sizes and layouts of all draws, and those of draws with a backward pass."""
        self._settled: dict[tuple[str, str, bool], Case] = {}

    def settled(
        self, pair: Pair, case: Case, *, gradients: bool = False, few: bool = False, plans: bool = False
    ) -> Case:
        """Return the draw itself or, when the budget for new sizes and layouts is used up, the draw with known ones.

        The result for a draw never changes. With `gradients`, the known sizes are those of draws with a backward pass,
        if these have used up their budget. With `few`, this proof calls a side many times per draw. Known sizes are
        then reused as soon as there are any, if the side compiles or the device's libraries plan for each size
        (`plans`), as cuDNN does.
        """
        asked = case.dtype, case_line(case), gradients
        if asked not in self._settled:
            self._settled[asked] = self._chosen(pair, case, gradients, few and (self.compiles or plans))
        return self._settled[asked]

    def _chosen(self, pair: Pair, case: Case, gradients: bool, few: bool) -> Case:
        of_kind = (self.backward, self.forward)[not gradients :]
        known_enough = [k for k in of_kind if k.spent_s > self.budget_s or (few and k.cases)]
        if not known_enough or _key(case) in known_enough[0].cases:
            return case
        plain, contiguous = _is_plain(pair, case), _is_contiguous(case)
        every = known_enough[0].cases.values()
        among = [k for k in every if (_is_plain(pair, k) or not plain) and (_is_contiguous(k) or not contiguous)]
        if few:  # the reference may be slow at large sizes
            among = [k for k in among if _is_small(pair, k)] or among
        if not among:
            return case
        known = among[case.seed % len(among)]
        regimes = {name: how.regime for name, how in case.inputs.items()}
        layouts = {name: how.layout for name, how in known.inputs.items()}
        inputs = {
            name: InputCase(layout=layouts.get(name, "contiguous"), regime=regimes.get(name, "normal"))
            for name in {**layouts, **regimes}
        }
        # The draw keeps its own floats, because kernels are not specialised on them, and no bound depends on them.
        sizes = {**known.sizes, **{n: v for n, v in case.sizes.items() if isinstance(v, float)}}
        return replace(case, sizes=sizes, inputs={n: how for n, how in inputs.items() if how != InputCase()})

    @contextmanager
    def noting(self, case: Case, *, gradients: bool = False) -> Iterator[None]:
        """Wrap the proof of a draw. Record whether it compiled, how long it took, and its sizes and layouts."""
        began, before = perf_counter(), compilations.so_far()
        try:
            yield
        finally:
            after = compilations.so_far()
            self.compiles |= after != before
            if (after.graphs, after.kernels) != (before.graphs, before.kernels):
                (self.backward if gradients else self.forward).spent_s += perf_counter() - began
            for known in (self.forward, self.backward)[: 1 + gradients]:
                known.cases.setdefault(_key(case), case)


@dataclass(slots=True)
class _Known:
    cases: dict[str, Case] = field(default_factory=dict)
    """Cases by their sizes and layouts."""
    spent_s: float = 0.0
    """Total seconds of the draws that compiled."""


def _key(case: Case) -> str:
    sizes = sorted((n, v) for n, v in case.sizes.items() if not isinstance(v, float))
    return repr((sizes, sorted((n, how.layout) for n, how in case.inputs.items() if how.layout != "contiguous")))


def _is_small(pair: Pair, case: Case) -> bool:
    """Return whether every size is at most SMALL_HIGH."""
    return all(case.sizes[name] <= SMALL_HIGH for name in pair.symbols)


def _is_plain(pair: Pair, case: Case) -> bool:
    """Return whether every size is at least FEWEST, so that values and layouts matter."""
    return all(case.sizes[name] >= FEWEST for name in pair.symbols)


def _is_contiguous(case: Case) -> bool:
    return all(how.layout == "contiguous" for how in case.inputs.values())
