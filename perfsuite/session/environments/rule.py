"""Decide whether a workload's time changes from one environment to another. Pure; no torch.

A sample is the mean log-ratio of a pair of processes, one in each environment, that timed the same blocks in turns. Two
processes differ more than two imports in one process, because their code, buffers and allocators have other addresses.
So the interval is wider than the gate's, and every workload is timed in several pairs. The variance is that of the
workload, shrunk toward those of all workloads on the same clock, as in `perfsuite.statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from perfsuite.statistics.blocks import process_mean
from perfsuite.statistics.hierarchical import (
    DEFAULT_NOISE,
    Estimate,
    Mean,
    Noise,
    Variance,
    estimate,
    fit_prior,
    noise_of,
)

LEVEL = 0.99
"""Confidence that all intervals of a run contain their true ratios."""
LEAST = math.log(1.01)
"""Smallest change that is reported, as a log-ratio. A smaller one is no reason to delay an upgrade."""
SD = {"device": 0.01, "wall": 0.04}
"""Clock → default standard deviation of a pair's mean, used if fewer than five workloads have several pairs. On a GPU
it is about three times that of two imports in one process; a softmax of 160 µs had 0.038 on two shared cores."""


class Change(Enum):
    """Effect of the other environment on a workload."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "no change shown"
    UNEQUAL = "not the same function"
    """Its proof failed, in one environment or in both, because its sides are not equivalent."""
    UNTIMED = "not compared"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A workload in both environments."""

    id: str
    change: Change
    message: str = ""
    """Why it was not timed."""
    clock: str = ""
    seconds: tuple[float, float] | None = None
    """Median seconds of a call here and there."""
    ratio: float | None = None
    """Seconds there over seconds here."""
    interval: tuple[float, float] | None = None
    """Interval of the ratio. All intervals of a run hold together with confidence LEVEL."""
    means: tuple[float, ...] = ()
    """The ratio from each pair of processes."""
    costs: tuple[str, ...] = ()
    """A line for each of memory, host syncs and launches of a call that differs."""


def pair_mean(here: Sequence[float], there: Sequence[float], clock: str) -> float:
    """Return the mean log-ratio of two processes from their blocks' seconds, there over here."""
    return process_mean([math.log(b / a) for a, b in zip(here, there, strict=True)], clock)


def estimates(means: Mapping[str, Sequence[float]], clocks: Mapping[str, str]) -> dict[str, Estimate]:
    """Return each workload's mean over its pairs, with its error.

    means   workload → the means of its pairs, at least one
    clocks  workload → its clock: the host is noisier than the device, so each has a prior of its own
    """
    found = {}
    for clock in set(clocks.values()):
        process = Variance(value=SD[clock] ** 2, dof=DEFAULT_NOISE.process.dof)
        default = Noise(process=process, session=DEFAULT_NOISE.session)
        ids = [i for i in means if clocks[i] == clock]
        fitted = fit_prior([[means[i]] for i in ids])
        prior = default if fitted.process == DEFAULT_NOISE.process else fitted
        for id in ids:
            values = means[id]
            mean = Mean(value=math.fsum(values) / len(values), session=0.0, process=1 / len(values))
            found[id] = estimate(mean, noise_of([values], prior))
    return found


def change_of(one: Estimate, workloads: int) -> tuple[Change, tuple[float, float]]:
    """Return the change, and the interval of the ratio that holds for all of `workloads` workloads at once."""
    low, high = one.interval(1 - (1 - LEVEL) / max(1, workloads))
    interval = (math.exp(low), math.exp(high))
    if low > 0 and one.value >= LEAST:
        return Change.SLOWER, interval
    if high < 0 and one.value <= -LEAST:
        return Change.FASTER, interval
    return Change.SAME, interval
