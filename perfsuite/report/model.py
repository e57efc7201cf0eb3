"""Data that the reports show: the record of a run, and one row for each workload made from it."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from perfsuite import exit_codes
from perfsuite.baseline import Entry
from perfsuite.records import (
    OPTIMIZED,
    CodeChange,
    Counts,
    Excuse,
    Machine,
    Measurement,
    PromiseRecord,
    SideRecord,
    Status,
    Verdict,
    complete,
)
from perfsuite.report import units

BASE_SIDES = ("optimized", "reference", "accepted")
MEASURED = "measured"
"""The count of workloads that have figures and no verdict."""

Standing = Literal["faster", "equal", "slower"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Correctness:
    """Outcome of the correctness items."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    skip_reasons: Mapping[str, int] = dataclasses.field(default_factory=dict)
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Item id → failure in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """One run: what was proven, measured and decided, on which machine. Keys of the tables are workload ids."""

    machine: Machine
    revision: str | None
    started: str
    """ISO 8601, with the offset from UTC."""
    seconds: float
    measurements: Mapping[str, tuple[Measurement, ...]] = dataclasses.field(default_factory=dict)
    """Measurements by workload, one for each process."""
    verdicts: Mapping[str, Verdict] = dataclasses.field(default_factory=dict)
    promises: Mapping[str, PromiseRecord] = dataclasses.field(default_factory=dict)
    correctness: Correctness = Correctness()
    problems: tuple[str, ...] = ()
    """Problems of the run as a whole, a line each."""
    complete: bool = True
    """False for a run that was interrupted."""
    selected: int | None = None
    """Number of workloads that were asked for, of `collected`."""
    collected: int | None = None
    workloads: tuple[str, ...] = ()
    """Ids of the selected workloads."""
    skipped: tuple[str, ...] = ()
    """Selected workloads that are not for this machine and were never accepted on it."""
    shard: str = ""
    """"2/3" for the second of three parts; empty for a whole run."""
    spent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the run by what it did: "proofs" on all cores, "timing" of one workload at a time."""
    proofs: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """Seconds of each phase of a workload's proof."""
    dirty: bool = False
    """Whether tracked files differ from the revision."""
    changes: Mapping[str, CodeChange] = dataclasses.field(default_factory=dict)
    """Difference of each red workload's code from what was accepted."""
    noise: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Standard deviation of a process's mean log-ratio between the accepted code and itself."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Every workload, in the order measured; then those that have only a verdict."""
        return tuple(dict.fromkeys([*self.measurements, *self.verdicts]))

    @property
    def partial(self) -> str | None:
        """ "3 of 27 workloads" where not all were selected."""
        if self.selected is None or self.collected is None or self.selected >= self.collected:
            return None
        return f"{self.selected} of {self.collected} workloads"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Speedup of the optimized side over another side, over all processes."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def standing(self) -> Standing:
        """Standing of the optimized side: "equal" where the interval does not exclude 1."""
        if (self.low if self.low is not None else self.value) > 1:
            return "faster"
        if (self.high if self.high is not None else self.value) < 1:
            return "slower"
        return "equal"


EQUAL = 1.005
"""The most that an optimized side may take of its rival's time and still be called as fast."""


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
    """Seconds of the optimized side of the accepted revision, or of the one that is compared with."""
    slowdown: float | None = None
    """Relative to that side (0.03 = 3% slower), with its 95% interval."""
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
    """Limit / optimized: 1 is as fast as the device can."""
    sm_clock_mhz: float | None = None
    throttle: tuple[str, ...] = ()
    status: Status | None = None
    message: str = ""

    @property
    def reference(self) -> str:
        """The reference's seconds in words."""
        return f"{'≥ ' * self.least}{units.seconds(self.reference_s)}"

    @property
    def change(self) -> str:
        """Return the slowdown in words, without its interval."""
        return f"{percentage(self.slowdown)}%" if self.slowdown is not None else units.MISSING

    @property
    def change_interval(self) -> str:
        """Return the interval of the slowdown in words; empty without one."""
        if self.slowdown_low is None or self.slowdown_high is None:
            return ""
        return f"({percentage(self.slowdown_low)} to {percentage(self.slowdown_high)})"

    @property
    def times_as_fast(self) -> str:
        """The speedup in words, without its interval."""
        return f"{'≥ ' * self.least}{units.ratio(self.speedup.value)}" if self.speedup else units.MISSING

    @property
    def is_slower_than_rival(self) -> bool:
        """Whether the best rival is faster by more than half a percent; a smaller difference is called equal."""
        against = self.against_rival
        return against is not None and against.standing == "slower" and 1 / against.value > EQUAL

    @property
    def loses(self) -> str | None:
        """Why the optimized side does not beat its best rival, in one line; None where it does or has none."""
        if self.rival is None or self.against_rival is None or self.against_rival.standing == "faster":
            return None
        if not self.is_slower_than_rival:
            return f"no faster than {self.rival}"
        return f"slower than {self.rival}, by {units.percent(1 / self.against_rival.value - 1)}"


