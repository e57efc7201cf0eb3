"""Calls on more elements than 32 bits can count, tested with a smaller limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from perfsuite import Pair, Workload, size, tensor
from perfsuite.correctness import contexts, many_elements
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.declare.sides import as_side
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case

LIMIT = 1 << 12
CASE = Case(dtype="float32", sizes={"n": 5, "k": 3}, inputs={}, seed=0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_elements, "ELEMENTS", LIMIT)
    monkeypatch.setattr(many_elements, "MORE", 1 << 8)
    monkeypatch.setattr(many_elements, "PERIOD", 101)
    monkeypatch.setattr(many_elements, "free_bytes", lambda device: 1 << 30)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def overflowing(x: torch.Tensor) -> torch.Tensor:
    out = 2 * x
    out.view(-1)[LIMIT:] = 0
    return out


def raising(x: torch.Tensor) -> torch.Tensor:
    if x.numel() > LIMIT:
        raise ValueError("invalid configuration argument\nmore")
    return 2 * x


def pair(optimized: Callable[..., Any], reference: Callable[..., Any] = double, **fields: Any) -> Pair:
    made = {"inputs": {"x": tensor("n", "k")}, "workloads": [Workload("w", n=9, k=3)], "name": "p"}
    return Pair(reference=reference, optimized=optimized, **{**made, **fields})


def check(of: Pair) -> None:
    many_elements.check(
        Probe(pair=of, side=as_side(of.optimized), name="optimized", case=CASE, device="cpu", home=None)
    )


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (overflowing, r"wrong on more than 4096 elements \(n=1451,k=3;seed=0\): 2\d\d elements of output are far"),
        (raising, r"raises ValueError: invalid configuration argument on more than 4096 elements"),
    ],
)
def test_an_index_overflow_is_detected(side: Callable[..., Any], message: str) -> None:
    with pytest.raises(NotEquivalent, match=message):
        check(pair(side))


def test_a_correct_side_passes_despite_rounding() -> None:
    check(pair(lambda x: x.half().float() * 2))


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": {"n": size(1, 33), "k": size(1, 33)}},
        {"where": lambda n, k: n < 100 and k < 100},
        {"mutates": {"x"}},
        {"consumes": {"x"}},
    ],
    ids=["bounded sizes", "a condition", "changed in place", "used up"],
)
def test_bounded_sizes_conditions_and_changed_inputs_are_skipped(fields: dict[str, Any]) -> None:
    check(pair(overflowing, **fields))


def test_long_case_enlarges_a_size_that_is_not_bounded() -> None:
    found = many_elements.long_case(pair(double, sizes={"n": size(1, 33)}), CASE)
    assert found is not None
    assert found[1] == "k"
    assert found[0].sizes["n"] == 5
    assert found[0].sizes["k"] * 5 > LIMIT


def test_check_is_skipped_without_enough_memory_or_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100 if x.numel() > LIMIT else 0):
            time.sleep(0.01)
        return 2 * x

    monkeypatch.setattr(many_elements, "LONGEST_S", 0.05)
    check(pair(overflowing, slow))
    monkeypatch.setattr(many_elements, "free_bytes", lambda device: 1000)
    check(pair(overflowing))


def test_contexts_check_many_elements_only_if_thorough() -> None:
    contexts.check(pair(overflowing), CASE, "cpu")
    with pytest.raises(NotEquivalent, match=r"unsupported=\{'many_elements': 'why'\}"):
        contexts.check(pair(overflowing), CASE, "cpu", thorough=True)
    contexts.check(pair(overflowing, unsupported={"many_elements": "for short rows"}), CASE, "cpu", thorough=True)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("expected", "got", "count"),
    [
        ([1.0, INF, -INF, NAN], [1.0, INF, -INF, NAN], 0),
        ([1.0, INF, -INF, NAN], [1.0, 0.0, INF, 0.0], 3),
        ([1.0, 2.0], [INF, NAN], 2),
        ([1 + 1j, 2j], [1 + 1j, -2j], 1),
        ([1, 2, 3], [1, 2, 4], 1),
    ],
)
def test_wrong_elements_are_counted(expected: list[Any], got: list[Any], count: int) -> None:
    assert many_elements._wrong(torch.tensor(expected), torch.tensor(got)) == count
