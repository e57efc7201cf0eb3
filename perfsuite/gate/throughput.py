"""Test the promised throughput of a workload: items per second, by the optimized side's own seconds. Pure; no torch.

Unlike ratios, absolute times shift between sessions with the device's clock rate and temperature. The error includes
this shift.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from perfsuite.gate.estimates import ALPHA, OWN_SECONDS_SD, Subject
from perfsuite.gate.stages import BETA
from perfsuite.records import Measurement, PromiseRecord
from perfsuite.statistics.hierarchical import (
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
    """This run's throughput, as the log of items per second, and the promised items per second."""

    now: Estimate
    unit: str
    promised: float
    holds: bool
    broken: bool
    """Whether the throughput is below the promise by more than a shift between sessions explains."""

    def __str__(self) -> str:
        low, high = (shown(math.exp(x), self.unit) for x in self.now.interval())
        return f"{shown(math.exp(self.now.value), self.unit)} (95% interval {low} to {high})"

    @property
    def goal(self) -> str:
        """The promise as text."""
        return shown(self.promised, self.unit)


def throughput_of(s: Subject, selected: int, *, stages: int) -> Throughput | None:
    """Return this run's throughput; None if none is promised for this device, or if no items are counted.

    In a gate, the promise holds if the estimate reaches it. In `accept` and a plain run, which have only one stage, the
    lower bound must reach it.
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
        holds=now.value >= bound and (stages > 1 or now.p_above(bound) <= BETA),
        broken=now.p_below(bound) <= ALPHA / stages / selected,
    )


def missing(s: Subject) -> str:
    """Return why a promised throughput is not known; empty if it is, or if none is promised for this device."""
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


def unknown_devices(promises: Iterable[PromiseRecord], known: Collection[str]) -> list[str]:
    """Return a line for each device with a promised throughput that is not `known`, with the nearest known name.

    The name may be misspelt, but it may also be that of a device for which nothing is accepted yet.
    """
    lines = []
    for device in sorted({name for p in promises for name in p.throughput} - set(known)):
        near = difflib.get_close_matches(device, sorted(known), n=1)
        meant = f"; is {near[0]} meant?" if near else ""
        lines.append(f"throughput={{{device!r}: …}}: that is not this device, and it has no baseline here{meant}")
    return lines


def of(measurements: Sequence[Measurement]) -> float | None:
    """Return the items per second: the geometric mean over processes; None if no items are counted."""
    rates = [rate for m in measurements if (rate := m.throughput) is not None]
    return geometric_mean(rates) if rates else None


def shown(rate: float, unit: str) -> str:
    """Return a throughput as text, e.g. "640,200 tokens/s" or "12.34 tokens/s"."""
    rounded = float(f"{rate:.4g}")
    return f"{rounded:,.0f} {unit}/s" if rounded >= 1000 else f"{rounded:g} {unit}/s"


def _promised(s: Subject) -> float | None:
    return s.promises.throughput.get(s.runs[0].device) if s.runs else None