def percentage(change: float) -> str:
    """Return a relative change in percent, without a unit: "+3.4"; "0.0" where it rounds to that."""
    text = f"{100 * change:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def rows(report: RunReport) -> tuple[Row, ...]:
    """Return a row for each workload, those of one technique together."""
    made = [row(i, report.measurements.get(i, ()), report.verdicts.get(i)) for i in report.ids]
    order = {technique: n for n, technique in enumerate(dict.fromkeys(r.technique for r in made))}
    return tuple(sorted(made, key=lambda r: order[r.technique]))


def left_out(report: RunReport) -> list[str]:
    """Return a line for each reason why something was not run: for proofs, then for rivals that would have been
    timed."""
    reasons = sorted(report.correctness.skip_reasons.items(), key=lambda item: -item[1])
    rivals: dict[str, list[str]] = {}
    for workload_id in report.ids:
        technique, workload = names(workload_id)
        for rival, why in rivals_left_out(report.measurements.get(workload_id, ())).items():
            rivals.setdefault(why, []).append(f"rival {rival} of {technique}[{workload}]")
    return [f"{n} skipped: {reason}" for reason, n in reasons] + [
        f"{who[0] if len(who) == 1 else f'{len(who)} rivals'} left out: {why}"
        for why, who in sorted(rivals.items(), key=lambda item: -len(item[1]))
    ]


def rivals_left_out(measurements: Sequence[Measurement]) -> dict[str, str]:
    """Return a workload's rivals that were not timed, each with its reason."""
    return {rival: why for m in measurements for rival, why in m.skipped.items()}


def row(workload_id: str, measurements: Sequence[Measurement], verdict: Verdict | None = None) -> Row:
    """Return the row of one workload: medians over its processes, the verdict's figures where it has them."""
    technique, workload = names(workload_id)
    status, message = (verdict.status, verdict.message) if verdict else (None, "")
    if not measurements:
        return Row(id=workload_id, technique=technique, workload=workload, status=status, message=message)
    first = measurements[0]
    times = {side: side_seconds(measurements, side) for side in sides(measurements)}
    rivals = {n: c for n in times if n not in BASE_SIDES and (c := compare(measurements, n)) is not None}
    best = min(rivals, key=lambda name: rivals[name].value, default=None)
    speedup = compare(measurements, "reference")
    if verdict is not None and verdict.speedup is not None:
        speedup = Comparison(value=verdict.speedup, low=verdict.speedup_low, high=verdict.speedup_high)
    _, least = complete(measurements, "reference")
    limits = [m.limit for m in measurements if m.limit is not None]
    fractions = [f for m in measurements if (f := limit_fraction(m)) is not None]
    clocks = [m.condition.sm_clock_mhz for m in measurements if m.condition.sm_clock_mhz is not None]
    return Row(
        id=workload_id,
        technique=technique,
        workload=workload,
        clock=first.clock,
        direction=first.direction,
        dtype=first.dtype,
        processes=len(measurements),
        reference_s=times.get("reference"),
        optimized_s=times.get("optimized"),
        before_s=times.get("accepted"),
        slowdown=verdict.slowdown if verdict else None,
        slowdown_low=verdict.low if verdict else None,
        slowdown_high=verdict.high if verdict else None,
        same_code=verdict.same_code if verdict else False,
        speedup=replace(speedup, low=None, high=None) if speedup and least else speedup,
        least=least,
        rival=best,
        rival_s=_beside(rivals[best], times.get("optimized")) if best else None,
        against_rival=rivals[best] if best else None,
        limit_s=statistics.median(m.seconds for m in limits) if limits else None,
        limit_by=limits[0].by if limits else "",
        limit_fraction=statistics.median(fractions) if fractions else None,
        sm_clock_mhz=statistics.median(clocks) if clocks else None,
        throttle=tuple(sorted({reason for m in measurements for reason in m.condition.throttle})),
        status=status,
        message=message,
    )


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
    """Return the rival's seconds by its ratio to the optimized side. Its own seconds are of fewer processes, in which
    all sides may be slower."""
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
    found = re.search(r"\[(.*)\]$", workload_id)
    technique = pair if folder in ("", ".", "tests", "test") else f"{folder}/{pair}"
    return technique, found.group(1) if found else rest[-1] if rest else workload_id


