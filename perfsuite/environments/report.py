"""The comparison of two environments as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from perfsuite.codec import to_json
from perfsuite.environments.interpreter import Interpreter, differences
from perfsuite.environments.rule import LEAST, LEVEL, Change, Compared
from perfsuite.progress import name_of
from perfsuite.report import units

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
    """Two environments, and what the second changes."""

    device: str
    here: Interpreter
    there: Interpreter
    workloads: tuple[Compared, ...]
    seconds: float
    """Duration of the comparison."""

    def of(self, *changes: Change) -> list[Compared]:
        """Return the workloads with one of these changes."""
        return [w for w in self.workloads if w.change in changes]


def document(found: Comparison) -> str:
    """Return the comparison as JSON text."""
    differing = differences(found.here, found.there)
    data = {KEY: SCHEMA, "level": LEVEL, "differences": differing, **to_json(found)}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def show(found: Comparison, out: Console) -> None:
    """Print the table, and what needs attention."""
    out.print(Text(found.device, style="bold"), soft_wrap=True)
    out.print(Text(f"here   {found.here.path}"), soft_wrap=True)
    out.print(Text(f"there  {found.there.path}"), soft_wrap=True)
    differing = differences(found.here, found.there)
    for line in differing[:MOST_DIFFERENCES] or ["no package differs"]:
        out.print(Text(f"       {line}", style="dim"), soft_wrap=True)
    if len(differing) > MOST_DIFFERENCES:
        out.print(Text(f"       and {len(differing) - MOST_DIFFERENCES} more, in the JSON", style="dim"))
    table = Table(box=None, pad_edge=False)
    for title in ("workload", "here", "there", "there / here", "interval", "change"):
        table.add_column(title, justify="left" if title in ("workload", "change") else "right")
    for one in found.workloads:
        here, there = one.seconds or (None, None)
        interval = units.interval(*one.interval) if one.interval else ""
        cells = (name_of(one.id), units.seconds(here), units.seconds(there), units.ratio(one.ratio), interval)
        table.add_row(*map(Text, cells), Text(one.change.value, style=STYLES[one.change]))
    out.print(table)
    for one in found.of(Change.UNEQUAL, Change.UNTIMED):
        out.print(Text(f"✗ {one.id}: {one.message}", style=STYLES[one.change]), soft_wrap=True)
    for one in found.workloads:
        if one.costs:
            out.print(Text(f"• {one.id}: {', '.join(one.costs)}", style="yellow"), soft_wrap=True)
    for line in (*_accuracy(found.workloads), _summary(found)):
        out.print(Text(line, style="bold"), soft_wrap=True)


def _accuracy(workloads: Sequence[Compared]) -> list[str]:
    """Return a line with the smallest change that could have been detected; no line without intervals."""
    widths = sorted(high / low - 1 for w in workloads if w.interval for low, high in [w.interval])
    if not widths:
        return []
    middle, widest = widths[(len(widths) - 1) // 2] / 2, widths[-1] / 2
    return [
        f"smallest detectable change: {units.percent(max(middle, LEAST))} for half of the workloads, "
        f"{units.percent(max(widest, LEAST))} for all; two processes vary more than two revisions loaded in one process"
    ]


def _summary(found: Comparison) -> str:
    counts = [(c, len(found.of(c))) for c in Change]
    said = ", ".join(f"{n} {c.value}" for c, n in counts if n) or "nothing was compared"
    return f"{said} · {units.duration(found.seconds)}"
