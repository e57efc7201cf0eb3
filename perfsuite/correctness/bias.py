"""Detect biased errors: a small offset in every element, or results that are truncated instead of rounded.

Errors of a correct kernel are as often above the truth as below it. Biased errors may still be within the tolerance of
each element, and of all together. The bias β is the mean error of an output in units of eps times its mean magnitude.
It is computed twice: for the signed errors (an offset), and for the errors away from zero (truncation moves results
towards zero, by 0.36).

An error that all elements of a draw share, such as that of a norm by which each is divided, gives a bias too, but with
another sign on another draw. So the mean of β over the draws is tested. β of a single draw is tested only if the draw
has many elements, against a limit above that of a shared rounding.

In half precision, to which kernels round once, truncation is also detected element by element: on every draw, nearly
all results are the next number in one direction, whether that is the nearest one or not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

FEWEST_ELEMENTS = 16
MANY_ELEMENTS = 10_000
FEWEST_DRAWS = 8
OF_REFERENCE = 3.0
"""Multiple of the reference's bias that is allowed in addition."""
STANDARD_ERRORS = 6.0
NEAR = 1 / 256
"""Distance of a truth to the nearest number of the output's dtype, in units in the last place. Elements with a smaller
distance are ignored, since rounding and truncation give the same result for them."""
FEWEST_SHOWN, FEWEST_TELLING = 4, 2
"""Fewest elements of a draw that are farther away than NEAR, and fewest of these for which rounding to nearest goes in
the other direction than truncation."""
CUT, OFTEN, REFERENCE_OFTEN = 0.9, 0.8, 0.4
"""Smallest share of truncated elements with which a draw counts as truncated, smallest share of such draws for a side,
and largest share of such draws for the reference. By chance, a rounding that all elements of a draw share looks like
truncation on at most one draw in five."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest |β| of a correct kernel, in eps."""

    mean: float
    """Limit for the mean over all draws."""
    alone: float
    """Limit for a single draw. In half precision, a rounding that all elements share is half a unit."""
    of_error: float
    """Share of the reference's own error that is added to the limit: the error of a sum that all elements share."""


SINGLE = Limits(mean=2.0, alone=4.0, of_error=0.5)
"""Approximate exponentials and reciprocal square roots have a bias of a fraction of this."""
HALF = Limits(mean=0.1, alone=1.0, of_error=0.05)
"""Kernels for half precision compute in float32 and round once."""

Leaning: TypeAlias = tuple[float, float]
"""(β of all errors, β of errors away from zero)."""
Cut: TypeAlias = dict[str, bool]
"""Direction → whether results are truncated in it. Directions with too few informative elements are left out."""
WORDS = ("too large or too small by the same amount", "away from zero or towards it")


def leanings(truth: torch.Tensor, eps: float, *errors: torch.Tensor) -> list[Leaning] | None:
    """Return β of each of these errors; None if there are too few elements, or the truth is zero or not finite."""
    if truth.numel() < FEWEST_ELEMENTS:
        return None
    unit = eps * float(truth.abs().mean())
    if not unit or not math.isfinite(unit):
        return None
    sign = truth.sign()
    return [(float(error.mean()) / unit, float((error * sign).mean()) / unit) for error in errors]


def cuts(truth: torch.Tensor, dtype: torch.dtype, *errors: torch.Tensor) -> list[Cut]:
    """Return, for each of these errors, in which directions they look like truncation."""
    unit = torch.ldexp(torch.full_like(truth, torch.finfo(dtype).eps), torch.frexp(truth).exponent - 1)
    signed = truth / unit
    shows = (signed - signed.round()).abs() > NEAR
    if int(shows.sum()) < FEWEST_SHOWN:
        return [{} for _ in errors]
    signed, unit = signed[shows], unit[shows]
    away, size = signed.sign(), signed.abs()
    found = []
    for error in errors:
        units = error[shows] / unit
        turned = {
            "downwards": (units, signed),
            "upwards": (-units, -signed),
            "towards zero": (units * away, size),
            "away from zero": (-units * away, -size),
        }
        found.append(_cut(turned))
    return found


