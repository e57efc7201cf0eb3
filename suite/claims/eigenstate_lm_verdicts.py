"""Verdicts on the claims of eigenstate_lm, from measured figures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from suite.ablation import Ratio
from suite.claims.eigenstate_lm_setting import EPS, NOTHING, QUALITY, ROUNDING, STEP, TOLERANCE
from suite.claims.measuring import NotFiniteError, largest
from suite.claims.record import CONFIRMED, DEPENDS, REFUTED, UNMEASURED


def extrapolated(short: tuple[int, float], longer: tuple[int, float], length: int) -> float:
    """Extrapolate linearly from two pairs (length, seconds) to the seconds at `length`."""
    slope = (longer[1] - short[1]) / (longer[0] - short[0])
    return longer[1] + slope * (length - longer[0])


def error(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error of a tensor: the norm of its error over the norm of the true tensor."""
    return largest(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))


def horizon(influence: torch.Tensor) -> int | None:
    """Return the distance from which an influence [distance] stays below float32's epsilon times its first value.

    The distance is in tokens; None if the influence does not stay below it. NotFiniteError if it is not finite.
    """
    if not influence.isfinite().all():
        raise NotFiniteError("the gradient is not finite")
    there = (influence.double() >= EPS * influence[0].double()).nonzero()
    after = int(there[-1]) + 1 if len(there) else 0
    return after if after < len(influence) else None


def reached(seconds: Sequence[float]) -> str:
    """Return the verdict on whether the steps take no longer than the source's."""
    within = [t <= (1 + TOLERANCE) * STEP for t in seconds]
    return CONFIRMED if within and all(within) else DEPENDS if any(within) else REFUTED


def meets(found: Sequence[float], claimed: float) -> str:
    """Return the verdict on whether all figures equal the claimed one; DEPENDS if only their range includes it."""
    if all(near(f, claimed) for f in found):
        return CONFIRMED
    return DEPENDS if min(found) <= (1 + TOLERANCE) * claimed and max(found) >= (1 - TOLERANCE) * claimed else REFUTED


def in_turn(furthest: float, scan: float, loop: float) -> str:
    """Return the verdict on whether the steps must run one after another.

    It is REFUTED if a scan has the same results, except for rounding, in less than half the time.
    """
    if not furthest <= ROUNDING:
        return CONFIRMED
    return REFUTED if 2 * scan < loop else UNMEASURED


def only_speed(errors: Sequence[float], peaks: Sequence[float]) -> str:
    if largest(errors) > ROUNDING:
        return REFUTED
    return DEPENDS if max(peaks) > (1 + TOLERANCE) * min(peaks) else CONFIRMED


def spans(horizons: Sequence[int | None], length: int) -> str:
    """Return the verdict from the horizons for the initial λ and for the largest one; None counts as `length`."""
    first, most = (length if h is None else h for h in horizons)
    return CONFIRMED if first >= length else DEPENDS if most >= length else REFUTED


def between(found: Sequence[float], least: float, most: float) -> str:
    least, most = (1 - TOLERANCE) * least, (1 + TOLERANCE) * most
    if max(found) < least:
        return REFUTED
    return CONFIRMED if all(least <= f <= most for f in found) else DEPENDS


def fits(peaks: Sequence[float], claimed: float) -> str:
    """Return the verdict on whether each peak is at most the claimed one."""
    enough = [p <= (1 + TOLERANCE) * claimed for p in peaks]
    return CONFIRMED if all(enough) else DEPENDS if any(enough) else REFUTED


def helps(low: float, high: float, growth: float) -> str:
    """Return the verdict on whether emptying the cache helps.

    low, high  interval, in percent, of the extra time that steps take with it
    growth     share by which the reserved memory grows over some steps without it
    """
    if high < 0:
        return CONFIRMED
    if growth > TOLERANCE:
        return DEPENDS
    return REFUTED if low > -1 else UNMEASURED


def loads_faster(gains: Sequence[Ratio], batch: float) -> str:
    """Return the verdict on whether loading is faster with more prefetched batches.

    gains  speedup of each larger number of prefetched batches
    batch  seconds of a batch with few; a step waits for its batch only if this is longer than the step
    """
    faster = [r.low > 1 for r in gains]
    if not any(faster):
        return UNMEASURED if any(r.high >= 1 + NOTHING for r in gains) else REFUTED
    return CONFIRMED if all(faster) and batch > STEP else DEPENDS


def twice(ratios: Sequence[Ratio], lost: Sequence[float]) -> str:
    if largest(lost) > QUALITY:
        return REFUTED
    if not ratios:
        return UNMEASURED
    least, most = (1 - TOLERANCE) * 2, (1 + TOLERANCE) * 2
    if all(r.low <= most and r.high >= least for r in ratios):
        return CONFIRMED
    return DEPENDS if min(r.low for r in ratios) <= most and max(r.high for r in ratios) >= least else REFUTED


def near(found: float, claimed: float) -> bool:
    return abs(found - claimed) <= TOLERANCE * claimed