def sides(measurements: Iterable[Measurement]) -> tuple[str, ...]:
    """Return every side timed in any process: reference and optimized first, then as measured."""
    seen = dict.fromkeys(name for m in measurements for name in m.sides)
    return tuple(sorted(seen, key=lambda name: {"reference": 0, "optimized": 1, "accepted": 2}.get(name, 3)))


def seconds_of(side: SideRecord | None, clock: str) -> float | None:
    """Return a side's time in one process on the workload's clock, or failing that on the one it has."""
    if side is None:
        return None
    first, second = (side.device_s, side.wall_s) if clock == "device" else (side.wall_s, side.device_s)
    if first is not None or second is not None:
        return first if first is not None else second
    return statistics.median(side.blocks_s) if side.blocks_s else None


def side_seconds(measurements: Iterable[Measurement], side: str) -> float | None:
    """Return a side's time: the median over processes, those that let it run to its end where there are any."""
    found, _ = complete(measurements, side)
    times = [t for m in found if (t := seconds_of(m.sides.get(side), m.clock)) is not None]
    return statistics.median(times) if times else None


def limit_fraction(measurement: Measurement) -> float | None:
    """Return the limit over the optimized side's time in one process: on the device clock, since the limit is the
    device's."""
    time = seconds_of(measurement.sides.get("optimized"), "device")
    return measurement.limit.seconds / time if measurement.limit is not None and time else None


def compare(measurements: Sequence[Measurement], other: str) -> Comparison | None:
    """Time of `other` over time of optimized: the median over processes of each one's median block.

    The interval is a plain one for rows that no verdict covers: the widest of the processes' own, each the
    narrowest pair of order statistics that holds the median of its blocks with 95% confidence.
    """
    logs = [sorted(m.log_ratios[other]) for m in measurements if m.log_ratios.get(other)]
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
    """Return the most memory, host syncs and launches that a call of a side took in any process."""
    found = [m.sides[side] for m in complete(measurements, side)[0]]

    def most(name: str) -> int | None:
        return max((n for s in found if (n := getattr(s, name)) is not None), default=None)

    return Counts(host_syncs=most("host_syncs"), launches=most("launches"), peak_bytes=most("peak_bytes"))


def counts(report: RunReport) -> dict[str, int]:
    """Return the number of workloads with each verdict, as `count` does."""
    return count(report.verdicts[i].status if i in report.verdicts else None for i in report.ids)


def count(statuses: Iterable[Status | None]) -> dict[str, int]:
    """Return how often there is each verdict, in the order of `Status`; None counts as "measured"."""
    found = {status.value: 0 for status in Status} | {MEASURED: 0}
    for status in statuses:
        found[status.value if status else MEASURED] += 1
    return {name: n for name, n in found.items() if n}


def headline(report: RunReport) -> str:
    """Return the run in one line."""
    parts = [f"{n} {name}" for name, n in counts(report).items()] or ["nothing measured"]
    c = report.correctness
    if c.passed or c.failed or c.skipped:
        parts.append(f"correctness: {c.passed} passed, {c.failed} failed, {c.skipped} skipped")
    if report.partial:
        parts.append(report.partial)
    return " · ".join(parts)


