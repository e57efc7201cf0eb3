"""What the blocks of a process say of its log-ratio, and how exactly. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, variance

TRIMMED = {"device": 0.0, "wall": 0.25}
"""The share of the blocks that the mean of a process leaves out at each end. On the wall clock the host interrupts some
blocks: of 20 workloads on an H200 the mean of the middle half has half the variance of the mean. On the device clock
nothing is gained by it."""


def process_mean(blocks: Sequence[float], clock: str) -> float:
    """The unit of the gate's rule: the mean of one process's block log-ratios, trimmed as the clock needs.

    ValueError if there is none, or one is not finite.
    """
    if not blocks or not all(math.isfinite(b) for b in blocks):
        raise ValueError("a process has no finite block log-ratio")
    cut = int(len(blocks) * TRIMMED[clock])
    return fmean(sorted(blocks)[cut : len(blocks) - cut])


def block_variance(processes: Iterable[Sequence[float]], clock: str) -> tuple[float, float]:
    """(variance of a block within its process, pooled; its degrees of freedom, 0 if none).

    Over the number of blocks it is the variance that they leave in `process_mean`: that of the winsorized blocks, by
    Tukey and McLaughlin, where some are trimmed.
    """
    total = dof = 0.0
    for blocks in processes:
        count = len(blocks)
        cut = int(count * TRIMMED[clock])
        kept = sorted(blocks)[cut : count - cut]
        free = len(kept) - 1
        if free > 0:
            winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
            total += variance(winsorized) * (count - 1) * count / len(kept)
            dof += free
    return (total / dof if dof else 0.0), dof
