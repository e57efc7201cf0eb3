"""The run as one self-contained HTML page: no outside resources, light and dark.

Everything is readable without scripts. The only script sorts and filters the table, and opens details for links and
printing.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfsuite.gate import exit_codes, throughput
from perfsuite.records import (
    ACCEPTED,
    OPTIMIZED,
    REFERENCE,
    CodeChange,
    Limit,
    Measurement,
    PromiseRecord,
    Status,
    Verdict,
    complete,
)
from perfsuite.report import model, plots, units, workload_rows
from perfsuite.report.files import write as write_text
from perfsuite.report.model import RunReport
from perfsuite.report.workload_rows import Comparison, Row

if TYPE_CHECKING:
    import jinja2

LOWER_BOUND = "stopped once it had taken long enough: a lower bound"
WITHOUT_FIGURES = (Status.NOT_EQUIVALENT, Status.NOT_PROVEN, Status.NOT_TIMED)
"""Verdicts with which the measured speedup means nothing."""
OUTCOMES = {exit_codes.GREEN: "good", exit_codes.UNDECIDED: "fair"}
"""Exit code of a run → style of its verdict; other codes have the style "bad"."""
TONES = {"faster": "good", "equal": "fair", "slower": "bad"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRow:
    """One side in the table of a workload."""

    name: str
    device: str
    wall: str
    ratio: str
    tone: str
    peak: str
    syncs: str
    launches: str
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRow:
    """One process in the table of a workload."""

    ratio: str
    """Time of the side `Detail.against` over that of the optimized side."""
    clock: str
    temperature: str
    power: str
    throttle: str
    discarded: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RedRow:
    """A workload that is not green, as the top of the page shows it."""

    row: Row
    anchor: str
    change: str
    """Seconds of the accepted code and of the current one, timed side by side."""
    since: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """Workloads that are not green for the same reason."""

    status: Status
    cause: str
    rows: tuple[RedRow, ...]
    shown: int
    """Number of rows that are shown at once; the others are folded away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detail:
    """Everything that the page shows about one workload."""

    row: Row
    anchor: str
    facts: tuple[tuple[str, str], ...]
    sides: tuple[SideRow, ...]
    promises: tuple[tuple[str, str, str, str], ...]
    """(what, promised, measured, tone)"""
    processes: tuple[ProcessRow, ...]
    against: str
    """Other side of the ratios of `processes`: the accepted one if it was timed, else the reference or a rival."""
    blocks: tuple[plots.Blocks, ...]
    densities: plots.Densities | None
    roofline: plots.Roofline | None
    change: CodeChange | None
    command: str
    skipped: tuple[tuple[str, str], ...]


def page(report: RunReport) -> str:
    """Return the page as HTML text."""
    every = _red_first(model.rows(report))
    known = plots.ceilings(m for found in report.measurements.values() for m in found)
    details = [detail(report, row, known) for row in every]
    return template("report/page.html").render(
        report=report,
        groups=[(name, list(found)) for name, found in itertools.groupby(every, lambda row: row.technique)],
        details=details,
        alarms=alarms(report, every),
        anchor=anchor,
        counts=_counts(report),
        headline=model.headline(report),
        sentence=model.sentence(report),
        outcome=OUTCOMES.get(model.exit_code(report), "bad"),
        machine=_machine(report),
        failures=_failures(report),
        excused=model.excused(report),
        without_waivers=model.without_waivers(report),
        has_verdicts=bool(report.verdicts),
        filled=_filled(every),
        without_figures=WITHOUT_FIGURES,
        broken={d.row.id: [what for what, _, _, tone in d.promises if tone] for d in details},
        units=units,
        tones=TONES,
        plots=plots,
    )


def write(report: RunReport, path: Path) -> Path:
    """Write the page to `path`."""
    return write_text(path, page(report))


