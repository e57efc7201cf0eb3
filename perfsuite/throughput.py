"""The promised throughput of a workload: items a second, by the optimized side's own seconds. Pure; no torch.

Absolute times, unlike ratios, shift from session to session with the device's clock and temperature. This is part of
the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from perfsuite.estimates import ALPHA, OWN_SECONDS_SD, Subject
from perfsuite.records import Measurement
from perfsuite.stages import BETA
from perfsuite.statistics import (
    PROCESS_DOF,
    PROCESS_SD,
    SESSION_DOF,
    Estimate,
    Noise,
    Variance,
    estimate,
    run_mean,
    within,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """This run's throughput, as the log of items a second, and the promised items a second."""

    now: Estimate
    unit: str
    promised: float
    holds: bool
    broken: bool
    """Whether not even the shift between sessions explains why it is below the promise."""

    def __str__(self) -> str:
        low, high = (shown(math.exp(x), self.unit) for x in self.now.interval())
        return f"{shown(math.exp(self.now.value), self.unit)} (95% interval {low} to {high})"

    @property
    def goal(self) -> str:
        """The promise as text."""
        return shown(self.promised, self.unit)


def throughput_of(s: Subject, selected: int, *, looks: int) -> Throughput | None:
    """Return this run's throughput; None where none is promised for this device.

    In a gate the promise holds where the estimate reaches it. `accept` and a plain run, which have one look, ask for
    the lower bound to reach it.
    """
    promised = _promised(s)
    if promised is None or missing(s):
        return None
    rates = [rate for m in s.runs if (rate := m.throughput) is not None]
    logs = [math.log(rate) for rate in rates]
    process = Variance(value=PROCESS_SD**2, dof=PROCESS_DOF).updated(*within([logs]))
    noise = Noise(process=process, session=Variance(value=OWN_SECONDS_SD**2, dof=SESSION_DOF))
    now, bound = estimate(run_mean(logs), noise), math.log(promised)
    return Throughput(
        now=now,
        unit=s.runs[0].unit,
        promised=promised,
        holds=now.value >= bound and (looks > 1 or now.p_above(bound) <= BETA),
        broken=now.p_below(bound) <= ALPHA / looks / selected,
    )


def missing(s: Subject) -> str:
    """Return why a promised throughput is not known; empty where it is, or where none is promised for this device."""
    if _promised(s) is None or any(m.throughput is not None for m in s.runs):
        return ""
    return "throughput promised, but no process counted what a call processes"


def had_reached(s: Subject) -> bool:
    """Return whether the accepted revision had reached the promised throughput."""
    promised = _promised(s)
    return (
        s.entry is not None
        and promised is not None
        and s.runs[0].items >= promised * s.entry.sides["optimized"].seconds
    )


def of(measurements: Sequence[Measurement]) -> float | None:
    """Return the items a second: the geometric mean over processes; None where no items are counted."""
    rates = [rate for m in measurements if (rate := m.throughput) is not None]
    return geometric_mean(rates) if rates else None


def shown(rate: float, unit: str) -> str:
    """Return a throughput as text: "640,200 tokens/s", "12.34 tokens/s"."""
    rounded = float(f"{rate:.4g}")
    return f"{rounded:,.0f} {unit}/s" if rounded >= 1000 else f"{rounded:g} {unit}/s"


def _promised(s: Subject) -> float | None:
    return s.promises.throughput.get(s.runs[0].device) if s.runs else None
