"""The history as tables in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfsuite.history import steps
from perfsuite.history.index import ListedRun
from perfsuite.history.records import Accepted
from perfsuite.history.series import Point
from perfsuite.history.steps import Step
from perfsuite.records import Status
from perfsuite.report import html, units, workload_rows

BARS = "▁▂▃▄▅▆▇█"
LEAST_SPAN = 0.05
"""Minimum range of a sparkline in log seconds, so that noise does not look like a step."""
MOST_BARS = 60
MOST_STEPS = 10
STYLES = {"good": "green", "fair": "yellow", "bad": "bold red", "plain": ""}


def show_runs(out: Console, listed: Sequence[ListedRun], total: int, found: Mapping[str, Sequence[Step]]) -> None:
    """Print the last runs, the newest first, and the steps since the oldest of them."""
    table = _table("date (UTC)", "kind", "revision", "device", "verdicts")
    for one in listed:
        run = one.run
        table.add_row(run.date, run.kind_shown, run.revision_shown, run.machine.device_name, counts(one.counts))
    out.print(table)
    out.print(Text(_shown(len(listed), total), style="dim"), soft_wrap=True)
    recent = [(id, s) for id, every in found.items() for s in every if s.started >= listed[-1].run.started]
    for id, step in sorted(recent, key=lambda item: item[1].started, reverse=True)[:MOST_STEPS]:
        out.print(_step(step, f"{'{}[{}]'.format(*workload_rows.names(id))} on {step.device}, "), soft_wrap=True)
    if len(recent) > MOST_STEPS:
        out.print(f"… and {len(recent) - MOST_STEPS} more steps; see `perfsuite history WORKLOAD`", soft_wrap=True)
    _remarks(out, listed_dirty=any(one.run.dirty for one in listed), is_stored=False)


def show_workload(
    out: Console,
    id: str,
    points: Sequence[Point],
    limit: int,
    found: Sequence[Step],
    accepted: Mapping[str, Sequence[Accepted]],
) -> None:
    """Print a workload's last runs, the newest first, then for each device a sparkline, the steps and the accepted
    figures."""
    out.print(Text(id, style="bold"), soft_wrap=True)
    shown = points[-limit:]
    devices = {p.run.machine.device: p.run.machine.device_name for p in points}
    several = ("device",) if len(devices) > 1 else ()
    right = ("optimized", "speedup", "change")
    marks = ("since the run before",) if any(p.marks for p in shown) else ()
    table = _table("date (UTC)", "kind", "revision", *several, *right, "verdict", *marks, right=right)
    for p in reversed(shown):
        table.add_row(
            *(p.run.date, p.run.kind_shown, p.run.revision_shown),
            *((p.run.machine.device_name,) if several else ()),
            *(units.seconds(p.figures.optimized_s), p.speedup_shown, p.change_shown),
            verdict(p.figures.verdict),
            *((Text("; ".join(p.marks), style="yellow"),) if marks else ()),
        )
    out.print(table)
    out.print(Text(_shown(len(shown), len(points)), style="dim"), soft_wrap=True)
    for device, name in devices.items():
        own = [p for p in points if p.run.machine.device == device]
        out.print(Text(f"{name}, optimized: {course(own)}"), soft_wrap=True)
        for step in found:
            if step.device == device:
                out.print(_step(step, "  "), soft_wrap=True)
                if hint := bisection(id, step):
                    out.print(Text(f"    {hint}", style="dim"), soft_wrap=True)
        if accepted.get(device):
            out.print(Text(f"  {held(accepted[device][-1])}"), soft_wrap=True)
    _remarks(out, listed_dirty=any(p.run.dirty for p in shown), is_stored=any(p.stored for p in shown))


def _remarks(out: Console, *, listed_dirty: bool, is_stored: bool) -> None:
    lines = ["+: with uncommitted changes"] if listed_dirty else []
    lines += ["~: against the accepted figure; the accepted revision was not timed beside it"] if is_stored else []
    lines += [] if steps.is_available() else [steps.MISSING]
    for line in lines:
        out.print(Text(line, style="dim"), soft_wrap=True)


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        last = name == columns[-1]
        table.add_column(name, justify="right" if name in right else "left", no_wrap=not last, overflow="fold")
    return table


def _shown(count: int, total: int) -> str:
    return units.count(total, "run") if count == total else f"the last {count} of {total} runs; see --limit"


def _step(step: Step, before: str) -> Text:
    return Text(f"{before}{step.shown}", style="red" if step.change > 0 else "green")


def counts(found: Mapping[str, int]) -> Text:
    """Return the number of each verdict as text."""
    parts = []
    for name, n in found.items():
        style = "" if name == workload_rows.MEASURED else STYLES[html.tone_of(Status(name))]
        parts.append(Text(f"{n} {name}", style=style))
    return Text(" · ").join(parts)


def verdict(status: Status | None) -> Text:
    """Return a verdict as the tables show it."""
    return Text(
        status.value.replace("_", " ") if status else workload_rows.MEASURED, style=STYLES[html.tone_of(status)]
    )


def course(points: Sequence[Point]) -> str:
    """Return a sparkline of the last times, with their range."""
    times = [p.figures.optimized_s for p in points if steps.has_time(p.figures)][-MOST_BARS:]
    known = [t for t in times if t is not None]
    if not known:
        return "no times"
    return f"{sparkline(known)}  {units.seconds(min(known))} to {units.seconds(max(known))}, the oldest first"


def sparkline(times: Iterable[float]) -> str:
    """Return a bar for each time, on a logarithmic scale."""
    logs = [math.log(t) for t in times]
    low, span = min(logs), max(max(logs) - min(logs), LEAST_SPAN)
    return "".join(BARS[min(len(BARS) - 1, int((x - low) / span * len(BARS)))] for x in logs)


def held(found: Accepted) -> str:
    """Return the accepted figures in one line."""
    revision = f" at {found.revision[:7]}" if found.revision else ""
    reason = f": {found.reason}" if found.reason else ""
    speedup = units.ratio(found.speedup)
    return f"accepted {found.date[:10]}{revision}: {units.seconds(found.optimized_s)}, {speedup}{reason}"


def bisection(id: str, step: Step) -> str:
    """Return the command that finds the commit of a slowdown; empty for a speedup or without two different commits."""
    if step.change <= 0 or step.dirty or not step.last or not step.revision or step.last == step.revision:
        return ""
    return f"perfsuite bisect '{id}' --good {step.last[:9]} --bad {step.revision[:9]}"
