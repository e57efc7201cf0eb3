"""Verdicts on the claims of ups, from measured figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from suite.ablation import Ratio
from suite.claims.measuring import largest
from suite.claims.record import CONFIRMED, DEPENDS, REFUTED, UNMEASURED

TOLERANCE = 0.1
"""A figure may differ from the claimed one by this share."""
GAIN_TOLERANCE = 0.5
"""A gain or a cost in time may differ from the claimed one by this share: 1.10 times is 1.05 to 1.15 times."""
NOTHING = 0.02
"""A change of time below this share counts as none."""
CHAOS = 10
"""Largest ratio between the distances of two pairs of runs that differ only in rounding."""
SAME = 1e-3
"""Two updates of a weight are the same if they differ by less than this share of the update's norm."""


def near(found: float, claimed: float) -> bool:
    """Return whether a figure equals the claimed one within the tolerance."""
    return abs(found - claimed) <= TOLERANCE * abs(claimed)


def regularises(gradient: float, changed: float, repeated: float) -> str:
    """Return the verdict on whether the inverse losses act on the operator.

    gradient  norm of their gradient with respect to the operator's weights
    changed   distance between the operator's weights after training with and without these losses
    repeated  distance between the operator's weights after the same training twice
    """
    if gradient > 0:
        return CONFIRMED
    return REFUTED if changed <= CHAOS * repeated else UNMEASURED


def is_multiple(ratios: Sequence[Ratio], claimed: float) -> str:
    """Return the verdict on whether each ratio is the claimed one; DEPENDS if only some are."""
    least, most = (1 - TOLERANCE) * claimed, (1 + TOLERANCE) * claimed
    return _of_all([r.low <= most and r.high >= least for r in ratios])


def has_gain(ratios: Sequence[Ratio], claimed: float) -> str:
    """Return the verdict on whether each ratio is a gain of about the claimed size.

    An interval does not count if it includes both the claimed gain and no gain, or all sizes that count as the claimed
    one.
    """
    gain = claimed - 1
    least, most = 1 + (1 - GAIN_TOLERANCE) * gain, 1 + (1 + GAIN_TOLERANCE) * gain
    clear = [r for r in ratios if r.high < least or (r.low > 1 and not r.low < least <= most < r.high)]
    if not clear:
        return UNMEASURED
    return _of_all([r.low <= most and r.high >= least for r in clear])


def is_amount(found: Sequence[float], claimed: float) -> str:
    """Return the verdict on whether each amount is the claimed one."""
    return _of_all([near(f, claimed) for f in found])


def both_tasks(norms: Mapping[str, float], difference: float) -> str:
    """Return the verdict on whether a mixed batch has the inverse losses of all its tasks; UNMEASURED with NaN.

    norms       task → norm of the gradient with respect to the weights of its encoder and decoder
    difference  relative difference of the losses from the mean of the tasks' own losses
    """
    if any(map(math.isnan, (difference, *norms.values()))):
        return UNMEASURED
    if difference > SAME:
        return REFUTED
    return _of_all([norm > 0 for norm in norms.values()])


def updates(moved: Sequence[bool], distances: Sequence[float]) -> str:
    """Return the verdict on whether an optimizer moves all weights, and as far as another one does."""
    return CONFIRMED if all(moved) and largest(distances) <= SAME else REFUTED


def frees(freed: Sequence[float], most: float, claimed: float) -> str:
    """Return the verdict on whether the claimed amount is freed.

    freed  measured amounts, in one or more ways
    most   upper bound of the amount that can be freed
    """
    if most < (1 - TOLERANCE) * claimed:
        return REFUTED
    return is_amount(freed, claimed)


def moves(found: Mapping[str, bool]) -> str:
    """Return the verdict on whether the weights move in every way of building the optimizer."""
    return _of_all(list(found.values()))


def works(works_so: Mapping[str, bool], ranks: int) -> str:
    """Return the verdict on whether something works in several ranks; success in one rank alone does not show it."""
    if ranks < 2:
        return REFUTED if not any(works_so.values()) else UNMEASURED
    return _of_all(list(works_so.values()))


def helps(times: Ratio) -> str:
    """Return the verdict on whether something makes a call faster, from its interval."""
    if times.low > 1:
        return CONFIRMED
    return REFUTED if times.high < 1 + NOTHING else UNMEASURED


def cuts(plain: int, with_no_sync: int, without_no_sync: int) -> str:
    """Return the verdict on whether accumulation needs fewer all-reduces than `plain`.

    `plain` is the number for the same micro-batches, each in a step of its own.
    """
    return _of_all([with_no_sync < plain, without_no_sync < plain])


def faster(ratios: Sequence[Ratio]) -> str:
    """Return the verdict on whether each change is faster; DEPENDS if only some are."""
    if all(r.low <= 1 <= r.high for r in ratios) and any(r.high >= 1 + NOTHING for r in ratios):
        return UNMEASURED
    return _of_all([r.low > 1 for r in ratios])


def multiply(together: Ratio, product: float, claimed: float) -> str:
    """Return the verdict on whether all phases together, and the product of each alone, equal the claimed multiple."""
    right = is_multiple([together], claimed) == CONFIRMED
    return _of_all([right, near(product, claimed)])


def costs(longer: Sequence[Ratio], claimed: float, *, unchanged: bool) -> str:
    """Return the verdict on whether something costs the claimed share of time and leaves the result unchanged."""
    return has_gain(longer, 1 + claimed) if unchanged else REFUTED


def scales(speedups: Sequence[float], claimed: float) -> str:
    """Return the verdict on whether each speedup is at least the claimed one."""
    return _of_all([s >= (1 - TOLERANCE) * claimed for s in speedups])


def of_four(one: float, two: float, reduced: float) -> tuple[float, float]:
    """Return bounds of the speedup of four GPUs, from figures of two: (least, largest).

    one, two  seconds of a step on one GPU and on two
    reduced   seconds of an all-reduce of the gradients on two, without other work

    A ring of n GPUs sends 2 (n - 1) / n times the gradients, 1.5 times as much on four as on two. At worst the backward
    hides nothing of the extra half, at best all of it.
    """
    two = max(one, two)
    return 4 * one / (two + reduced / 2), 4 * one / two


def _of_all(right: Sequence[bool]) -> str:
    return CONFIRMED if right and all(right) else DEPENDS if any(right) else REFUTED
