"""If a side compiles for each size, later draws reuse sizes that were drawn before."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite import Pair, floats, scalar, tensor
from perfsuite.correctness import compilations
from perfsuite.correctness.reused_sizes import ReusedSizes
from perfsuite.draws import coverage
from perfsuite.records import Case, InputCase

OF = {"x": tensor("n"), "p": scalar(floats(0, 1))}
PAIRS = SimpleNamespace(one=Pair(name="p", reference=torch.add, optimized=torch.add, inputs=OF))


def case(n: int, seed: int = 0, p: float = 0.5) -> Case:
    return Case(dtype="float32", sizes={"n": n, "p": p}, inputs={}, seed=seed)


class Compiler:
    """Stand-in for Triton that reports what it compiles."""

    def __init__(self) -> None:
        self.compilation = SimpleNamespace(listener=None)

    def compile(self, cache_hit: bool = False) -> None:
        if self.compilation.listener is not None:
            self.compilation.listener(src=None, times=None, cache_hit=cache_hit)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setitem(sys.modules, "triton.knobs", compiler)  # type: ignore[arg-type]  # stands for the module
    return compiler


def test_new_sizes_are_drawn_until_compilation_has_used_the_budget(triton: Compiler) -> None:
    known = ReusedSizes(budget_s=0.0)
    assert known.settled(PAIRS.one, case(3)) == case(3)  # nothing is known yet
    with known.noting(case(3)):
        triton.compile()
    with known.noting(case(0)):
        triton.compile()
    assert known.forward.spent_s > 0
    assert known.settled(PAIRS.one, case(7, seed=1, p=0.25)) == case(3, seed=1, p=0.25)
    assert {known.settled(PAIRS.one, case(1, seed=s)).sizes["n"] for s in range(9)} == {0, 3}
    assert known.settled(PAIRS.one, case(3, seed=5)) == case(3, seed=5)


def test_known_layouts_are_reused_and_regimes_stay_as_drawn(triton: Compiler) -> None:
    known = ReusedSizes(budget_s=0.0)
    strided = replace(case(3), inputs={"x": InputCase(layout="strided")})
    with known.noting(strided):
        triton.compile()
    drawn = replace(case(7), inputs={"x": InputCase(layout="offset", regime="huge")})
    assert known.settled(PAIRS.one, drawn) == replace(
        drawn, sizes=case(3).sizes, inputs={"x": InputCase(layout="strided", regime="huge")}
    )
    assert known.settled(PAIRS.one, case(7)) == case(7)  # a plain draw stays one


def test_sizes_of_a_contiguous_draw_with_another_regime_are_reused(triton: Compiler) -> None:
    known = ReusedSizes(budget_s=0.0)
    with known.noting(replace(case(3), inputs={"x": InputCase(regime="huge")})):
        triton.compile()
    assert known.settled(PAIRS.one, case(7)) == case(3)


def test_settled_draws_are_cached_per_dtype() -> None:
    known = ReusedSizes()
    other = replace(case(3), dtype="bfloat16")
    assert known.settled(PAIRS.one, case(3)) == case(3)
    assert known.settled(PAIRS.one, other) == other


def test_settled_returns_the_same_sizes_for_the_same_draw_every_time(triton: Compiler) -> None:
    known = ReusedSizes(budget_s=0.0)
    first = known.settled(PAIRS.one, case(9))
    with known.noting(case(3)):
        triton.compile()
    assert known.settled(PAIRS.one, case(9)) == first == case(9)


def test_draws_with_a_backward_pass_have_their_own_budget_and_known_sizes(triton: Compiler) -> None:
    known = ReusedSizes(budget_s=0.0)
    with known.noting(case(3)):
        triton.compile()
    # No backward pass has compiled at 3 yet, but its forward call has.
    assert known.settled(PAIRS.one, case(7), gradients=True) == case(3)
    with known.noting(case(4), gradients=True):
        triton.compile()
    assert {known.settled(PAIRS.one, case(1, seed=s), gradients=True).sizes["n"] for s in range(9)} == {4}
    assert {known.settled(PAIRS.one, case(1, seed=s)).sizes["n"] for s in range(9)} == {3, 4}


def test_few_reuses_known_sizes_before_the_budget_is_spent(triton: Compiler) -> None:
    known = ReusedSizes(budget_s=9.0)
    assert known.settled(PAIRS.one, case(5), few=True) == case(5)
    with known.noting(case(3)):
        triton.compile(cache_hit=True)
    assert known.settled(PAIRS.one, case(7), few=True) == case(3)
    assert known.settled(PAIRS.one, case(8)) == case(8)


def test_few_reuses_known_sizes_if_libraries_plan_for_each_size() -> None:
    known = ReusedSizes()
    with known.noting(case(3)):
        pass
    assert known.settled(PAIRS.one, case(7), few=True, plans=True) == case(3)
    assert known.settled(PAIRS.one, case(7, seed=1), few=True) == case(7, seed=1)
    assert known.settled(PAIRS.one, case(8), plans=True) == case(8)


def test_few_prefers_small_known_sizes() -> None:
    known = ReusedSizes()
    for n in (2056, 3, 1024):
        with known.noting(case(n)):
            pass
    assert {known.settled(PAIRS.one, case(7, seed=s), few=True, plans=True).sizes["n"] for s in range(9)} == {3}
    large = ReusedSizes()
    with large.noting(case(1024)):
        pass
    assert large.settled(PAIRS.one, case(7), few=True, plans=True).sizes["n"] == 1024


def test_kernels_read_from_the_cache_do_not_use_the_budget(triton: Compiler) -> None:
    known = ReusedSizes()
    with known.noting(case(3)):
        triton.compile(cache_hit=True)
    assert known.compiles
    assert known.forward.spent_s == 0


def test_draws_of_a_side_that_does_not_compile_are_unchanged() -> None:
    known = ReusedSizes(budget_s=0.0)
    with known.noting(case(3)):
        pass
    assert not known.compiles
    assert known.settled(PAIRS.one, case(7)) == case(7)


def test_a_compilation_listener_set_by_the_user_is_still_called(triton: Compiler) -> None:
    heard: list[Any] = []
    triton.compilation.listener = lambda **said: heard.append(said["cache_hit"])
    before = compilations.so_far()
    triton.compile()
    assert heard == [False]
    assert compilations.so_far().kernels == before.kernels + 1


def test_planned_draws_have_the_same_sizes_in_every_run() -> None:
    def sizes(seed: int) -> list[int]:
        return [c.sizes["n"] for c in coverage.draws(PAIRS.one, "float32", seed, compiles=lambda: True)]

    first, second = sizes(1), sizes(2)
    assert set(first) == set(second)


def test_planned_draws_of_a_compiled_side_set_all_sizes_to_0_or_all_to_1() -> None:
    of = Pair(name="p", reference=torch.add, optimized=torch.add, inputs={"x": tensor("n", "m")})
    found = [c.sizes for c in coverage.draws(of, "float32", 1, compiles=lambda: True)]
    assert {"n": 0, "m": 0} in found
    assert {"n": 1, "m": 1} in found
    assert sum(0 in sizes.values() for sizes in found) == 1
