"""The check of effects distributes its kinds over the draws of a proof."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perfsuite import Pair, module, tensor
from perfsuite.correctness import effects
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case

CASE = Case(dtype="float32", sizes={"n": 5}, inputs={}, seed=3)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize("number", [None, 0, 1, 2, 3])
def test_inputs_are_built_before_a_side_is_watched(number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a module draws random numbers on the GPU, which would be reported as an effect of the side."""
    order: list[str] = []
    build = make.build

    def building(pair: Pair, case: Case, *given: object, **more: object) -> object:
        if case.seed == CASE.seed:
            order.append("made")
        return build(pair, case, *given, **more)  # type: ignore[arg-type]  # passed on as they are

    def watched(x: torch.Tensor) -> torch.Tensor:
        order.append("called")
        return 2 * x

    monkeypatch.setattr(make, "build", building)
    pair = Pair(name="p", reference=double, optimized=watched, inputs={"x": tensor("n")})
    effects.check(pair, CASE, "cpu", number=number)
    assert order[0] == "made"
    assert order.count("made") == 1
    assert "called" in order


def test_three_draws_cover_every_kind_of_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[set[str]] = []

    def noting(kind: effects.Kind) -> effects.Kind:
        def note(probe: effects.Probe) -> effects.Effects:
            tried[-1].add(kind.__name__)
            return {}

        return note

    every = [kind.__name__ for kind in effects.KINDS]
    noted = {kind: noting(kind) for kind in effects.KINDS}
    monkeypatch.setattr(effects, "KINDS", tuple(noted.values()))
    monkeypatch.setattr(effects, "IN_TURN", tuple(noted[kind] for kind in effects.IN_TURN))
    pair = Pair(name="p", reference=double, optimized=double, inputs={"x": tensor("n")})
    for number in (0, 1, 2, 3):
        tried.append(set())
        effects.check(pair, CASE, "cpu", number=number)
    assert tried[0] == set(every)
    assert tried[1] | tried[2] | tried[3] == set(every)
    assert all(len(kinds) < len(every) for kinds in tried[1:])


def applied(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net(x)  # type: ignore[no-any-return]


def with_gradients(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        torch.autograd.backward(net(x).sum())
    return applied(net, x)


def with_gradients_cleared(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    net.zero_grad()
    return applied(net, x)


@pytest.mark.parametrize(
    ("optimized", "says"),
    [
        (with_gradients, "leaves the .grad of net.weight set, which the reference does not"),
        (with_gradients_cleared, "changes the .grad of net.weight, which the reference does not"),
    ],
)
def test_call_that_changes_gradients_is_refused_unless_the_reference_does_so(optimized: Any, says: str) -> None:
    inputs = {"net": module(lambda: torch.nn.Linear(3, 2)), "x": tensor("n", 3)}

    def pair(reference: Any) -> Pair:
        return Pair(name="p", reference=reference, optimized=optimized, inputs=inputs, gradients=False)

    with pytest.raises(NotEquivalent, match=says):
        effects.check(pair(applied), CASE, "cpu")
    effects.check(pair(optimized), CASE, "cpu")