def _cut(turned: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Cut:
    """Return in which directions results are truncated.

    `turned` maps each direction to (errors, truth) in units in the last place, with signs chosen so that the direction
    is downwards.
    """
    found = {}
    for name, (error, truth) in turned.items():
        telling = truth - truth.floor() > 1 / 2
        if int(telling.sum()) >= FEWEST_TELLING:
            below = ((error <= 0) & (error > -1)).double()
            found[name] = min(float(below.mean()), float(below[telling].mean())) >= CUT
    return found


@dataclass(slots=True)
class DrawBias:
    """Bias of the errors of one output on one draw."""

    side: Leaning | None
    reference: Leaning
    error: float
    """The reference's own RMS error in the same units."""
    limits: Limits
    elements: int
    cut: Cut = field(default_factory=dict)
    reference_cut: Cut = field(default_factory=dict)


def draw_of(
    error: torch.Tensor,
    reference: torch.Tensor,
    size: torch.Tensor,
    truth: torch.Tensor,
    *,
    eps: float,
    dtype: torch.dtype,
) -> DrawBias | None:
    """Return the bias of the errors of a side and of the reference. `size` is the size of the reference's errors.

    None if there are too few elements, or the truth is zero.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    cut, reference_cut = cuts(truth, dtype, error, reference) if half else ({}, {})
    found = leanings(truth, eps, error, reference)
    if found is None and not cut:
        return None
    side, own = found or (None, (0.0, 0.0))
    return DrawBias(
        side=side,
        reference=own,
        error=float(size.square().mean().sqrt()) / (eps * float(truth.abs().mean())) if found else 0.0,
        limits=HALF if half else SINGLE,
        elements=truth.numel(),
        cut=cut,
        reference_cut=reference_cut,
    )


@dataclass(slots=True)
class Biases:
    """Biases of the errors of each output over the draws of a proof."""

    draws: dict[str, list[DrawBias]] = field(default_factory=dict)

    def note(self, name: str, draw: DrawBias) -> None:
        """Add one more draw."""
        self.draws.setdefault(name, []).append(draw)

    def add(self, other: Biases) -> None:
        """Add the draws of another `Biases`."""
        for name, draws in other.draws.items():
            self.draws.setdefault(name, []).extend(draws)

    def found(self) -> Iterator[str]:
        """Yield a message for each output whose errors are biased over all draws."""
        for name, draws in self.draws.items():
            if message := _leaning(name, draws) or _cutting(name, draws):
                yield message


def _leaning(name: str, every: Sequence[DrawBias]) -> str:
    draws = [(d, d.side) for d in every if d.side is not None]
    if len(draws) < FEWEST_DRAWS:
        return ""
    common = draws[0][0].limits.mean + draws[0][0].limits.of_error * statistics.fmean(d.error for d, _ in draws)
    means, limits = [], []
    for i in range(len(WORDS)):
        each = [side[i] for _, side in draws]
        own = statistics.fmean(d.reference[i] for d, _ in draws)
        chance = STANDARD_ERRORS * statistics.stdev(each) / math.sqrt(len(each))
        means.append(statistics.fmean(each))
        limits.append(common + OF_REFERENCE * abs(own) + chance)
    return _beyond(name, means, limits, f"over {len(draws)} draws")


def _cutting(name: str, draws: Sequence[DrawBias]) -> str:
    for direction in dict.fromkeys(direction for draw in draws for direction in draw.cut):
        those = [d for d in draws if direction in d.cut]
        count = sum(d.cut[direction] for d in those)
        own = sum(d.reference_cut.get(direction, False) for d in those)
        if count >= max(FEWEST_DRAWS, OFTEN * len(those)) and own <= REFERENCE_OFTEN * len(those):
            return (
                f"errors of {name} lean to one side: digits are cut off {direction} on {count} of {len(those)} draws "
                f"instead of rounded to the nearest number"
            )
    return ""


def alone(name: str, draw: DrawBias) -> str:
    """Return a message if the errors of this draw alone are biased; empty if they are not, or if the draw has too few
    elements."""
    if draw.elements < MANY_ELEMENTS or draw.side is None:
        return ""
    most = draw.limits.alone + draw.limits.of_error * draw.error
    limits = [most + OF_REFERENCE * abs(own) for own in draw.reference]
    return _beyond(name, draw.side, limits, f"over {draw.elements} elements")


def _beyond(name: str, values: Sequence[float], limits: Sequence[float], over: str) -> str:
    """Return a message about the value that exceeds its limit by the largest factor; empty if none does."""
    shares = [abs(value) / limit for value, limit in zip(values, limits, strict=True)]
    at = shares.index(max(shares))
    if shares[at] <= 1:
        return ""
    return (
        f"errors of {name} lean to one side ({WORDS[at]}): by {abs(values[at]):.2g} eps on average {over}, where "
        f"{limits[at]:.2g} is the most that rounding explains"
    )
