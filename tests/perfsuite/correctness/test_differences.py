"""Conversion of outputs to float64 tensors, and the root mean squares of these."""

from __future__ import annotations

import math

import pytest
import torch

from perfsuite.correctness import differences
from perfsuite.correctness.differences import Doubles
from perfsuite.correctness.execution import Leaf

LEAVES: dict[str, Leaf] = {
    "row": torch.arange(3.0),
    "square": torch.arange(6.0).reshape(2, 3).T,
    "half": torch.tensor([1.5, float("nan")], dtype=torch.float16),
    "another half": torch.tensor(2.5, dtype=torch.float16),
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "expanded": torch.ones(1).expand(4),
    "empty": torch.empty(0, 3),
    "counts": torch.tensor([1, 2]),
    "number": 0.5,
    "nothing": None,
    "with a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("most", [1 << 20, 4])
def test_leaves_converted_together_equal_those_converted_one_by_one(
    copied: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "COMPARED_ON_CPU", most)
    doubles = Doubles(LEAVES, copied=lambda leaf: copied)
    for name, leaf in LEAVES.items():
        expected = differences.as_double(leaf)
        assert doubles[name].dtype == torch.float64
        assert not doubles[name].requires_grad
        assert torch.equal(doubles[name].nan_to_num(7.0), expected.nan_to_num(7.0)), name


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([3.0, 4.0], math.sqrt(12.5)),
        ([0.0, 0.0], 0.0),
        ([], 0.0),
        ([3.0, float("nan"), 4.0], math.sqrt(12.5)),
        ([float("inf"), 2.0], 2.0),
        ([1e-200, 1e-200], 1e-200),
        ([1e200, -1e200], 1e200),
    ],
)
def test_rms_ignores_non_finite_elements(values: list[float], size: float) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    (norm,) = differences.norms([tensor])
    assert differences.rms(tensor) == pytest.approx(size)
    assert differences.rms_of(tensor, norm) == pytest.approx(size)
    assert math.isnan(norm) == bool(tensor.isnan().any())
