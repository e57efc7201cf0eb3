"""Plan how much of each workload a gate has to time, from its accepted entry. Pure functions; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.gate.stages import RED_PROCESSES, STAGES, beta
from perfsuite.statistics.blocks import block_variance, process_mean
from perfsuite.statistics.hierarchical import Estimate, Noise, noise_of, t_quantile, variance

LONG_S = 1.0
"""Seconds of a call above which a reference is called once, or not at all."""
SLOW_PROOF_S = 0.02
"""Seconds of a call above which a reference makes proofs slow: a proof calls it about ten times, half of them in
float64. Outputs that are bitwise equal to the accepted side's then count as proven."""
AMPLE = 10.0
"""If the stored speedup is at least this multiple of the promised one, a long reference may be timed while other
processes run."""
FEW_BLOCKS = 3
FEW_FACTOR = 2.0
"""Factor on the standard error of a handful of samples. They do not show the tails of their own error, and twice the
error covers these."""
FEW_LEAST = math.log(1.2)
"""Log of the factor by which a promise must be exceeded so that a handful of samples can confirm it; else the reference
is sampled in full."""
LEAST_BLOCKS, MOST_BLOCKS = 4, 24
LEAST_LONG_BLOCKS, LONG_BLOCK_S = 2, 0.5
"""Fewest blocks if a block takes longer than LONG_BLOCK_S and the noise allows it. Two are needed to estimate the
variance of blocks."""
CALLS = 12
"""Calls of the two optimized sides in a block whose calls are so long that each is a sample."""
MOST_FIRST = 6
"""Most processes with which a workload begins."""
TARGET_SHARE = 0.35
"""Target standard deviation of a process mean, as a share of the margin. One process then decides in about two of three
cases."""


def noise_parts(entry: Entry) -> tuple[float, float]:
    """Return (variance of a block, variance of the process shift) in the accepted A/A comparison; zeros if there is
    none."""
    processes = [p.log_ratios["accepted"] for s in entry.sessions for p in s.processes if "accepted" in p.log_ratios]
    block, dof = block_variance(processes, entry.clock)
    if len(processes) < 2 or not dof:
        return 0.0, 0.0
    means = variance([process_mean(blocks, entry.clock) for blocks in processes])
    return block, max(0.0, means - block / fmean(len(blocks) for blocks in processes))


def scale(entry: Entry, blocks: float) -> float:
    """Return the variance of a process mean over this number of blocks, as a multiple of the accepted variance."""
    block, shift = noise_parts(entry)
    accepted = [
        len(p.log_ratios["accepted"]) for s in entry.sessions for p in s.processes if "accepted" in p.log_ratios
    ]
    if not block or not accepted:
        return 1.0
    return (shift + block / blocks) / (shift + block / fmean(accepted))


def blocks_of(entry: Entry, margin: float) -> int | None:
    """Return how many blocks one process needs so that its mean has the target standard deviation, as far as more
    blocks help; None if the noise is unknown."""
    block, shift = noise_parts(entry)
    if not block:
        return None
    # If the variance of the process shift is too large, blocks that add half of it are enough.
    room = max((TARGET_SHARE * margin) ** 2 - shift, shift / 2)
    long = CALLS * entry.sides["optimized"].seconds > LONG_BLOCK_S
    return max(LEAST_LONG_BLOCKS if long else LEAST_BLOCKS, min(MOST_BLOCKS, math.ceil(block / room)))


def first_processes(entry: Entry, margin: float, prior: Noise, *, slow_to_prepare: bool) -> int:
    """Return how many processes are probably enough for a workload that is as fast as accepted: 2 to 4, or up to 6.

    An estimate one standard error above the truth must still exclude the margin. If a further process is
    `slow_to_prepare`, one process too few costs more than two too many. Then the estimate may be three standard errors
    above, with up to 6 processes. `prior` is the noise of two sides with the same code, over all workloads with the
    same clock.
    """
    process = noise_of(entry.process_means("accepted"), prior).process
    one = math.sqrt(process.value * scale(entry, blocks_of(entry, margin) or MOST_BLOCKS))
    errors, most = (3, MOST_FIRST) if slow_to_prepare else (1, RED_PROCESSES)
    allowed = [n for n in STAGES if 2 <= n <= most]
    for n in allowed:
        if (t_quantile(1 - beta(n), process.dof + n - 1) + errors) * one / math.sqrt(n) <= math.log1p(margin):
            return n
    return allowed[-1]


def is_slow(entry: Entry) -> bool:
    """Return whether the reference is so slow that its proof takes long."""
    return entry.sides["reference"].seconds > SLOW_PROOF_S


def is_ample(entry: Entry, promised: float | None) -> bool:
    """Return whether a long reference need not be timed by itself, because its promise is exceeded by far."""
    return promised is not None and entry.speedup() >= AMPLE * promised


def enough_s(entry: Entry, promised: float | None) -> float:
    """Return the seconds after which a call of a long reference may be stopped, because they are enough to show a
    promise that is exceeded by far; 0 if it must not be stopped."""
    if promised is None or entry.sides["reference"].seconds <= LONG_S or not is_ample(entry, promised):
        return 0.0
    return AMPLE * promised * entry.sides["optimized"].seconds


def doubtful_processes(entry: Entry, promised: float | None, prior: Noise, *, first: int, slow_to_prepare: bool) -> int:
    """Return how many processes have to sample the reference in full to confirm the promise, at most 6; 0 if a few
    samples in the first process are probably enough.

    The rule decides after `first` processes, at the level of that stage or of a later one. If a further process is
    `slow_to_prepare`, errors are doubled. `prior` is the noise of all workloads with the same clock.
    """
    if promised is None:
        return 0
    process = noise_of(entry.process_means(), prior).process
    exceeded, doubled = math.log(entry.speedup() / promised), 2 if slow_to_prepare else 1

    def error(processes: int) -> float:
        level = beta(max(first, processes))
        return doubled * t_quantile(1 - level, process.dof) * math.sqrt(process.value / processes)

    if exceeded >= max(FEW_LEAST, FEW_FACTOR * error(1)):
        return 0
    return next((n for n in STAGES if n < MOST_FIRST and exceeded >= error(n)), MOST_FIRST)


def reference_blocks(entry: Entry, promised: float | None) -> int:
    """Return in how many blocks of the first process the reference is timed."""
    if entry.sides["reference"].seconds <= LONG_S:
        return FEW_BLOCKS
    return 0 if promised is None or is_ample(entry, promised) else 1


def more_reference_blocks(entry: Entry) -> int | None:
    """Return in how many blocks of a further process the reference is timed, if the promise is in doubt: all (None), or
    one for a long reference."""
    return 1 if entry.sides["reference"].seconds > LONG_S else None


def further(one: Estimate, bound: float, done: int, levels: Mapping[int, float]) -> int:
    """Return how many further processes are probably enough to show that the truth is above `bound`, if the mean stays
    as it is.

    `one` is the estimate with the standard error of a single process, and `done` is the number of processes so far.
    `levels` maps a number of further processes to the level at which the rule then decides. If none is enough, return
    the largest number.
    """
    for more, level in levels.items():
        if one.value - bound >= t_quantile(1 - level, one.dof + more) * one.se / math.sqrt(done + more):
            return more
    return max(levels, default=1)
