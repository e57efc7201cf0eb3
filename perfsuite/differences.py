"""Outputs as float64 tensors, their sizes and differences, in few operations: a proof compares thousands of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from perfsuite.execution import Leaf

COMPARED_ON_CPU = 1 << 20
"""Outputs of no more elements are compared on the CPU. An operation on so many takes about a millisecond there, and on
a GPU that eleven other processes use it waits longer for its turn."""
SMALL_NORM, LARGE_NORM = 1e-120, 1e150
"""Between them float64's squares are as exact as scaled ones: what underflows is less than their own rounding."""


def as_double(leaf: Leaf) -> torch.Tensor:
    """In float64; on the CPU if it is small, since each of the many operations of a comparison waits for a GPU."""
    if isinstance(leaf, torch.Tensor):
        leaf = _real(leaf.detach())
        return (leaf.cpu() if leaf.numel() <= COMPARED_ON_CPU else leaf).double()
    return torch.tensor(float(leaf or 0.0), dtype=torch.float64)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def rms(leaf: Leaf) -> float:
    """Its root mean square, over its finite elements only where some are not."""
    values = as_double(leaf)
    if not values.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(values))
    if SMALL_NORM < norm < LARGE_NORM:
        return norm / math.sqrt(values.numel())
    finite = values[values.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    # Scaled, since float64's own squares overflow above 1e154 and underflow below 1e-154.
    return largest * math.sqrt(float(((finite / largest) ** 2).mean())) if largest else 0.0


def largest_rms(tensors: Iterable[torch.Tensor]) -> float:
    """The largest RMS of any; each device is waited for once."""
    some = [_real(t.detach()) for t in tensors if t.numel()]
    norms: dict[torch.device, list[torch.Tensor]] = {}
    for t in some:
        norm = torch.linalg.vector_norm(t, dtype=torch.float64) / math.sqrt(t.numel())
        norms.setdefault(t.device, []).append(norm)
    largest = max((float(torch.stack(each).max()) for each in norms.values()), default=0.0)
    return largest if math.isfinite(largest) else max(map(rms, some))


def is_finite(values: torch.Tensor) -> bool:
    """Whether all are; a sum of finite ones that overflows is looked at in each element."""
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


def finite(values: torch.Tensor) -> torch.Tensor | None:
    """Which of them are finite; None if all are."""
    return None if is_finite(values) else values.isfinite()


def finite_size(values: torch.Tensor, are_finite: torch.Tensor | None) -> torch.Tensor:
    """Their absolute values, and zero for each that is not finite, as `finite` says."""
    return values.abs() if are_finite is None else torch.where(are_finite, values, 0.0).abs()


def difference(a: torch.Tensor, b: torch.Tensor, period: float | None) -> torch.Tensor:
    """a − b, zero where either is not finite; on a circle where there is a period."""
    delta = a - b
    if not is_finite(delta):
        delta = torch.where(a.isfinite() & b.isfinite(), delta, 0.0)
    return torch.remainder(delta + period / 2, period) - period / 2 if period else delta


def same_nonfinite(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the shapes are the same, and NaN and the infinities stand in the same places."""
    if a.shape != b.shape:
        return False
    if math.isfinite(float((a - b).sum())):
        return True  # a difference is finite only where both are
    return bool(
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.isposinf(), b.isposinf())
        and torch.equal(a.isneginf(), b.isneginf())
    )
