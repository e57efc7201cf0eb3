"""The comparison of two environments as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfsuite.codec import to_json
from perfsuite.report import units
from perfsuite.session.environments.interpreter import Interpreter, differences
from perfsuite.session.environments.rule import LEAST, LEVEL, Change, Compared
from perfsuite.session.progress import name_of

SCHEMA = 1
KEY = "perfsuite_environments"
STYLES = {
    Change.SLOWER: "red",
    Change.UNEQUAL: "red",
    Change.FASTER: "green",
    Change.SAME: "",
    Change.UNTIMED: "yellow",
}
MOST_DIFFERENCES = 12
"""Number of differences that are shown; the JSON has all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The workloads of a project, compared between this environment ("here") and another ("there")."""

    device: str
    here: Interpreter
    there: Interpreter
    workloads: tuple[Compared, ...]
    seconds: float
    """Duration of the whole comparison."""

    def of(self, *changes: Change) -> list[Compared]:
        """Return the workloads with one of these changes."""
        return [w for w in self.workloads if w.change in changes]


def document(comparison: Comparison) -> str:
    """Return the comparison as JSON text."""
    differing = differences(comparison.here, comparison.there)
    data = {KEY: SCHEMA, "level": LEVEL, "differences": differing, **to_json(comparison)}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def show(comparison: Comparison, out: Console) -> None:
    """Print the differing packages, the table of workloads, and a line for each workload that needs attention."""
    out.print(Text(comparison.device, style="bold"), soft_wrap=True)
    out.print(Text(f"here   {comparison.here.path}"), soft_wrap=True)
    out.print(Text(f"there  {comparison.there.path}"), soft_wrap=True)
    differing = differences(comparison.here, comparison.there)
    for line in differing[:MOST_DIFFERENCES] or ["no package differs"]:
        out.print(Text(f"       {line}", style="dim"), soft_wrap=True)
    if len(differing) > MOST_DIFFERENCES:
        out.print(Text(f"       and {len(differing) - MOST_DIFFERENCES} more, in the JSON", style="dim"))
    out.print(_table(comparison.workloads))
    for failed in comparison.of(Change.UNEQUAL, Change.UNTIMED):
        out.print(Text(f"✗ {failed.id}: {failed.message}", style=STYLES[failed.change]), soft_wrap=True)
    for workload in comparison.workloads:
        if workload.costs:
            out.print(Text(f"• {workload.id}: {', '.join(workload.costs)}", style="yellow"), soft_wrap=True)
    for line in (*_detection_limit(comparison.workloads), _summary(comparison)):
        out.print(Text(line, style="bold"), soft_wrap=True)


def _table(workloads: Sequence[Compared]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("workload", "here", "there", "there / here", "interval", "change"):
        table.add_column(title, justify="left" if title in ("workload", "change") else "right")
    for workload in workloads:
        here, there = workload.seconds or (None, None)
        interval = units.interval(*workload.interval) if workload.interval else ""
        cells = (name_of(workload.id), units.seconds(here), units.seconds(there), units.ratio(workload.ratio), interval)
        table.add_row(*map(Text, cells), Text(workload.change.value, style=STYLES[workload.change]))
    return table


def _detection_limit(workloads: Sequence[Compared]) -> list[str]:
    """Return a line with the smallest change that could have been detected; no line without intervals.

    A change is detected if its interval does not contain 1, so the limit is half the width of the interval.
    """
    widths = sorted(high / low - 1 for w in workloads if w.interval for low, high in [w.interval])
    if not widths:
        return []
    median, widest = widths[(len(widths) - 1) // 2] / 2, widths[-1] / 2
    return [
        f"smallest detectable change: {units.percent(max(median, LEAST))} for half of the workloads, "
        f"{units.percent(max(widest, LEAST))} for all; two processes vary more than two revisions loaded in one process"
    ]


def _summary(comparison: Comparison) -> str:
    counts = [(c, len(comparison.of(c))) for c in Change]
    totals = ", ".join(f"{n} {c.value}" for c, n in counts if n) or "nothing was compared"
    return f"{totals} · {units.duration(comparison.seconds)}"