def _red_first(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, first those of techniques that have a row that is not green."""
    every = list(rows)
    red = {row.technique for row in every if row.status is not None and not row.status.green}
    return sorted(every, key=lambda row: row.technique not in red)


def _filled(rows: Iterable[Row]) -> set[str]:
    """Return the names of the optional columns that at least one row fills."""
    columns = {"rival": "rival", "limit": "limit_fraction", "clock": "sm_clock_mhz"}
    return {name for row in rows for name, field in columns.items() if getattr(row, field) is not None}


def alarms(report: RunReport, every: Iterable[Row]) -> tuple[Alarm, ...]:
    """Return the workloads that are not green, grouped by their verdict and by what moved."""
    groups: dict[tuple[Status, str | None], list[Row]] = {}
    for row in every:
        if row.status is not None and not row.status.green:
            groups.setdefault((row.status, report.verdicts[row.id].moved), []).append(row)
    return tuple(_alarm(report, status, moved, rows) for (status, moved), rows in groups.items())


def _alarm(report: RunReport, status: Status, moved: str | None, rows: Sequence[Row]) -> Alarm:
    cause = model.CAUSES.get(moved or "") or model.MEANINGS[status]
    if moved == "device":
        measurements = [m for row in rows for m in report.measurements.get(row.id, ())]
        cause += ", for the accepted code as well" if any(ACCEPTED in m.sides for m in measurements) else ""
        cause += f": {condition}" if (condition := workload_rows.condition(measurements)) else ""
    return Alarm(
        status=status,
        cause=cause,
        shown=1 if moved in ("device", "software") else 3,  # all rows have the same cause
        rows=tuple(
            RedRow(
                row=row,
                anchor=anchor(row),
                change=_side_by_side(row),
                since=model.since_accepted(report, row.id),
            )
            for row in rows
        ),
    )


def _side_by_side(row: Row) -> str:
    if row.slowdown is None or row.before_s is None or row.optimized_s is None:
        return ""
    return f"accepted code {units.seconds(row.before_s)}, now {units.seconds(row.optimized_s)}, side by side"


def detail(report: RunReport, row: Row, known: Mapping[str, float]) -> Detail:
    """Return everything that the page shows about one workload.

    known  `plots.ceilings` of the run
    """
    measurements = report.measurements.get(row.id, ())
    promise, verdict = report.promises.get(row.id, PromiseRecord()), report.verdicts.get(row.id)
    margin, noise = verdict.margin if verdict else None, report.noise.get(row.id)
    sides = workload_rows.sides(measurements)
    others = sorted((n for n in sides if n != OPTIMIZED), key=lambda name: name != ACCEPTED)
    return Detail(
        row=row,
        anchor=anchor(row),
        facts=_facts(report, row, measurements),
        sides=tuple(_side(measurements, name, verdict) for name in sides),
        promises=_promises(promise, row, measurements),
        processes=_processes(measurements, others[0]) if others else (),
        against=others[0] if others else "",
        blocks=tuple(
            p
            for n in others
            if (p := plots.blocks(measurements, n, promise, _judged(verdict, n), margin=margin, noise=noise))
            is not None
        ),
        densities=plots.densities(measurements),
        roofline=plots.roofline(measurements, known),
        change=report.changes.get(row.id),
        command=_command(row, verdict),
        skipped=tuple(model.rivals_left_out(measurements).items()),
    )


def _command(row: Row, verdict: Verdict | None) -> str:
    """Return the command that measures the workload again."""
    mode = "perfsuite gate --partial" if verdict is not None else "pytest -m perf"
    return f"{mode} {shlex.quote(row.id)}"


def _processes(measurements: Sequence[Measurement], other: str) -> tuple[ProcessRow, ...]:
    rows = []
    for m in measurements:
        comparison, c = workload_rows.compare([m], other), m.condition
        clock = f"{c.sm_clock_mhz:.0f}" if c.sm_clock_mhz is not None else units.MISSING
        if c.sm_clock_min_mhz is not None and c.sm_clock_min_mhz != c.sm_clock_mhz:
            clock += f" (lowest {c.sm_clock_min_mhz:.0f})"
        rows.append(
            ProcessRow(
                ratio=units.ratio(comparison.value) if comparison else units.MISSING,
                clock=clock,
                temperature=f"{c.temperature_c:.0f}" if c.temperature_c is not None else units.MISSING,
                power=f"{c.power_w:.0f}" if c.power_w is not None else units.MISSING,
                throttle=", ".join(c.throttle) or units.MISSING,
                discarded=str(c.set_aside),
            )
        )
    return tuple(rows)


def anchor(row: Row) -> str:
    """Return the HTML id of the workload's details. It depends on the workload's id alone: links stay valid.

    Names may differ only in characters that are replaced here, so a digest of the id follows.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(workload_rows.names(row.id)))
    return f"{name}-{hashlib.sha256(row.id.encode('utf-8', 'backslashreplace')).hexdigest()[:8]}"


