"""Check, before a small slowdown is reported, whether two imports of the current code differ by as much.

Two imports of one revision are at different addresses. On an H200, this alone made one of 70 workloads 1.3% slower than
its own copy in each of four processes. Comparing the current code with a second import of itself reveals such a
difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.gate import causes, counts
from perfsuite.records import Measurement, Status, Verdict
from perfsuite.statistics.blocks import process_mean
from perfsuite.statistics.hierarchical import Noise, Variance, estimate, paired_mean, variance

SMALL = 0.03
"""Slowdown above which no confirmation is needed: no two imports of one revision have differed by this much."""
LEVEL = 0.01
"""Significance level at which the two imports count as different. It bounds the probability that the noise of two equal
imports hides a slowdown."""


def is_needed(verdict: Verdict, runs: Sequence[Measurement], entry: Entry | None) -> bool:
    """Return whether a verdict reports, from interleaved times alone, a slowdown that may be due to the import."""
    if verdict.status is not Status.REGRESSED or verdict.slowdown is None or verdict.slowdown > SMALL:
        return False
    return all("accepted" in m.log_ratios for m in runs) and not counts.more_than_accepted(runs, entry)


def confirmed(verdict: Verdict, runs: Sequence[Measurement]) -> Verdict:
    """Return the verdict, or NOISY if the current code is slower than its own second import by at least half as much.

    `runs` are at least two processes whose "accepted" side is a second import of the current code.
    """
    values = [-process_mean(m.log_ratios["accepted"], m.clock) for m in runs]
    known = Variance(value=variance(values), dof=len(values) - 1)
    found = estimate(paired_mean(values), Noise(process=known, session=Variance(value=0.0, dof=math.inf)))
    assert verdict.slowdown is not None
    if found.p_above(0.0) > LEVEL or found.value < math.log1p(verdict.slowdown) / 2:
        return verdict
    low, high = (math.expm1(x) for x in found.interval())
    text = verdict.message.removeprefix(f"{verdict.status} {verdict.id}: ")
    message = (
        f"{Status.NOISY} {verdict.id}: {text}; but the current code, imported twice, is {causes.change(found.value)} "
        f"than its own copy (95% interval {100 * low:.1f} to {high:.1%}): a slowdown this small cannot be shown for "
        "this workload on this machine; measure on another one"
    )
    return replace(verdict, status=Status.NOISY, moved=None, message=message)
