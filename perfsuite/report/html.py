"""The run as one self-contained HTML page: no scripts, no outside resources, light and dark."""

from __future__ import annotations

import functools
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfsuite.records import Limit, Measurement, PromiseRecord, Status, complete
from perfsuite.report import model, units
from perfsuite.report.files import write as write_text
from perfsuite.report.model import Row, RunReport

if TYPE_CHECKING:
    import jinja2

WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 440, 12, 12, 18, 8, 22
"""Dimensions of a plot, in its own units."""

LOWER_BOUND = "stopped once it had taken long enough: a lower bound"
TONES = {"faster": "good", "equal": "fair", "slower": "bad"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A labelled position on a plot's axis."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """Block log-ratios as dots, a line of them a process; x is logarithmic in the ratio."""

    title: str
    subtitle: str
    tone: str
    height: float
    dots: tuple[tuple[float, float, str], ...]
    medians: tuple[tuple[float, float], ...]
    ticks: tuple[Mark, ...]
    guides: tuple[Mark, ...]
    """Lines to compare the dots with: 1×, the promise."""


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
class Detail:
    """All that the page says of one workload."""

    row: Row
    anchor: str
    facts: tuple[tuple[str, str], ...]
    sides: tuple[SideRow, ...]
    promises: tuple[tuple[str, str, str], ...]
    """(what, promised, measured)"""
    plots: tuple[Plot, ...]
    skipped: tuple[tuple[str, str], ...]


def page(report: RunReport) -> str:
    """Return the page as text."""
    every = model.rows(report)
    return template("report/page.html").render(
        report=report,
        groups=[(name, list(found)) for name, found in itertools.groupby(every, lambda row: row.technique)],
        details=[detail(report, row) for row in every],
        anchor=anchor,
        counts=_counts(report),
        headline=model.headline(report),
        machine=_machine(report),
        failures=_failures(report),
        excused=model.excused(report),
        without_waivers=model.without_waivers(report),
        units=units,
        tones=TONES,
        plot_width=WIDTH,
        plot_left=LEFT,
        plot_right=WIDTH - RIGHT,
        plot_top=TOP,
    )


def write(report: RunReport, path: Path) -> Path:
    """Write the page to `path`."""
    return write_text(path, page(report))


def detail(report: RunReport, row: Row) -> Detail:
    """Return all that the page says of one workload."""
    measurements = report.measurements.get(row.id, ())
    promise = report.promises.get(row.id, PromiseRecord())
    others = [name for name in model.sides(measurements) if name != "optimized"]
    return Detail(
        row=row,
        anchor=anchor(row),
        facts=_facts(report, row, measurements),
        sides=tuple(_side(measurements, name) for name in model.sides(measurements)),
        promises=_promises(promise, row, measurements),
        plots=tuple(p for name in others if (p := plot(measurements, name, promise)) is not None),
        skipped=tuple(model.rivals_left_out(measurements).items()),
    )


def anchor(row: Row) -> str:
    """Return the workload's place in the page; the same in every run, so that a link to it keeps its meaning."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{row.technique}-{row.workload}")


def plot(measurements: Sequence[Measurement], other: str, promise: PromiseRecord) -> Plot | None:
    """Return the blocks' log-ratios against one other side; None where no process has any."""
    lines = [m.log_ratios[other] for m in measurements if m.log_ratios.get(other)]
    comparison = model.compare(measurements, other)
    if not lines or comparison is None:
        return None
    values = [v for line in lines for v in line]
    # At least 0.5% across, so that noise far below what the gate can see does not look like scatter.
    middle, half = (min(values) + max(values)) / 2, max((max(values) - min(values)) / 2, 0.0025) * 1.15
    goals = [(0.0, "1×")]
    if other == "reference" and promise.speedup is not None:
        goals.append((math.log(promise.speedup), f"promised {units.ratio(promise.speedup)}"))
    low, high = middle - half, middle + half
    for goal, _ in goals:  # shown where that does not squeeze the dots together
        if low - 2 * half <= goal <= high + 2 * half:
            low, high = min(low, goal - half / 4), max(high, goal + half / 4)

    def x(value: float) -> float:
        return round(LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def y(n: int) -> float:
        return TOP + ROW * (n + 0.5)

    dots = tuple(
        (x(v), y(n), f"process {n + 1}, block {b}: {math.exp(v):.4f}×")
        for n, line in enumerate(lines)
        for b, v in enumerate(line, 1)
    )
    bounds = units.interval(comparison.low, comparison.high)
    return Plot(
        title=f"{other} / optimized",
        subtitle=units.ratio(comparison.value) + (f" ({bounds})" if bounds else ""),
        tone=TONES[comparison.standing],
        height=TOP + ROW * len(lines) + BOTTOM,
        dots=dots,
        medians=tuple((x(statistics.median(line)), y(n)) for n, line in enumerate(lines)),
        ticks=tuple(Mark(x=x(math.log(t)), label=label) for t, label in ticks(math.exp(low), math.exp(high))),
        guides=tuple(Mark(x=x(goal), label=label) for goal, label in goals if low <= goal <= high),
    )


def ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Return at most `most` round values within [low, high], each with its label."""
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(s * power for s in (1, 2, 2.5, 5, 10, 20) if span / (s * power) <= most - 0.5)
    digits = max(0, (step == 2.5 * power) - math.floor(math.log10(step)))
    values = [round(step * n, digits) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [(v, f"{v:.{digits}f}×") for v in values if v > 0]


def _side(measurements: Sequence[Measurement], name: str) -> SideRow:
    found, least = complete(measurements, name)
    records = [m.sides[name] for m in found]
    comparison = model.compare(measurements, name) if name != "optimized" else None
    standing = TONES[comparison.standing] if comparison else ""
    costs = model.costs(measurements, name)
    return SideRow(
        name=name,
        device=units.seconds(_median(r.device_s for r in records)),
        wall=units.seconds(_median(r.wall_s for r in records)),
        ratio=units.ratio(comparison.value) if comparison else "",
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
        blocks = sum(len(m.log_ratios.get("reference", ())) for m in measurements)
        processes = f"{len(measurements)} process{'es' if len(measurements) > 1 else ''}"
        facts.append(("measured", f"{processes}, {blocks} blocks, {spent}, seed {first.seed}"))
        if limits := [m.limit for m in measurements if m.limit is not None]:
            facts.append(("limit", _limit(limits[0], row)))
        condition = _condition(measurements)
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
        moved = f"; {verdict.moved} moved" if verdict.moved else ""
        facts.append(("compared", f"with {verdict.compared}, in {verdict.processes} processes{moved}"))
    return tuple(facts)


def _limit(limit: Limit, row: Row) -> str:
    ceiling = units.rate(limit.ceiling, "B/s" if limit.by == "memory" else "FLOP/s")
    work = units.bytes_(limit.bytes) if limit.by == "memory" else f"{units.significant(limit.flops / 1e9)} GFLOP"
    fraction = f"; optimized reaches {units.percent(row.limit_fraction)}" if row.limit_fraction is not None else ""
    return f"{units.seconds(limit.seconds)} by {limit.by} ({work} at {ceiling}){fraction}"


def _condition(measurements: Sequence[Measurement]) -> str:
    conditions = [m.condition for m in measurements]
    parts = []
    clock = _median(c.sm_clock_mhz for c in conditions)
    if clock is not None:
        lowest = min((c.sm_clock_min_mhz for c in conditions if c.sm_clock_min_mhz is not None), default=None)
        parts.append(f"SM clock {clock:.0f} MHz" + (f" (lowest {lowest:.0f})" if lowest not in (None, clock) else ""))
    temperature = max((c.temperature_c for c in conditions if c.temperature_c is not None), default=None)
    if temperature is not None:
        parts.append(f"{temperature:.0f} °C")
    power = _median(c.power_w for c in conditions)
    if power is not None:
        parts.append(f"{power:.0f} W")
    reasons = sorted({reason for c in conditions for reason in c.throttle})
    if reasons:
        parts.append(f"clock limited by {', '.join(reasons)}")
    aside = sum(c.set_aside for c in conditions)
    if aside:
        parts.append(f"{aside} ABBA rounds discarded")
    return ", ".join(parts)


def _promises(promise: PromiseRecord, row: Row, found: Sequence[Measurement]) -> tuple[tuple[str, str, str], ...]:
    costs = model.costs(found, "optimized")
    lines = []
    if promise.speedup is not None:
        measured = units.MISSING
        if row.speedup is not None:
            bounds = units.interval(row.speedup.low, row.speedup.high)
            measured = row.times_as_fast + (f" ({bounds})" if bounds else "")
        lines.append(("speedup", f"≥ {units.ratio(promise.speedup)}", measured))
    if promise.peak_bytes is not None:
        lines.append(("peak memory", f"≤ {units.bytes_(promise.peak_bytes)}", units.bytes_(costs.peak_bytes)))
    if promise.host_syncs is not None:
        lines.append(("host syncs", f"≤ {promise.host_syncs}", _count(costs.host_syncs)))
    if promise.launches is not None:
        lines.append(("kernel launches", f"≤ {promise.launches}", _count(costs.launches)))
    return tuple(lines)


def _machine(report: RunReport) -> list[tuple[str, str]]:
    m = report.machine
    device = f"{m.count} × {m.device_name}" if m.count > 1 else m.device_name
    limit = f"{m.power_limit_w:.0f} W" if m.power_limit_w is not None else None
    facts: list[tuple[str, str | None]] = [
        ("device", device),
        ("power limit", limit),
        ("driver", m.driver),
        ("CUDA", m.cuda),
        ("torch", m.torch),
        ("triton", m.triton),
        ("Python", m.python),
        ("CPU", f"{m.cpu}, {m.cores} cores" if m.cpu != m.device_name else f"{m.cores} cores"),
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
        tone = "plain" if name == model.MEASURED else tone_of(Status(name))
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
    """Return the style of a verdict: "good", "fair", "bad", or "plain" without one."""
    if status is None:
        return "plain"
    return "fair" if status is Status.WAIVED else "good" if status.green else "bad"


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _count(value: int | None) -> str:
    return units.MISSING if value is None else str(value)


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f}%".replace("-", "−")


@functools.cache
def template(name: str) -> jinja2.Template:
    """Return a page's template by its path in the package; `report/style.css` is what all pages include."""
    import jinja2  # here, so that the other forms need only the standard library

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perfsuite", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tone"] = tone_of
    return environment.get_template(name)