def sentence(report: RunReport) -> str:
    """Return the verdict of a run in one sentence."""
    code, every, red = exit_code(report), len(report.verdicts), len(not_green(report))
    shares = [f"{red} of {units.count(every, 'workload')} not green"] if red else []
    if report.correctness.failed:
        shares.append(f"{units.count(report.correctness.failed, 'proof')} failed")
    why = f" ({', '.join(shares)})" if shares else ""
    if code == exit_codes.CODE_AT_FAULT:
        return f"perfsuite is red: {_at_fault(report)}{why}."
    if code == exit_codes.ENDED_EARLY:
        return f"perfsuite is red: the run ended early{why}."
    if code == exit_codes.UNDECIDED:
        return f"perfsuite cannot decide: {_undecided(report)}{why}."
    if not every:
        return "perfsuite is green, but nothing was compared with a baseline."
    waived = len(excused(report))
    but = f", {waived} of them excused by a waiver" if waived else ""
    return f"perfsuite is green: {units.count(every, 'workload')}{but}."


def _at_fault(report: RunReport) -> str:
    """Return the first workload whose code is at fault, and why."""
    for row in rows(report):
        verdict = report.verdicts.get(row.id)
        if verdict is None or verdict.status.green:
            continue
        if verdict.status.blames_code or verdict.moved == OPTIMIZED:
            why = CLAUSE.split(reason(row.message, row), maxsplit=1)[0]
            return f"{row.technique}[{row.workload}]: {why}"
    return "the code is at fault"


CLAUSE = re.compile(r"; | \((?=95% interval)")
"""End of the first clause of a verdict's message."""


def reason(message: str, row: Row) -> str:
    """Return a verdict's message without what stands beside it already: the verdict and the workload's id."""
    pair = row.technique.rpartition("/")[2]
    for known in (row.status.value if row.status else "", row.id, f"{pair}[{row.workload}]", f"{pair}: "):
        message = message.removeprefix(known).lstrip(" :") if known else message
    return message


