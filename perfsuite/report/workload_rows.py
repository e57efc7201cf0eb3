"""A workload's row in a report: its figures, and the comparison of its sides."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.records import (
    Counts,
    Measurement,
    SideRecord,
    Status,
    Verdict,
    complete,
)
from perfsuite.report import units

BASE_SIDES = ("optimized", "reference", "accepted")

MEASURED = "measured"
"""Name under which workloads with figures but without a verdict are counted."""

Standing = Literal["faster", "equal", "slower"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Speedup of the optimized side over another side, over all processes."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def standing(self) -> Standing:
        """Standing of the optimized side: "equal" if the interval contains 1."""
        if (self.low if self.low is not None else self.value) > 1:
            return "faster"
        if (self.high if self.high is not None else self.value) < 1:
            return "slower"
        return "equal"


EQUAL = 1.005
"""Largest ratio of the optimized side's time to its rival's at which the two are called equally fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One workload as the tables show it."""

    id: str
    technique: str
    workload: str
    clock: str = ""
    direction: str = ""
    dtype: str = ""
    processes: int = 0
    reference_s: float | None = None
    optimized_s: float | None = None
    before_s: float | None = None
    """Seconds of the optimized side of the accepted revision, or of the revision that this run is compared with."""
    slowdown: float | None = None
    """Slowdown relative to that side (0.03 = 3% slower). The next two fields are its 95% interval."""
    slowdown_low: float | None = None
    slowdown_high: float | None = None
    same_code: bool = False
    """Whether the optimized side runs exactly the accepted code."""
    speedup: Comparison | None = None
    least: bool = False
    """Whether the reference was stopped once it had taken long enough: its seconds and the speedup are lower bounds."""
    rival: str | None = None
    """The fastest rival."""
    rival_s: float | None = None
    against_rival: Comparison | None = None
    limit_s: float | None = None
    limit_by: str = ""
    limit_fraction: float | None = None
    """Limit divided by the optimized side's time: 1 is as fast as the device allows."""
    sm_clock_mhz: float | None = None
    throttle: tuple[str, ...] = ()
    status: Status | None = None
    message: str = ""

    @property
    def reference(self) -> str:
        """The reference's time as text; "≥" marks a lower bound."""
        return f"{'≥ ' * self.least}{units.seconds(self.reference_s)}"

    @property
    def change(self) -> str:
        """The slowdown as text, without its interval."""
        return f"{percentage(self.slowdown)}%" if self.slowdown is not None else units.MISSING

    @property
    def change_interval(self) -> str:
        """The interval of the slowdown as text; empty if there is none."""
        if self.slowdown_low is None or self.slowdown_high is None:
            return ""
        return f"({percentage(self.slowdown_low)} to {percentage(self.slowdown_high)})"

    @property
    def times_as_fast(self) -> str:
        """The speedup as text, without its interval; "≥" marks a lower bound."""
        return f"{'≥ ' * self.least}{units.ratio(self.speedup.value)}" if self.speedup else units.MISSING

    @property
    def is_slower_than_rival(self) -> bool:
        """Whether the best rival is faster by more than half a percent; a smaller difference is called equal."""
        against = self.against_rival
        return against is not None and against.standing == "slower" and 1 / against.value > EQUAL

    @property
    def loses(self) -> str | None:
        """Clause that says how the optimized side fails to beat its best rival; None if it beats it or has no rival."""
        if self.rival is None or self.against_rival is None or self.against_rival.standing == "faster":
            return None
        if not self.is_slower_than_rival:
            return f"no faster than {self.rival}"
        return f"slower than {self.rival}, by {units.percent(1 / self.against_rival.value - 1)}"


def percentage(change: float) -> str:
    """Return a relative change in percent, without a unit: "+3.4"; "0.0" if it rounds to zero."""
    text = f"{100 * change:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def row(workload_id: str, measurements: Sequence[Measurement], verdict: Verdict | None = None) -> Row:
    """Return the row of one workload: the verdict's figures if it has them, otherwise medians over the processes."""
    technique, workload = names(workload_id)
    made = Row(id=workload_id, technique=technique, workload=workload)
    if verdict:
        made = replace(made, status=verdict.status, message=verdict.message)
    if not measurements:
        return made
    return replace(made, **_shown(measurements), **_times(measurements), **_changes(measurements, verdict))


