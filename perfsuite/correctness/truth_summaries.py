"""Summarise the float64 truth of a workload in a few numbers, so that another environment's truth can be compared with
it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from perfsuite.correctness import differences
from perfsuite.correctness.rule import TRUTH_EPS, Norms, underflow
from perfsuite.correctness.truths import Truth
from perfsuite.draws import inputs as make
from perfsuite.records import INPUT

PROJECTIONS = 16
"""Number of sums of an output's elements with random signs. The RMS difference of two outputs is that of these sums,
divided by √n, to within about a fifth."""
AT_ONCE = 1 << 24
"""Elements that are summed at a time. The signs need several times their bytes."""


def of(truth: Truth, inputs: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return name → (number of elements, number of non-finite elements, RMS difference that rounding explains,
    *projections) for each input and each output that is a tensor.

    The projections are divided by √n. The inputs are those of the truth.
    """
    found = {f"{INPUT}{path}": _summary(tensor, 0.0) for path, tensor in _tensors(inputs)}
    for name, leaf in truth.leaves.items():
        if isinstance(leaf, torch.Tensor):
            found[name] = _summary(leaf, _explained(truth, name) if name in truth.errors else 0.0)
    return found


def _tensors(inputs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in inputs.items():
        yield from make.tensors_in(value, name)


def _explained(truth: Truth, name: str) -> float:
    """Return the budget of the RMS error of this output of a side."""
    rms = differences.rms
    norms = Norms(
        eps=max(truth.eps, TRUTH_EPS),
        truth=rms(truth.doubles[0][name]),
        error=rms(truth.errors[name]),
        moved=rms(truth.moved[name]),
        least=underflow(truth.reference[name]),
    )
    return norms.budget(1)


def _summary(tensor: torch.Tensor, explained: float) -> tuple[float, ...]:
    whole = tensor.detach()
    flat = (torch.view_as_real(whole) if whole.is_complex() else whole).flatten()
    nonfinite, sums = 0, [0.0] * PROJECTIONS
    for number, part in enumerate(flat.split(AT_ONCE)):
        values = part.double()
        finite = values.isfinite()
        nonfinite += int((~finite).sum())
        values = values.where(finite, 0.0)
        for projection in range(PROJECTIONS):
            sums[projection] += float((values * _signs(values, number * AT_ONCE, projection)).sum())
    size = math.sqrt(max(1, flat.numel()))
    return (float(flat.numel()), float(nonfinite), explained, *(s / size for s in sums))


def _signs(values: torch.Tensor, begin: int, projection: int) -> torch.Tensor:
    """Return ±1 for each element. It is computed from the element's position, because the random numbers of two
    versions of PyTorch may differ."""
    mixed = torch.arange(begin, begin + len(values), device=values.device).mul_(PROJECTIONS).add_(projection)
    for odd in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9):
        mixed.mul_(odd)
        mixed ^= mixed >> 29
    return (mixed >> 40 & 1).double().mul_(2).sub_(1)