def _judged(verdict: Verdict | None, other: str) -> Comparison | None:
    """Return the verdict's ratio of another side's time to the optimized side's; None if the verdict has none."""
    if verdict is None:
        return None
    if other == ACCEPTED and verdict.slowdown is not None:
        low, high = ((1 / (1 + v) if v is not None else None) for v in (verdict.high, verdict.low))
        return Comparison(value=1 / (1 + verdict.slowdown), low=low, high=high)
    if other == REFERENCE and verdict.speedup is not None:
        return Comparison(value=verdict.speedup, low=verdict.speedup_low, high=verdict.speedup_high)
    return None


def _side(measurements: Sequence[Measurement], name: str, verdict: Verdict | None) -> SideRow:
    found, least = complete(measurements, name)
    records = [m.sides[name] for m in found]
    comparison = _judged(verdict, name) or workload_rows.compare(measurements, name) if name != OPTIMIZED else None
    invalid = verdict is not None and verdict.status in WITHOUT_FIGURES
    standing = TONES[comparison.standing] if comparison and not invalid else ""
    costs = workload_rows.costs(measurements, name)
    return SideRow(
        name=name,
        device=units.seconds(workload_rows.median(r.device_s for r in records)),
        wall=units.seconds(workload_rows.median(r.wall_s for r in records)),
        ratio=units.ratio(comparison.value) if comparison and not (invalid and name == REFERENCE) else "",
        tone=standing,
        peak=units.bytes_(costs.peak_bytes),
        syncs=_count(costs.host_syncs),
        launches=_count(costs.launches),
        note=LOWER_BOUND if least else "a few samples only" if any(name in m.few for m in measurements) else "",
    )


def _facts(report: RunReport, row: Row, measurements: Sequence[Measurement]) -> tuple[tuple[str, str], ...]:
    facts = [("id", row.id)]
    if measurements:
        first = measurements[0]
        sizes = ", ".join(f"{k}={v}" for k, v in first.sizes.items())
        facts.append(("workload", f"{sizes or 'no sizes'}; {first.dtype}, {first.direction}, {first.clock} clock"))
        spent = units.duration(sum(m.seconds for m in measurements))
        blocks = units.count(sum(_blocks(m) for m in measurements), "block")
        facts.append(("measured", f"{_processes_of(len(measurements))}, {blocks}, {spent}, seed {first.seed}"))
        if (rate := throughput.of(measurements)) is not None:
            facts.append(("throughput", throughput.shown(rate, first.unit)))
        if limits := [m.limit for m in measurements if m.limit is not None]:
            facts.append(("limit", _limit(limits[0], row)))
        condition = workload_rows.condition(measurements)
        if condition:
            facts.append(("device", condition))
        if first.evidence is not None:
            e = first.evidence
            facts.append(("proven", f"{e.elements} elements, worst error {units.percent(e.worst)} of its budget"))
    verdict = report.verdicts.get(row.id)
    if verdict is not None and verdict.slowdown is not None:
        interval = ""
        if verdict.low is not None and verdict.high is not None:
            interval = f" ({_signed(verdict.low)} to {_signed(verdict.high)})"
        margin = f", margin {units.percent(verdict.margin)}" if verdict.margin is not None else ""
        facts.append(("time against accepted", f"{_signed(verdict.slowdown)}{interval}{margin}"))
    if verdict is not None and verdict.compared:
        moved = f"; {model.CAUSES[verdict.moved]}" if verdict.moved in model.CAUSES else ""
        facts.append(("compared", f"with {verdict.compared}, in {_processes_of(verdict.processes)}{moved}"))
    return tuple(facts)


def _blocks(measurement: Measurement) -> int:
    """Return the number of blocks of one process: the optimized side is timed in each of them."""
    ours = measurement.sides.get(OPTIMIZED)
    return len(ours.blocks_s) if ours is not None else 0


