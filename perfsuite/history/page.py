"""The history as one self-contained HTML page, in the style of the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from markupsafe import Markup, escape

from perfsuite.history import steps, terminal
from perfsuite.history.index import ListedRun
from perfsuite.history.records import Accepted
from perfsuite.history.series import Point
from perfsuite.history.steps import Step
from perfsuite.records import Status
from perfsuite.report import html, units, workload_rows

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1080, 320, 76, 14, 12, 26
"""Dimensions of a plot, in units of its SVG view box."""
LEAST_SPAN = 0.02
"""Minimum range of a plot in log seconds."""
DATES = 6
"""Maximum number of dates below a plot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """The times of a workload on one device, run by run."""

    name: str
    subtitle: str
    ticks: tuple[tuple[float, str], ...]
    dates: tuple[tuple[float, str], ...]
    dots: tuple[tuple[float, float, bool, str], ...]
    marks: tuple[tuple[float, str], ...]
    held: tuple[tuple[float, float, float, str], ...]
    steps: tuple[tuple[float, str], ...]
    lines: tuple[tuple[str, str], ...]
    """Each step in words, with the command that finds its commit."""
    accepted: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    base: int = HEIGHT - BOTTOM


def of_runs(listed: Sequence[ListedRun], total: int) -> str:
    """Return the page of the last runs."""
    rows = [
        {
            "date (UTC)": one.run.date,
            "kind": one.run.kind_shown,
            "revision": one.run.revision_shown,
            "device": one.run.machine.device_name,
            "host": one.run.host,
            "verdicts": Markup(" ").join(
                _chip(f"{n} {name}", None if name == workload_rows.MEASURED else Status(name))
                for name, n in one.counts.items()
            ),
        }
        for one in listed
    ]
    return _page(f"The last {len(listed)} of {units.count(total, 'run')}", rows)


def of_workload(
    id: str, points: Sequence[Point], limit: int, found: Sequence[Step], accepted: Mapping[str, Sequence[Accepted]]
) -> str:
    """Return the page of one workload: a plot for each device, and its last runs."""
    rows = [
        {
            "date (UTC)": p.run.date,
            "kind": p.run.kind_shown,
            "revision": p.run.revision_shown,
            "device": p.run.machine.device_name,
            "reference": f"{'≥ ' * p.figures.least}{units.seconds(p.figures.reference_s)}",
            "optimized": units.seconds(p.figures.optimized_s),
            "speedup": p.speedup_shown,
            "change": p.change_shown,
            "peak memory": units.bytes_(p.figures.costs.peak_bytes),
            "verdict": _chip(
                p.figures.verdict.value if p.figures.verdict else workload_rows.MEASURED, p.figures.verdict
            ),
            "since the run before": "; ".join(p.marks),
        }
        for p in reversed(points[-limit:])
    ]
    charts = []
    for device in dict.fromkeys(p.run.machine.device for p in points):
        own = _timed([p for p in points if p.run.machine.device == device])
        last = accepted.get(device)
        if own:
            charts.append(_chart(id, own, [s for s in found if s.device == device], last[-1] if last else None))
    return _page(id, rows, charts)


def _page(title: str, rows: Sequence[Mapping[str, Any]], charts: Sequence[Chart] = ()) -> str:
    return html.template("history/page.html").render(
        title=title,
        charts=charts,
        note="" if steps.is_available() else steps.MISSING,
        columns=list(rows[0]) if rows else [],
        right=("reference", "optimized", "speedup", "change", "peak memory"),
        rows=[list(row.items()) for row in rows],
    )


def _chip(text: str, status: Status | None) -> Markup:
    return Markup('<span class="chip {}">{}</span>').format(html.tone_of(status), escape(text.replace("_", " ")))


def _chart(id: str, points: Sequence[Point], found: Sequence[Step], last: Accepted | None) -> Chart:
    logs = [math.log(p.figures.optimized_s or math.nan) for p in points]
    goals = [math.log(p.accepted.optimized_s) for p in points if p.accepted]
    lowest, highest = min(logs), max(logs)
    span = max(highest - lowest, LEAST_SPAN)
    # An accepted time far from all measured times is left out, so that it does not squeeze the dots together.
    seen = [*logs, *(g for g in goals if lowest - span <= g <= highest + span)]
    middle, half = (min(seen) + max(seen)) / 2, max(max(seen) - min(seen), LEAST_SPAN) * 0.55

    def x(number: float) -> float:
        return round(LEFT + (number + 0.5) / len(points) * (WIDTH - LEFT - RIGHT), 1)

    def y(log: float) -> float:
        return round(TOP + (middle + half - log) / (2 * half) * (HEIGHT - TOP - BOTTOM), 1)

    began = {p.run.started: n for n, p in enumerate(points)}
    name = points[0].run.machine.device_name
    return Chart(
        name=name,
        subtitle=f"{units.count(len(points), 'run')}, {points[0].run.date[:10]} to {points[-1].run.date[:10]}",
        ticks=tuple((y(log), units.seconds(math.exp(log))) for log in (middle + half * f for f in (-0.9, 0, 0.9))),
        dates=tuple((x(n), points[n].run.date[:10]) for n in _spread(len(points))),
        dots=tuple((x(n), y(log), _is_red(p), _label(p)) for n, (p, log) in enumerate(zip(points, logs, strict=True))),
        marks=tuple((x(n - 0.5), f"{p.run.date}: {'; '.join(p.marks)}") for n, p in enumerate(points) if p.marks),
        held=tuple(_held(points, x, y, middle, half)),
        steps=tuple((x(began[s.started] - 0.5), s.shown) for s in found if s.started in began),
        lines=tuple((s.shown, terminal.bisection(id, s)) for s in found),
        accepted=terminal.held(last) if last else "",
    )


def _timed(points: Sequence[Point]) -> list[Point]:
    """Return the points that have a time. Each also receives the marks of the points without a time just before it."""
    found: list[Point] = []
    waiting: list[str] = []
    for point in points:
        waiting += point.marks
        if steps.has_time(point.figures):
            found.append(replace(point, marks=tuple(waiting)))
            waiting = []
    return found


def _spread(count: int) -> list[int]:
    most = min(DATES, count)
    return [(2 * n + 1) * count // (2 * most) for n in range(most)]


def _is_red(point: Point) -> bool:
    return point.figures.verdict is not None and not point.figures.verdict.green


def _label(point: Point) -> str:
    status = point.figures.verdict
    parts = [
        point.run.date,
        point.run.kind_shown,
        point.run.revision_shown,
        units.seconds(point.figures.optimized_s),
        point.change_shown,
    ]
    return ", ".join([*parts, status.value if status else workload_rows.MEASURED])


def _held(
    points: Sequence[Point], x: Callable[[float], float], y: Callable[[float], float], middle: float, half: float
) -> list[tuple[float, float, float, str]]:
    """Return a horizontal line (x1, x2, y, label) for each accepted time, across the runs for which it was accepted."""
    lines = []
    for accepted, run in groupby(enumerate(points), key=lambda item: item[1].accepted):
        numbers = [n for n, _ in run]
        if accepted is not None and abs(math.log(accepted.optimized_s) - middle) <= half:
            place = y(math.log(accepted.optimized_s))
            lines.append((x(numbers[0] - 0.5), x(numbers[-1] + 0.5), place, terminal.held(accepted)))
    return lines
