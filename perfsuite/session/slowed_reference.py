"""Detect a reference that is slower in a process with its optimized side than in one where that side has never run, and
an optimized side that is slower where no test is running. Pure functions; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from perfsuite.records import OPTIMIZED, REFERENCE, Alone, Measurement
from perfsuite.report import units

SHARES = {"device": 0.85, "wall": 0.7}
"""Clock → fraction of the reference's time in a process with the optimized side, below which the reference counts as
faster alone. Clock rates, caches and the load of the host differ between processes, so the fraction is below 1."""
OUTSIDE_RATIO, OUTSIDE_EXTRA_S = 1.5, 1e-4
"""Factor and seconds by which the optimized side may take longer where no test is running. There, the host waits for
each call, and caches and the allocator are in another state."""
TRIES = 3
"""Number of processes that must all show a slowdown before it is reported. Between them, the reference is timed once
more together with the optimized side. By chance alone, all three are seldom below all the others."""
LONGEST_S = 1.0
"""Seconds above which a call is timed only once. One timing is not enough for a decision."""


def beside_s(runs: Sequence[Measurement], *, sparse: bool = False) -> float | None:
    """Return the seconds of a call of the reference in processes with the optimized side: the least over them.

    None if the reference was not timed, took so long that it was called once, or (unless `sparse`) was timed in only
    a few blocks.
    """
    left_out = [(*m.at_least, *(() if sparse else m.few)) for m in runs]
    timed = [m.sides[REFERENCE] for m, out in zip(runs, left_out, strict=True) if REFERENCE in set(m.sides) - set(out)]
    least = min((median(side.blocks_s) for side in timed if side.blocks_s), default=None)
    return least if least is not None and least <= LONGEST_S else None


def has_moved(runs: Sequence[Measurement], accepted: Sequence[float]) -> bool:
    """Return whether the reference is so much slower than in every accepted process that a side may be slowing it.

    `accepted` has the seconds of a call in each of those processes.
    """
    beside = beside_s(runs, sparse=True)
    return beside is not None and bool(accepted) and max(accepted) < SHARES[runs[0].clock] * beside


def is_slowed(runs: Sequence[Measurement], alone: Sequence[Alone], *, sparse: bool = False) -> bool:
    """Return whether the reference was faster alone in each of these processes, by more than processes usually
    differ."""
    beside = beside_s(runs, sparse=sparse)
    return beside is not None and bool(alone) and max(map(_seconds, alone)) < SHARES[runs[0].clock] * beside


def message(runs: Sequence[Measurement], alone: Sequence[Alone], *, sparse: bool = False) -> str:
    """Return the message for a reference that its optimized side slows."""
    beside, by_itself = beside_s(runs, sparse=sparse), max(map(_seconds, alone))
    assert beside is not None
    optimized = min((median(m.sides[OPTIMIZED].blocks_s) for m in runs if OPTIMIZED in m.sides), default=0.0)
    honest = f"; against the reference alone it is {units.ratio(by_itself / optimized)} as fast" if optimized else ""
    return (
        f"the optimized side slows the reference: {units.seconds(beside)} in a process with both, "
        f"{units.seconds(by_itself)} in one without the optimized side ({units.percent(beside / by_itself - 1)} more); "
        f"look for a patch, a hook, a thread or a global setting; the measured speedup is not true{honest}"
    )


def is_slower_outside(runs: Sequence[Measurement], alone: Sequence[Alone]) -> bool:
    """Return whether the optimized side took much longer in every process where no test was running."""
    measured, outside = _measured_s(runs), [a.outside_s for a in alone if a.outside_s is not None]
    return bool(measured and outside) and min(outside) > OUTSIDE_RATIO * max(measured) + OUTSIDE_EXTRA_S


def outside_message(runs: Sequence[Measurement], alone: Sequence[Alone]) -> str:
    """Return the message for an optimized side that is slower where no test is running."""
    outside = min(a.outside_s for a in alone if a.outside_s is not None)
    return (
        f"its optimized side takes {units.seconds(max(_measured_s(runs)))} a call while it is measured and "
        f"{units.seconds(outside)} in a process without pytest and perfsuite: it is fast only where a test is running"
    )


def _measured_s(runs: Sequence[Measurement]) -> list[float]:
    """Return the wall-clock seconds of a call of the optimized side, for each process that measured them."""
    return [s for m in runs if OPTIMIZED in m.sides and (s := m.sides[OPTIMIZED].wall_s) is not None]


def _seconds(alone: Alone) -> float:
    return median(alone.blocks_s)
