"""Random numbers: a generator is an input, and starts in the same state for each call of each side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scale import FULLY, count

import perfsuite
from perfsuite import Pair, Workload, floats, generator, tensor
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.records import Case


def dropout(x: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    keep = torch.rand(x.shape, generator=source, device=x.device) < 0.5
    return torch.where(keep, x / 0.5, 0.0)


def masked(x: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    return x * (torch.rand(x.shape, generator=source, device=x.device) < 0.5) * 2


def without_it(x: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    return x * (torch.rand(x.shape, device=x.device) < 0.5) * 2


def one_number_late(x: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    torch.rand(1, generator=source, device=x.device)
    return masked(x, source)


def pair(optimized: Callable[..., Any], reference: Callable[..., Any] = dropout) -> Pair:
    return Pair(
        reference=reference,
        optimized=optimized,
        inputs={"x": tensor("m", "n", values=floats(-4, 4)), "source": generator()},
        workloads=[Workload("forward", m=64, n=64), Workload("both", m=64, n=64, direction="both")],
    )


def test_a_side_that_draws_the_same_numbers_is_proven() -> None:
    perfsuite.check(pair(masked), examples=count(quick=4, full=20), device="cpu")


@FULLY
def test_a_side_that_draws_the_same_numbers_is_timed() -> None:
    for record in perfsuite.measure(pair(masked), device="cpu"):
        assert set(record.sides) == {"reference", "optimized"}


@pytest.mark.parametrize("side", [without_it, one_number_late])
def test_side_that_draws_other_numbers_is_wrong(side: Callable[..., Any]) -> None:
    with pytest.raises(NotEquivalent, match="is wrong"):
        perfsuite.check(pair(side), examples=20, device="cpu")


def test_a_random_reference_is_refused_with_the_remedy() -> None:
    of = pair(without_it, without_it)
    with pytest.raises(PairError, match=r"differs between two calls on the same inputs: .* e.g. generator\(\)"):
        perfsuite.check(of, examples=20, device="cpu")


def test_copied_generators_have_the_same_state_and_are_independent() -> None:
    values = make.build(pair(masked), Case(dtype="float32", sizes={"m": 2, "n": 2}, inputs={}, seed=3), "cpu")
    copies = [make.clone(values)["source"], make.upcast(values)["source"]]
    drawn = [torch.rand(5, generator=source) for source in (*copies, values["source"])]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    other = make.build(pair(masked), Case(dtype="float32", sizes={"m": 2, "n": 2}, inputs={}, seed=4), "cpu")
    assert not torch.equal(drawn[0], torch.rand(5, generator=make.clone(other)["source"]))
    make.copy_values(values, other)
    assert torch.equal(torch.rand(5, generator=values["source"]), torch.rand(5, generator=other["source"]))
