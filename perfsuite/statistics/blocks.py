"""Mean and variance of the block log-ratios of a process, trimmed on the wall clock. Pure functions; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from perfsuite.statistics.hierarchical import variance

TRIMMED = {"device": 0.0, "wall": 0.25}
"""Share of a process's blocks that is trimmed at each end, by clock. On the wall clock the host interrupts some blocks:
for 20 workloads on an H200 the mean of the middle half has half the variance of the mean of all blocks. On the device
clock trimming gains nothing."""


def process_mean(blocks: Sequence[float], clock: str) -> float:
    """Return the trimmed mean of one process's block log-ratios, which is one observation of the gate's rule.

    Raises ValueError if there is no block, or one is not finite.
    """
    if not blocks or not math.isfinite(sum(blocks)):
        raise ValueError("a process has no finite block log-ratio")
    return fmean(_kept(blocks, clock))


def block_variance(processes: Iterable[Sequence[float]], clock: str) -> tuple[float, float]:
    """Return (variance of a block within its process, pooled over processes; degrees of freedom, 0 if none).

    Divided by the number of blocks, this is the variance that block noise adds to `process_mean`. For trimmed means it
    is computed from the winsorized blocks (Tukey and McLaughlin 1963).
    """
    total = dof = 0.0
    for blocks in processes:
        kept, count = _kept(blocks, clock), len(blocks)
        free = len(kept) - 1
        if free > 0:
            cut = (count - len(kept)) // 2
            winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
            total += variance(winsorized) * (count - 1) * count / len(kept)
            dof += free
    return (total / dof if dof else 0.0), dof


def _kept(blocks: Sequence[float], clock: str) -> list[float]:
    """Return the blocks that are not trimmed, in ascending order."""
    cut = int(len(blocks) * TRIMMED[clock])
    return sorted(blocks)[cut : len(blocks) - cut]
