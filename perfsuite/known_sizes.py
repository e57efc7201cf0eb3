"""The sizes of a pair's draws where its sides compile for each: few different ones, and the same in every run.

A kernel that is compiled by size takes seconds for each new one. So new sizes are drawn until compiling has taken
`BUDGET_S` in this process; later draws have other values, layouts and seeds at sizes that were drawn before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

from perfsuite import compiling
from perfsuite import inputs as make
from perfsuite.coverage import FEWEST
from perfsuite.pair import Pair
from perfsuite.records import Case

BUDGET_S = 3.0
"""Seconds of draws that compile, after which no new sizes are drawn."""


class KnownSizes:
    """The sizes that one pair's draws have had in this process."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self.budget_s = budget_s
        self.compiles = False
        """Whether any draw has compiled something, or read it from a cache."""
        self.spent_s = 0.0
        """What draws that compiled have taken."""
        self._known: dict[str, dict[str, Any]] = {}
        self._settled: dict[str, Case] = {}

    def settled(self, pair: Pair, case: Case) -> Case:
        """The draw itself, or with known sizes once new ones have cost the budget; the same answer each time."""
        line = make.case_line(case)
        if line not in self._settled:
            self._settled[line] = self._chosen(pair, case)
        return self._settled[line]

    def _chosen(self, pair: Pair, case: Case) -> Case:
        if self.spent_s <= self.budget_s or _key(case) in self._known:
            return case
        plain = _is_plain(pair, case.sizes)
        among = [sizes for sizes in self._known.values() if _is_plain(pair, sizes) or not plain]
        if not among:
            return case
        sizes = among[case.seed % len(among)]
        # A float is no constant of a kernel, and no bound depends on it.
        return replace(case, sizes=sizes | {n: v for n, v in case.sizes.items() if isinstance(v, float)})

    @contextmanager
    def noting(self, case: Case) -> Iterator[None]:
        """Around the proof of a draw: notes what it compiled, and that its sizes are known."""
        began, before = perf_counter(), compiling.so_far()
        try:
            yield
        finally:
            after = compiling.so_far()
            self.compiles |= after != before
            if (after.graphs, after.kernels) != (before.graphs, before.kernels):
                self.spent_s += perf_counter() - began
            self._known.setdefault(_key(case), dict(case.sizes))


def _key(case: Case) -> str:
    return repr(sorted((n, v) for n, v in case.sizes.items() if not isinstance(v, float)))


def _is_plain(pair: Pair, sizes: Mapping[str, Any]) -> bool:
    """Whether every dimension has elements, so that values and layouts show something."""
    return all(sizes[name] >= FEWEST for name in pair.symbols)