def condition(measurements: Sequence[Measurement]) -> str:
    """Return the state of the device while these were measured, in words."""
    conditions = [m.condition for m in measurements]
    parts = []
    clock = median(c.sm_clock_mhz for c in conditions)
    if clock is not None:
        lowest = min((c.sm_clock_min_mhz for c in conditions if c.sm_clock_min_mhz is not None), default=None)
        parts.append(f"SM clock {clock:.0f} MHz" + (f" (lowest {lowest:.0f})" if lowest not in (None, clock) else ""))
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
        parts.append(f"{aside} ABBA rounds discarded")
    return ", ".join(parts)


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known; None where none is."""
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _limited(report: RunReport) -> str:
    """Return in words what limited the clock of the workloads that are not green; empty where nothing did."""
    found = [m for v in not_green(report) for m in report.measurements.get(v.id, ())]
    return f" ({condition(found)})" if any(m.condition.throttle for m in found) else ""


def _undecided(report: RunReport) -> str:
    """Return what keeps a run from a decision, each reason once."""
    found = dict.fromkeys(
        CAUSES["device"] + _limited(report) if v.moved == "device" else why
        for v in not_green(report)
        if (why := UNDECIDED.get(v.status))
    )
    return ", and ".join(found) or "the machine, the baseline or the measurement is at fault"


UNDECIDED = {
    Status.NOISY: "the measurement is too noisy",
    Status.NO_BASELINE: "a baseline is missing",
    Status.WRONG_MACHINE: "the baseline is of another machine",
    Status.UNMEASURED: "not everything could be measured",
}
"""Verdict that blames no code → the reason in words."""

CAUSES = {
    "reference": "the reference moved, not the optimized side",
    "device": "the device was slower than when the figures were accepted",
    "software": "both sides moved, and the device did not: the software or the host differs",
}
"""`Verdict.moved`, other than the optimized side → the cause in words."""

MEANINGS = {
    Status.NOT_EQUIVALENT: "the optimized side gives wrong results",
    Status.NOT_PROVEN: "a proof failed, so that its times mean nothing",
    Status.NOT_TIMED: "the measured times cannot be trusted",
    Status.BELOW_FLOOR: "a promise is broken",
    Status.REGRESSED: "it takes more time, memory, syncs or launches than what was accepted",
    Status.NOISY: "the measurement is too noisy to decide",
    Status.NO_BASELINE: "there is nothing to compare it with",
    Status.WRONG_MACHINE: "the baseline is of another machine",
    Status.UNMEASURED: "there is no measurement",
}
"""Verdict that is not green → its meaning in words."""


def since_accepted(report: RunReport, workload_id: str) -> str:
    """Return in one line what changed since a workload was accepted; empty where that is not known."""
    change = report.changes.get(workload_id)
    if change is None:
        return ""
    if change.other:
        return f"since it was accepted: {change.other}"
    if not change.files:
        return f"none of its files has changed since {change.since}"
    files = change.files[0] + (f" and {len(change.files) - 1} more" if len(change.files) > 1 else "")
    if not change.commits:
        return f"{files} changed since {change.since}"
    others = f" and {len(change.commits) - 1} more since {change.since}" if len(change.commits) > 1 else ""
    revision, _, title = change.commits[0].partition(" ")
    return f"changed in {revision} “{title}”{others}: {files}"


def machine_line(machine: Machine) -> str:
    """Return the machine in one line."""
    device = f"{machine.count} × {machine.device_name}" if machine.count > 1 else machine.device_name
    parts = [device]
    if machine.power_limit_w is not None:
        parts.append(f"{machine.power_limit_w:.0f} W")
    for name, value in (("driver", machine.driver), ("CUDA", machine.cuda), ("torch", machine.torch)):
        if value:
            parts.append(f"{name} {value}")
    if machine.triton:
        parts.append(f"triton {machine.triton}")
    parts.append(f"Python {machine.python}")
    if machine.cpu != machine.device_name:
        parts.append(f"{machine.cpu}, {machine.cores} cores")
    else:
        parts.append(f"{machine.cores} cores")
    return ", ".join(parts)


def not_green(report: RunReport) -> tuple[Verdict, ...]:
    """Return the verdicts that are not green, in the order of the rows."""
    every = [report.verdicts[r.id] for r in rows(report) if r.id in report.verdicts]
    return tuple(v for v in every if not v.status.green)


def exit_code(report: RunReport) -> int:
    """Return the exit code of a run with this report."""
    wrong = bool(report.correctness.failed)
    return exit_codes.of(report.verdicts.values(), report.problems, early=not report.complete, wrong=wrong)


OUTCOMES = {
    exit_codes.GREEN: "green",
    exit_codes.CODE_AT_FAULT: "red: the code is at fault",
    exit_codes.ENDED_EARLY: "red: it ended early",
    exit_codes.UNDECIDED: "undecided: the machine, the baseline or the measurement is at fault",
}
"""Exit code → the run in words."""


def findings(report: RunReport) -> list[str]:
    """Return a line for each reason why the run is not green, those of the run as a whole first."""
    lines = list(report.problems)
    if not report.complete:
        lines.append("interrupted: this report holds what was measured until then")
    lines += [f"{item}: {why}" for item, why in report.correctness.failures.items()]
    for v in not_green(report):
        since = since_accepted(report, v.id)
        lines.append(f"{v.status}: {v.message.removeprefix(f'{v.status} ')}{f' ({since})' if since else ''}")
    return lines


def excused(report: RunReport) -> tuple[tuple[Row, Excuse], ...]:
    """Return each workload that a waiver covers, with the waiver."""
    waivers = ((r, report.verdicts[r.id].excuse) for r in rows(report) if r.id in report.verdicts)
    return tuple((r, excuse) for r, excuse in waivers if excuse is not None)


def without_waivers(report: RunReport) -> str:
    """Return in one line what the run would be without its waivers; empty where no waiver covers anything."""
    found = {r.id: excuse for r, excuse in excused(report)}
    if not found:
        return ""
    bare = {i: replace(v, status=found[i].status) if i in found else v for i, v in report.verdicts.items()}
    code = exit_code(replace(report, verdicts=bare))
    return f"{units.count(len(found), 'workload')} excused; without the waivers this run is {OUTCOMES[code]}"