def _processes_of(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def _limit(limit: Limit, row: Row) -> str:
    ceiling = units.rate(limit.ceiling, "B/s" if limit.by == "memory" else "FLOP/s")
    work = units.bytes_(limit.bytes) if limit.by == "memory" else f"{units.significant(limit.flops / 1e9)} GFLOP"
    fraction = f"; optimized reaches {units.percent(row.limit_fraction)}" if row.limit_fraction is not None else ""
    return f"{units.seconds(limit.seconds)} by {limit.by} ({work} at {ceiling}){fraction}"


def _promises(promise: PromiseRecord, row: Row, found: Sequence[Measurement]) -> tuple[tuple[str, str, str, str], ...]:
    costs = workload_rows.costs(found, "optimized")
    lines = []
    if promise.speedup is not None:
        measured = units.MISSING
        if row.speedup is not None:
            bounds = units.interval(row.speedup.low, row.speedup.high)
            measured = row.times_as_fast + (f" ({bounds})" if bounds else "")
        measured = "not valid" if row.status in WITHOUT_FIGURES else measured
        tone = "bad" if row.speedup is not None and row.speedup.value < promise.speedup else ""
        lines.append(("speedup", f"≥ {units.ratio(promise.speedup)}", measured, tone))
    if goal := promise.throughput.get(found[0].device) if found else None:
        rate = throughput.of(found)
        reached = throughput.shown(rate, found[0].unit) if rate is not None else units.MISSING
        tone = "bad" if rate is not None and rate < goal else ""
        lines.append(("throughput", f"≥ {throughput.shown(goal, found[0].unit)}", reached, tone))
    if promise.peak_bytes is not None:
        tone = _above(costs.peak_bytes, promise.peak_bytes)
        lines.append(("peak memory", f"≤ {units.bytes_(promise.peak_bytes)}", units.bytes_(costs.peak_bytes), tone))
    if promise.host_syncs is not None:
        lines.append(
            (
                "host syncs",
                f"≤ {promise.host_syncs}",
                _count(costs.host_syncs),
                _above(costs.host_syncs, promise.host_syncs),
            )
        )
    if promise.launches is not None:
        lines.append(
            (
                "kernel launches",
                f"≤ {promise.launches}",
                _count(costs.launches),
                _above(costs.launches, promise.launches),
            )
        )
    return tuple(lines)


def _above(measured: int | None, most: int) -> str:
    return "bad" if measured is not None and measured > most else ""


def _machine(report: RunReport) -> list[tuple[str, str]]:
    m = report.machine
    device = f"{m.count} × {m.device_name}" if m.count > 1 else m.device_name
    limit = f"{m.power_limit_w:.0f} W" if m.power_limit_w is not None else None
    cores = units.count(m.cores, "core")
    facts: list[tuple[str, str | None]] = [
        ("device", device),
        ("power limit", limit),
        ("driver", m.driver),
        ("CUDA", m.cuda),
        ("torch", m.torch),
        ("triton", m.triton),
        ("Python", m.python),
        ("CPU", f"{m.cpu}, {cores}" if m.cpu != m.device_name else cores),
        ("memory", units.bytes_(m.memory_bytes)),
        ("platform", m.platform),
        ("revision", report.revision),
        ("started", report.started),
        ("took", units.duration(report.seconds)),
    ]
    return [(name, value) for name, value in facts if value]


def _counts(report: RunReport) -> list[tuple[str, int, str]]:
    counts = []
    for name, n in model.counts(report).items():
        tone = "plain" if name == workload_rows.MEASURED else tone_of(Status(name))
        counts.append((name.replace("_", " "), n, tone))
    c = report.correctness
    if c.passed or c.failed or c.skipped:
        counts.append(("proven", c.passed, "good"))
        counts += [("failed", c.failed, "bad")] if c.failed else []
        counts += [("skipped", c.skipped, "plain")] if c.skipped else []
    return counts


def _failures(report: RunReport) -> list[str]:
    lines = list(report.problems)
    if not report.complete:
        lines.append("Interrupted: this report holds what was measured until then.")
    return lines + [f"{item}: {why}" for item, why in report.correctness.failures.items()]


def tone_of(status: Status | None) -> str:
    """Return the style of a verdict: "good" if it is green, "bad" if the code is at fault, "fair" if it is waived or
    undecided, and "plain" without a verdict."""
    if status is None:
        return "plain"
    if status is Status.WAIVED:
        return "fair"
    return "good" if status.green else "bad" if status.blames_code else "fair"


def _count(value: int | None) -> str:
    return units.MISSING if value is None else str(value)


def _signed(fraction: float) -> str:
    return f"{workload_rows.percentage(fraction)}%".replace("-", "−")


@functools.cache
def template(name: str) -> jinja2.Template:
    """Return the template at this path in the package. All pages include `report/style.css`."""
    import jinja2  # here, so that only this format needs jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perfsuite", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tone"] = tone_of
    environment.filters["reason"] = model.reason
    return environment.get_template(name)
