"""Whether errors lean to one side: a small offset in every element, or digits that are cut off instead of rounded.

Errors of an honest kernel are as often above the truth as below it. One that leans may still be within the budget of
each element, and of all together. β is the mean error of an output in units of eps times its mean size: of all errors
as they are (an offset), and of errors away from zero (digits that are cut off lean towards it, by 0.36).

An error that all elements of a draw share, such as that of a norm which each is divided by, leans too, but to another
side on another draw. So the mean of β over the draws is tested, and β of a single draw only where it has many elements
and leans by more than a shared rounding can.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

FEWEST_ELEMENTS = 16
MANY_ELEMENTS = 10_000
FEWEST_DRAWS = 8
LIMIT = {torch.bfloat16: 0.1, torch.float16: 0.1}
"""How far the errors of an honest kernel may lean: kernels for half precision compute in float32 and round once."""
LIMIT_ELSE = 2.0
"""Approximate exponentials and reciprocal roots lean by a fraction of this."""
ALONE_LIMIT = {torch.bfloat16: 1.0, torch.float16: 1.0}
ALONE_LIMIT_ELSE = 4.0
"""The same on a single draw: a rounding that all elements share is half a unit in half precision."""
OF_ERROR = {torch.bfloat16: 0.05, torch.float16: 0.05}
OF_ERROR_ELSE = 0.5
"""And by this share of the reference's own error: a power or a sum that all elements share errs by as much."""
OF_REFERENCE = 3.0
"""And by this multiple of how far the reference's errors lean."""
STANDARD_ERRORS = 6.0

Leaning: TypeAlias = tuple[float, float]
"""(β of all errors, β of errors away from zero)."""
WORDS = ("too large or too small by the same amount", "away from zero or towards it")


def leaning(error: torch.Tensor, truth: torch.Tensor, eps: float) -> Leaning | None:
    """β of these errors; None where there are too few, or the truth is zero."""
    if error.numel() < FEWEST_ELEMENTS:
        return None
    unit = eps * float(truth.abs().mean())
    if not unit or not math.isfinite(unit):
        return None
    return float(error.mean()) / unit, float((error * truth.sign()).mean()) / unit


@dataclass(slots=True)
class Draw:
    """How the errors of one output lean on one draw."""

    side: Leaning
    reference: Leaning
    error: float
    """The reference's own RMS error in the same units."""
    dtype: torch.dtype
    elements: int


def draw_of(
    error: torch.Tensor,
    reference: torch.Tensor,
    spread: torch.Tensor,
    truth: torch.Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
) -> Draw | None:
    """How these errors of a side and of the reference lean; `spread` is the size of the reference's.

    None where there are too few, or the truth is zero.
    """
    side, own = leaning(error, truth, eps), leaning(reference, truth, eps)
    if side is None or own is None:
        return None
    size = float(spread.square().mean().sqrt()) / (eps * float(truth.abs().mean()))
    return Draw(side=side, reference=own, error=size, dtype=dtype, elements=truth.numel())


@dataclass(slots=True)
class Biases:
    """How the errors of each output lean on the draws of a proof."""

    draws: dict[str, list[Draw]] = field(default_factory=dict)

    def note(self, name: str, draw: Draw) -> None:
        """One more draw."""
        self.draws.setdefault(name, []).append(draw)

    def add(self, other: Biases) -> None:
        """The draws of another."""
        for name, draws in other.draws.items():
            self.draws.setdefault(name, []).extend(draws)

    def found(self) -> Iterator[str]:
        """What to say of each output whose errors lean over all draws."""
        for name, draws in self.draws.items():
            if len(draws) < FEWEST_DRAWS:
                continue
            dtype, error = draws[0].dtype, statistics.fmean(d.error for d in draws)
            common = LIMIT.get(dtype, LIMIT_ELSE) + OF_ERROR.get(dtype, OF_ERROR_ELSE) * error
            means, limits = [], []
            for i in range(len(WORDS)):
                each = [d.side[i] for d in draws]
                own = statistics.fmean(d.reference[i] for d in draws)
                chance = STANDARD_ERRORS * statistics.stdev(each) / math.sqrt(len(each))
                means.append(statistics.fmean(each))
                limits.append(common + OF_REFERENCE * abs(own) + chance)
            if message := _beyond(name, means, limits, f"over {len(draws)} draws"):
                yield message


def alone(name: str, draw: Draw) -> str:
    """What to say of an output whose errors lean on this draw; nothing where they do not, or there are too few."""
    if draw.elements < MANY_ELEMENTS:
        return ""
    most = ALONE_LIMIT.get(draw.dtype, ALONE_LIMIT_ELSE) + OF_ERROR.get(draw.dtype, OF_ERROR_ELSE) * draw.error
    limits = [most + OF_REFERENCE * abs(own) for own in draw.reference]
    return _beyond(name, draw.side, limits, f"over {draw.elements} elements")


def _beyond(name: str, values: Sequence[float], limits: Sequence[float], over: str) -> str:
    """What to say where a value is beyond its limit: of the one that is furthest beyond."""
    shares = [abs(value) / limit for value, limit in zip(values, limits, strict=True)]
    at = shares.index(max(shares))
    if shares[at] <= 1:
        return ""
    return (
        f"errors of {name} lean to one side ({WORDS[at]}): by {abs(values[at]):.2g} eps on average {over}, where "
        f"{limits[at]:.2g} is the most that rounding explains"
    )