def _shown(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return the fields that describe the workload, its limit and the state of the device."""
    first = measurements[0]
    limits = [m.limit for m in measurements if m.limit is not None]
    fractions = [f for m in measurements if (f := limit_fraction(m)) is not None]
    clocks = [m.condition.sm_clock_mhz for m in measurements if m.condition.sm_clock_mhz is not None]
    return {
        "clock": first.clock,
        "direction": first.direction,
        "dtype": first.dtype,
        "processes": len(measurements),
        "limit_s": statistics.median(m.seconds for m in limits) if limits else None,
        "limit_by": limits[0].by if limits else "",
        "limit_fraction": statistics.median(fractions) if fractions else None,
        "sm_clock_mhz": statistics.median(clocks) if clocks else None,
        "throttle": tuple(sorted({reason for m in measurements for reason in m.condition.throttle})),
    }


def _times(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return the fields with the seconds of the sides and of the best rival."""
    times = {side: side_seconds(measurements, side) for side in sides(measurements)}
    rivals = {n: c for n in times if n not in BASE_SIDES and (c := compare(measurements, n)) is not None}
    best = min(rivals, key=lambda name: rivals[name].value, default=None)
    return {
        "reference_s": times.get("reference"),
        "optimized_s": times.get("optimized"),
        "before_s": times.get("accepted"),
        "rival": best,
        "rival_s": _beside(rivals[best], times.get("optimized")) if best else None,
        "against_rival": rivals[best] if best else None,
    }


def _changes(measurements: Sequence[Measurement], verdict: Verdict | None) -> dict[str, Any]:
    """Return the fields with the speedup and with the change against the accepted revision."""
    speedup = compare(measurements, "reference")
    if verdict is not None and verdict.speedup is not None:
        speedup = Comparison(value=verdict.speedup, low=verdict.speedup_low, high=verdict.speedup_high)
    _, least = complete(measurements, "reference")
    made = {"speedup": replace(speedup, low=None, high=None) if speedup and least else speedup, "least": least}
    if verdict is None:
        return made
    slowdown = {"slowdown": verdict.slowdown, "slowdown_low": verdict.low, "slowdown_high": verdict.high}
    return made | slowdown | {"same_code": verdict.same_code}


def entry_row(entry: Entry) -> Row:
    """Return the row of an accepted workload, over all its sessions."""
    technique, workload = names(entry.id)
    rivals = {n: c for n in entry.sides if n not in BASE_SIDES and (c := _accepted(entry, n)) is not None}
    best = min(rivals, key=lambda name: rivals[name].value, default=None)
    side = entry.sides.get("optimized")
    optimized = side.seconds if side else None
    on_device = (side.device_s or side.seconds) if side else None
    return Row(
        id=entry.id,
        technique=technique,
        workload=workload,
        clock=entry.clock,
        direction=entry.direction,
        dtype=entry.dtype,
        processes=sum(len(session.processes) for session in entry.sessions),
        reference_s=entry.sides["reference"].seconds if "reference" in entry.sides else None,
        optimized_s=optimized,
        speedup=_accepted(entry, "reference"),
        rival=best,
        rival_s=_beside(rivals[best], optimized) if best else None,
        against_rival=rivals[best] if best else None,
        limit_s=entry.limit.seconds if entry.limit else None,
        limit_by=entry.limit.by if entry.limit else "",
        limit_fraction=entry.limit.seconds / on_device if entry.limit and on_device else None,
    )


def _beside(rival: Comparison, optimized_s: float | None) -> float | None:
    """Return the rival's seconds, computed from its ratio to the optimized side. The rival was timed in fewer
    processes, so its own seconds are not comparable with the other times of the row."""
    return rival.value * optimized_s if optimized_s is not None else None


def _accepted(entry: Entry, other: str) -> Comparison | None:
    """Return the stored comparison: the geometric mean over sessions, with the range of the processes."""
    means = [mean for session in entry.process_means(other) for mean in session]
    if not means:
        return None
    several = len(means) > 1
    return Comparison(
        value=entry.speedup(other),
        low=math.exp(min(means)) if several else None,
        high=math.exp(max(means)) if several else None,
    )


def names(workload_id: str) -> tuple[str, str]:
    """Return (technique, workload): "tests/geometry/test_rotor_update.py::rotor_update::speed[window64]" gives
    ("geometry/rotor_update", "window64")."""
    path, *rest = workload_id.split("::")
    pair = rest[0] if len(rest) > 1 else re.sub(r"^test_|\.py$", "", path.rpartition("/")[2])
    folder = path.rpartition("/")[0].rpartition("/")[2]
    found = re.search(r"::speed\[(.*)\]$", workload_id)
    technique = pair if folder in ("", ".", "tests", "test") else f"{folder}/{pair}"
    return technique, found.group(1) if found else rest[-1] if rest else workload_id


def names_of(ids: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return (technique, workload) for each workload id. If several modules have pairs of the same name, the technique
    begins with the module's path."""
    found = {id: names(id) for id in ids}
    modules: dict[str, set[str]] = {}
    for id, (technique, _) in found.items():
        modules.setdefault(technique, set()).add(id.partition("::")[0])
    for id, (technique, workload) in found.items():
        if len(modules[technique]) > 1:
            path, pair = id.partition("::")[0].removesuffix(".py"), technique.rpartition("/")[2]
            found[id] = f"{path}/{pair}", workload
    return found


def distinct(rows: Collection[Row]) -> list[Row]:
    """Return the rows of one table, with techniques named as by `names_of`."""
    found = names_of([row.id for row in rows])
    return [replace(row, technique=found[row.id][0]) for row in rows]


def sides(measurements: Iterable[Measurement]) -> tuple[str, ...]:
    """Return every side timed in any process: reference, optimized, accepted, then the rivals in measured order."""
    seen = dict.fromkeys(name for m in measurements for name in m.sides)
    return tuple(sorted(seen, key=lambda name: {"reference": 0, "optimized": 1, "accepted": 2}.get(name, 3)))


def seconds_of(side: SideRecord | None, clock: str) -> float | None:
    """Return a side's time in one process: on this clock, else on the other one, else the median of its blocks."""
    if side is None:
        return None
    first, second = (side.device_s, side.wall_s) if clock == "device" else (side.wall_s, side.device_s)
    if first is not None or second is not None:
        return first if first is not None else second
    return statistics.median(side.blocks_s) if side.blocks_s else None


def side_seconds(measurements: Iterable[Measurement], side: str) -> float | None:
    """Return a side's time: the median over the processes in which it ran to its end, or over all if it did in none."""
    found, _ = complete(measurements, side)
    times = [t for m in found if (t := seconds_of(m.sides.get(side), m.clock)) is not None]
    return statistics.median(times) if times else None


def limit_fraction(measurement: Measurement) -> float | None:
    """Return the limit divided by the optimized side's time in one process. The time is on the device clock, because
    the limit is the device's."""
    time = seconds_of(measurement.sides.get("optimized"), "device")
    return measurement.limit.seconds / time if measurement.limit is not None and time else None


def compare(measurements: Sequence[Measurement], other: str) -> Comparison | None:
    """Return the time of `other` over the time of optimized: the median over processes of the median block.

    The interval is a simple one, for rows without a verdict: it spans the intervals of all processes. The interval of a
    process is the narrowest pair of order statistics that contains the median of its blocks with 95% confidence.
    Processes that stopped `other` count only if all of them did.
    """
    whole, _ = complete(measurements, other)
    logs = [sorted(m.log_ratios[other]) for m in whole if m.log_ratios.get(other)]
    if not logs:
        ours, theirs = side_seconds(measurements, "optimized"), side_seconds(measurements, other)
        return Comparison(value=theirs / ours) if ours and theirs else None
    value = statistics.median(statistics.median(blocks) for blocks in logs)
    bounds = [b for blocks in logs if (b := _median_bounds(blocks)) is not None]
    if not bounds:
        return Comparison(value=math.exp(value))
    low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
    return Comparison(value=math.exp(value), low=math.exp(low), high=math.exp(high))


def _median_bounds(ordered: Sequence[float]) -> tuple[float, float] | None:
    n, outside, k = len(ordered), 0.0, 0
    while k < n // 2:
        outside += 2 * math.comb(n, k) / 2**n
        if outside > 0.05:
            break
        k += 1
    return (ordered[k - 1], ordered[n - k]) if k else None


def costs(measurements: Iterable[Measurement], side: str) -> Counts:
    """Return the peak memory, host syncs and launches of a call of a side, each the largest over its processes."""
    found = [m.sides[side] for m in complete(measurements, side)[0]]

    def most(name: str) -> int | None:
        return max((n for s in found if (n := getattr(s, name)) is not None), default=None)

    return Counts(host_syncs=most("host_syncs"), launches=most("launches"), peak_bytes=most("peak_bytes"))


def condition(measurements: Sequence[Measurement]) -> str:
    """Return a one-line description of the device's state during these measurements."""
    conditions = [m.condition for m in measurements]
    parts = []
    clock = median(c.sm_clock_mhz for c in conditions)
    if clock is not None:
        lowest = min((c.sm_clock_min_mhz for c in conditions if c.sm_clock_min_mhz is not None), default=None)
        is_lower = lowest is not None and round(lowest) != round(clock)
        parts.append(f"SM clock {clock:.0f} MHz" + (f" (lowest {lowest:.0f})" if is_lower else ""))
    temperature = max((c.temperature_c for c in conditions if c.temperature_c is not None), default=None)
    if temperature is not None:
        parts.append(f"{temperature:.0f} °C")
    power = median(c.power_w for c in conditions)
    if power is not None:
        parts.append(f"{power:.0f} W")
    reasons = sorted({reason for c in conditions for reason in c.throttle})
    if reasons:
        parts.append(f"clock limited by {', '.join(reasons)}")
    aside = sum(c.set_aside for c in conditions)
    if aside:
        parts.append(f"{units.count(aside, 'ABBA round')} discarded")
    return ", ".join(parts)


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if all are."""
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None
