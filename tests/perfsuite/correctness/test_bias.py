"""Biased errors are detected though each is within its budget; unbiased kernels pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from perfsuite import Pair, tensor
from perfsuite.correctness import bias, equivalence
from perfsuite.correctness.tally import Tally
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case

EPS = torch.finfo(torch.float32).eps
Function = Callable[..., torch.Tensor]


def square_plus(x: torch.Tensor) -> torch.Tensor:
    return x * x + x


def leaning_by(count: float) -> Function:
    def side(x: torch.Tensor) -> torch.Tensor:
        right = square_plus(x)
        return right + count * EPS * right.abs().mean()

    return side


def growing_by(count: float) -> Function:
    return lambda x: square_plus(x) * (1 + count * EPS)


def cut_to_half(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def cut_off(x: torch.Tensor) -> torch.Tensor:
    return cut_to_half(square_plus(x.float()))


def cut_off_by_steps(x: torch.Tensor) -> torch.Tensor:
    exact = square_plus(x.float())
    rounded = exact.to(torch.bfloat16)
    beyond = rounded.float().abs() > exact.abs()
    return torch.where(beyond, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def rounded_once(x: torch.Tensor) -> torch.Tensor:
    return square_plus(x.float()).to(torch.bfloat16)


def rounded_twice(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * x.float()).to(torch.bfloat16) + x


def shared(x: torch.Tensor) -> torch.Tensor:
    """Round the norm to half precision, so that all elements share one error."""
    norm = x.float().square().mean().sqrt().to(torch.bfloat16)
    return (x.float() / norm.float()).to(x.dtype)


def normed(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / x.float().square().mean().sqrt()).to(x.dtype)


def case_of(n: int, dtype: str, seed: int) -> Case:
    return Case(dtype=dtype, sizes={"n": n}, inputs={}, seed=seed)


def pair_of(reference: Function, optimized: Function, dtype: str = "float32") -> Pair:
    return Pair(
        name="p",
        reference=reference,
        optimized=optimized,
        inputs={"x": tensor("n", "n", dtype=dtype)},
        gradients=False,
        dtypes=(dtype,),
    )


def prove(pair: Pair, sizes: list[int]) -> None:
    tally = Tally()
    (dtype,) = pair.dtypes
    for number, n in enumerate(sizes):
        equivalence.check_case(pair, case_of(n, dtype, number), "cpu", tally=tally)
    tally.evidence(pair, dtype, "cpu")


SMALL = [24, 17, 33, 16, 31, 20, 9, 32] * 3


@pytest.mark.parametrize(
    ("side", "message"),
    [(leaning_by(9), "lean to one side"), (growing_by(7), "lean to one side|inaccurate as a whole")],
    ids=["offset", "factor"],
)
@pytest.mark.parametrize("sizes", [[128], SMALL], ids=["one large draw", "small draws"])
def test_bias_of_a_few_eps_in_each_element_is_detected(side: Function, message: str, sizes: list[int]) -> None:
    with pytest.raises(NotEquivalent, match=message):
        prove(pair_of(square_plus, side), sizes)


@pytest.mark.parametrize("side", [cut_off, cut_off_by_steps])
def test_truncation_instead_of_rounding_is_detected(side: Function) -> None:
    with pytest.raises(NotEquivalent, match=r"lean to one side \(away from zero or towards it\)"):
        prove(pair_of(square_plus, side, "bfloat16"), SMALL)


def floor_to_half(x: torch.Tensor) -> torch.Tensor:
    rounded = x.to(torch.bfloat16)
    return torch.where(rounded.float() > x, torch.nextafter(rounded, torch.full_like(rounded, -torch.inf)), rounded)


@pytest.mark.parametrize(
    ("reference", "side", "message"),
    [
        (lambda x: x.sum(-1), lambda x: cut_to_half(x.float().sum(-1)), "cut off towards zero on"),
        (lambda x: x.sum(-1), lambda x: floor_to_half(x.float().sum(-1)), "cut off downwards on"),
        # Nearly every result is 1 or its neighbour.
        (lambda x: (x / 64).exp(), lambda x: cut_to_half((x.float() / 64).exp()), "lean to one side"),
    ],
    ids=["few elements", "downwards", "near one number"],
)
def test_truncation_is_detected_with_few_elements(reference: Function, side: Function, message: str) -> None:
    with pytest.raises(NotEquivalent, match=message):
        prove(pair_of(reference, side, "bfloat16"), [7, 5, 9, 8, 6, 11, 8, 7, 9, 10, 6, 8])


def nearest_by_steps(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * x.float().square().mean().rsqrt().to(torch.bfloat16).float()).to(x.dtype)


@pytest.mark.parametrize("seed", range(20))
def test_rounding_shared_by_all_elements_is_not_reported_as_truncation(seed: int) -> None:
    pair, tally = pair_of(normed, nearest_by_steps, "bfloat16"), Tally()
    for number, n in enumerate([7, 5, 9, 8, 6, 11, 8, 7, 9, 10, 6, 8]):
        equivalence.check_case(pair, case_of(n, "bfloat16", 100 * seed + number), "cpu", tally=tally)
    assert not list(tally.biases.found())


def test_elements_representable_in_the_dtype_give_no_evidence_of_truncation() -> None:
    truth = torch.arange(1, 9, dtype=torch.float64) / 8
    assert bias.cuts(truth, torch.bfloat16, -truth) == [{}]
    (found,) = bias.cuts(truth * (1 + 2**-9), torch.bfloat16, -truth * 2**-9)
    assert found == {"upwards": False, "away from zero": False}


@pytest.mark.parametrize(
    ("reference", "side"),
    [
        (square_plus, rounded_twice),
        (square_plus, rounded_once),
        (normed, shared),
        (normed, normed),
    ],
)
def test_correct_kernels_in_bfloat16_pass(reference: Function, side: Function) -> None:
    prove(pair_of(reference, side, "bfloat16"), [*SMALL, 128])


@pytest.mark.parametrize(
    "side",
    [
        lambda x: x * (x + 1),
        lambda x: torch.addcmul(x, x, x),
        lambda x: torch.exp2(2 * torch.log2(x.abs())) + x,
    ],
    ids=["factored", "fused", "by logarithms"],
)
def test_correct_kernels_in_float32_pass(side: Function) -> None:
    prove(pair_of(square_plus, side), [*SMALL, 128])


def test_zero_truth_or_few_elements_give_no_leanings() -> None:
    assert bias.leanings(torch.zeros(100), EPS, torch.ones(100)) is None
    assert bias.leanings(torch.ones(4), EPS, torch.ones(4)) is None
    ((offset, _),) = bias.leanings(torch.ones(100), EPS, torch.full((100,), 3 * EPS)) or [(0.0, 0.0)]
    assert offset == pytest.approx(3, rel=1e-3)
