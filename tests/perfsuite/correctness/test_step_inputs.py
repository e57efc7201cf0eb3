"""Inputs of a step that the step changes, writes or empties are compared, as those of a call are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from perfsuite import NotEquivalent, Pair, Workload, api, floats, listof, measure, stateful, tensor
from perfsuite.correctness import contexts, integrity
from perfsuite.declare.sides import as_side
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Case
from perfsuite.timing.runner import Runner

Call = Callable[..., Any]
VECTOR = tensor("n", values=floats(-4, 4))
CASE = Case(dtype="float32", sizes={"n": 5, "count": 3}, inputs={}, seed=5)


def pair(reference: Call, optimized: Call, **fields: Any) -> Pair:
    made = {"inputs": {"total": VECTOR}, "step_inputs": {"x": VECTOR}, "steps": (1, 3), "name": "p"}
    workload = Workload("w", n=5, **({"count": 3} if "xs" in fields.get("step_inputs", {}) else {}))
    return Pair(
        reference=stateful(steps(reference)),
        optimized=stateful(steps(optimized)),
        workloads=[workload],
        **{**made, **fields},
    )


def steps(step: Call) -> Call:
    return lambda total: lambda *given: step(total, *given)


def doubling(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return total.add_(x.mul_(2)).sum()


def doubling_by_addition(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return total.add_(x.add_(x)).sum()


def leaving(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return total.add_(x * 2).sum()


def leaving_after_first(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    seen = vars(total).setdefault("seen", [])
    seen.append(1)
    return doubling(total, x) if len(seen) == 1 else leaving(total, x)


def into(total: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    total.add_(x)
    out.copy_(total)


def by_copy(total: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(total, x, out=total)
    torch.mul(total, 1, out=out)


def into_all_but_first(total: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    total.add_(x)
    out[1:].copy_(total[1:])


def from_list(total: torch.Tensor, xs: list[torch.Tensor]) -> torch.Tensor:
    for x in xs:
        total.add_(x)
    return total.sum()


def emptying(total: torch.Tensor, xs: list[torch.Tensor]) -> torch.Tensor:
    found = from_list(total, xs)
    xs.clear()
    return found


def popping(total: torch.Tensor, xs: list[torch.Tensor]) -> torch.Tensor:
    while xs:
        total.add_(xs.pop(0))
    return total.sum()


CHANGED = {"x": "changed", "total": "changed"}
WRITTEN = {"step_inputs": {"x": VECTOR, "out": tensor("n")}, "mutates": {"out": "written", "total": "changed"}}
LISTS = {"step_inputs": {"xs": listof("count", VECTOR)}}


@pytest.mark.parametrize(
    ("reference", "optimized", "fields"),
    [
        (doubling, doubling_by_addition, {"mutates": CHANGED}),
        (into, by_copy, WRITTEN),
        (emptying, popping, LISTS | {"mutates": {"xs": "changed", "total": "changed"}}),
        (from_list, popping, LISTS | {"mutates": {"total"}, "consumes": {"xs"}}),
        (emptying, popping, LISTS | {"mutates": {"total"}}),
    ],
)
def test_declared_changes_of_step_inputs_are_proven(reference: Call, optimized: Call, fields: dict[str, Any]) -> None:
    api.check(pair(reference, optimized, **fields), examples=3, device="cpu")


@pytest.mark.parametrize("optimized", [leaving, leaving_after_first])
def test_a_change_of_a_step_input_that_is_missing_is_found(optimized: Call) -> None:
    with pytest.raises(NotEquivalent, match=r"x \(in place\) after \d steps? of the optimized side is wrong"):
        api.check(pair(doubling, optimized, mutates=CHANGED), examples=3, device="cpu")


def test_an_unwritten_element_of_a_step_input_is_found() -> None:
    with pytest.raises(NotEquivalent, match=r"out \(in place\) after 1 step of the optimized side is nan at \[0\]"):
        api.check(pair(into, into_all_but_first, **WRITTEN), examples=3, device="cpu")


def test_a_list_of_a_step_that_only_the_optimized_side_empties_is_found() -> None:
    with pytest.raises(NotEquivalent, match=r"the optimized side removes xs\[0\] from its input"):
        integrity.check(pair(from_list, emptying, **LISTS, mutates={"total"}), CASE, "cpu")
    contexts.check(pair(emptying, popping, **LISTS, mutates={"total"}), CASE, "cpu")


def test_changed_step_inputs_are_restored_before_each_timed_call() -> None:
    made = pair(doubling, doubling, mutates=CHANGED)
    master = {"x": torch.ones(5)}
    runner = Runner("optimized", as_side(made.optimized), made, CASE, "forward", "cpu", step_master=master)
    runner.allocate({"total": torch.zeros(5)}, random.Random(0))
    for calls in (1, 2):
        runner.reset()
        runner.call()
        assert runner.step_inputs["x"].tolist() == [2.0] * 5
        assert runner.inputs["total"].tolist() == [2.0 * calls] * 5, "the state is not restored"
    runner.refill({"x": torch.full((5,), 3.0)})
    runner.call()
    assert runner.leaves()["x (in place)"].tolist() == [6.0] * 5
    runner.reset()
    assert runner.step_inputs["x"].tolist() == [3.0] * 5


@pytest.mark.parametrize("mutates", [{"xs": "changed", "total": "changed"}, {"total": "changed"}])
def test_a_list_that_a_timed_step_empties_must_be_consumed(mutates: dict[str, str]) -> None:
    with pytest.raises(PerfsuiteError, match=r"leaves 0 of 3 tensors in its input xs, .* declare consumes=\{'xs'\}"):
        measure(pair(emptying, popping, **LISTS, mutates=mutates), device="cpu")


def test_a_list_that_a_timed_call_empties_must_be_consumed() -> None:
    def emptied(xs: list[torch.Tensor]) -> torch.Tensor:
        return xs.pop() * xs.pop()

    made = Pair(
        reference=emptied,
        optimized=emptied,
        inputs={"xs": listof(2, VECTOR)},
        workloads=[Workload("w", n=5)],
        name="p",
    )
    with pytest.raises(PerfsuiteError, match=r"leaves 0 of 2 tensors in its input xs, .* declare consumes=\{'xs'\}"):
        measure(made, device="cpu")
