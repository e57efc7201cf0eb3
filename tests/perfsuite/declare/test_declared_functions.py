"""A mistake in adjust=, excuse=, truth= or where= is reported in one line that names the function and no side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scale import count

import perfsuite
from perfsuite import Pair, api, floats, scalar, tensor
from perfsuite.correctness import contexts
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.declare.sides import as_side
from perfsuite.errors import PairError
from perfsuite.records import Case, InputCase


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def pair(**fields: Any) -> Pair:
    given: dict[str, Any] = {"reference": sine, "optimized": torch.sin, "inputs": {"x": tensor("m", "n")}}
    return Pair(**{**given, "gradients": False, **fields})


def refused(of: Pair, match: str) -> None:
    with pytest.raises(PairError, match=match) as error:
        perfsuite.check(of, examples=5, device="cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("role", ["adjust", "excuse", "truth"])
def test_function_with_other_parameters_is_reported(role: str) -> None:
    call: dict[str, Any] = {role: lambda x, y: x}
    refused(pair(**call), rf"{role}= cannot be called with the inputs \(x\) by position: missing .*'y'")


def test_where_with_an_unknown_size_is_reported() -> None:
    refused(pair(where=lambda m, q: m > q), "where= names 'q', which is no size and no scalar of its inputs; .* m, n")


@pytest.mark.parametrize("role", ["adjust", "excuse", "truth"])
def test_exception_of_a_declared_function_is_reported_with_its_location(role: str) -> None:
    call: dict[str, Any] = {role: lambda x: x.sine()}
    refused(pair(**call), rf"{role}= raises AttributeError: .*'sine' at test_declared_functions.py:\d+; correct it")


def test_where_that_is_no_function_is_reported() -> None:
    refused(pair(where=3), "where=3 is no function")


def test_exception_of_where_is_reported_with_the_sizes() -> None:
    refused(pair(where=lambda m: m > "a"), r"where= raises TypeError: .* at test_declared_functions.py:\d+; .* m=\d+")


def test_truth_that_raises_on_the_same_draws_as_the_reference_is_accepted() -> None:
    def at_least_one(x: torch.Tensor) -> torch.Tensor:
        return x.amax().expand(1)

    of = pair(reference=at_least_one, optimized=at_least_one, truth=at_least_one)
    with pytest.raises(RuntimeError, match="amax"):  # so does a draw without elements
        at_least_one(torch.empty(0))
    perfsuite.check(of, examples=5, device="cpu")


def test_truth_of_another_shape_is_reported() -> None:
    refused(pair(truth=lambda x: x.sin().sum()), "another shape than truth= returns")


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (lambda x: {"result": x > 0}, "excuse= returns a mask of 'result', which is no output: output$"),
        (lambda x: "no", "excuse= returns a str; return a mask, a tensor of bool, or a dict of masks"),
        (lambda x: torch.ones(77, dtype=torch.bool), r"a mask of shape \(77,\), which fits no output: output \("),
        (lambda x: {"output": torch.ones(77, dtype=torch.bool)}, r"of shape \(77,\) for output, which has shape \("),
    ],
)
def test_excuse_mask_that_fits_no_output_is_reported(mask: Any, words: str) -> None:
    refused(pair(excuse=mask), words)


def test_excuse_gets_the_rounding_unit_of_the_computation() -> None:
    """Under autocast, `eps` is the rounding unit of half precision. An input named `eps` takes precedence."""
    units: set[float] = set()

    def near(x: torch.Tensor, *, eps: float) -> torch.Tensor:
        units.add(eps)
        return x.isnan()

    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x.mT

    inputs = {"x": tensor("m", "n", values=floats(-1, 1))}
    of = pair(reference=product, optimized=product, inputs=inputs, excuse=near)
    prove(of, "equivalence")
    assert units == {torch.finfo(torch.float32).eps}
    case = Case(sizes={"m": 3, "n": 4}, inputs={"x": InputCase()}, seed=0, dtype="float32")
    contexts.forward.autocast(
        Probe(pair=of, side=as_side(product), name="optimized", case=case, device="cpu", home=None)
    )
    assert units == {torch.finfo(t).eps for t in (torch.float32, torch.bfloat16, torch.float16)}
    named = {"x": inputs["x"], "eps": scalar(floats(0, 1))}

    def shifted(x: torch.Tensor, eps: float) -> torch.Tensor:
        return x + eps

    of = pair(reference=shifted, optimized=shifted, inputs=named, excuse=lambda x, eps: (x + eps).isnan())
    prove(of, "equivalence")


def prove(of: Pair, *kinds: str) -> None:
    for name, proof in api.proofs(of, examples=5, device="cpu"):
        if name.startswith(kinds):
            proof()


def test_excuse_masks_of_gradients_and_of_one_output_are_accepted() -> None:
    """Masks also work in proofs without gradients, and if only an input has the mask's shape."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum(-1)

    fields: dict[str, Any] = {"reference": total, "optimized": total, "gradients": True}
    for mask in (lambda x: x.isnan(), lambda x: {"gradient of x": x.isnan(), "output": None}):
        perfsuite.check(pair(**fields, excuse=mask), examples=count(quick=3, full=5), device="cpu")


def test_where_may_use_a_scalar() -> None:
    inputs = {"x": tensor("m", "n"), "p": scalar(floats(0, 1))}

    def scaled(x: torch.Tensor, p: float) -> torch.Tensor:
        return x * p

    of = pair(reference=scaled, optimized=scaled, inputs=inputs, where=lambda m, p: p < 0.75 or m > 3)
    perfsuite.check(of, examples=5, device="cpu")
    assert of.allows({"m": 1})  # the scalar is not drawn yet
    assert not of.allows({"m": 1, "p": 0.9})
