"""The run as a table in the terminal: one row for each workload, then one line for each finding."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from perfsuite.records import Status
from perfsuite.report import units
from perfsuite.report.model import (
    RunReport,
    headline,
    machine_line,
    not_green,
    notes,
    rows,
    since_accepted,
    without_waivers,
)
from perfsuite.report.workload_rows import Row

PLAIN_WIDTH = 100
"""Width if the output is not a terminal, such as a CI log. Rich's default of 80 columns would fold every row."""

GAP = " "


class Encodable:
    """A stream that accepts any text: characters that its encoding lacks become question marks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, with a question mark for each character that cannot be encoded."""
        encoding = self._stream.encoding or "utf-8"
        return self._stream.write(text.encode(encoding, "replace").decode(encoding))


def console(file: TextIO | None = None) -> Console:
    """Return a console whose output is also readable in a CI log. It shows text literally: brackets are no markup."""
    target = file or sys.stdout
    width = None if target.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
    stream: Any = Encodable(target)
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def show(report: RunReport, out: Console | None = None) -> None:
    """Print the whole report."""
    out = out or console()
    every = rows(report)
    out.print(Text(machine_line(report.machine), style="bold"), soft_wrap=True)
    if report.revision:
        edits = " with uncommitted changes" if report.dirty else ""
        out.print(Text(f"revision {report.revision}{edits}", style="dim"))
    if every:
        out.print(table(every, out.width))
    for line in attention(report, every):
        out.print(line, soft_wrap=True)  # one finding, one line: a log is searched by line
    style = "bold red" if report.problems or not_green(report) or report.correctness.failed else "bold"
    out.print(Text(f"{headline(report)} · {units.duration(report.seconds)}", style=style), soft_wrap=True)


def table(every: tuple[Row, ...], width: int = PLAIN_WIDTH) -> Group:
    """Return the table with one row for each workload and a heading for each technique.

    Columns that no row fills are left out. If the others do not fit into `width`, some are dropped and names fold."""
    columns = [c for c in COLUMNS if c.needed is None or any(c.needed(r) for r in every)]
    for spare in ("MHz", "interval", "change", "limit", "best rival"):
        if sum(min(c.width(every), c.narrowest or 999) + len(GAP) for c in columns) > width:
            columns = [c for c in columns if c.title != spare]
    widths = [c.width(every) for c in columns]
    over = sum(widths) + len(GAP) * len(widths) - width
    for n, column in enumerate(columns):
        # Names fold, figures do not.
        cut = max(0, min(over, widths[n] - column.narrowest)) if column.narrowest else 0
        widths[n], over = widths[n] - cut, over - cut
    cells = {r.id: [c.cell(r) for c in columns] for r in every}
    parts: list[RenderableType] = [_grid(columns, widths, [[Text(c.title, style="bold") for c in columns]])]
    parts.append(Text("─" * min(width, sum(widths) + len(GAP) * (len(widths) - 1)), style="dim"))
    for technique, found in itertools.groupby(every, lambda r: r.technique):
        parts.append(Text(technique, style="bold"))
        parts.append(_grid(columns, widths, [cells[r.id] for r in found]))
    return Group(*parts)


def _grid(columns: list[Column], widths: list[int], lines: list[list[Text]]) -> Table:
    grid = Table.grid(padding=(0, len(GAP), 0, 0), pad_edge=False)
    for column, width in zip(columns, widths, strict=True):
        grid.add_column(justify=column.justify, width=width, overflow="fold", no_wrap=not column.narrowest)
    for line in lines:
        grid.add_row(*line)
    return grid


def attention(report: RunReport, every: tuple[Row, ...]) -> list[Text]:
    """Return a line for each point that needs attention, the worst first."""
    lines = [Text(f"✗ {problem}", style="red") for problem in report.problems]
    if not report.complete:
        lines.append(Text("✗ interrupted: the table shows what was measured until then", style="red"))
    lines += [Text(f"✗ {item}: {why}", style="red") for item, why in report.correctness.failures.items()]
    for verdict in not_green(report):
        lines.append(Text(f"✗ {verdict.message}", style="red"))
        if since := since_accepted(report, verdict.id):
            lines.append(Text(f"  {since}", style="dim"))
    if excused := without_waivers(report):
        lines.append(Text(f"• {excused}", style="yellow"))
    for row in every:
        if row.status in (Status.WAIVED, Status.IMPROVED):
            lines.append(Text(f"• {row.message}", style="yellow"))
        if row.loses:
            lines.append(Text(f"• {row.technique}[{row.workload}] is {row.loses}", style="yellow"))
        unfit = [reason for reason in row.throttle if reason != "SW power cap"]
        if unfit:
            lines.append(Text(f"• {row.technique}[{row.workload}]: clock limited ({', '.join(unfit)})", style="yellow"))
    lines += [Text(f"• {line}", style="dim") for line in notes(report)]
    return lines


def _speedup(row: Row) -> Text:
    if row.speedup is None:
        return Text(units.MISSING)
    style = {"faster": "green", "equal": "yellow", "slower": "red"}[row.speedup.standing]
    return Text(row.times_as_fast, style=style)


def _interval(row: Row) -> Text:
    return Text(units.interval(row.speedup.low, row.speedup.high) if row.speedup else "", style="dim")


def _rival(row: Row) -> Text:
    if row.rival is None:
        return Text(units.MISSING, style="dim")
    text = Text(f"{row.rival} {units.seconds(row.rival_s)}")
    if row.loses and row.against_rival is not None:
        # A mark and not colour alone: a CI log has no colours.
        text.append(" ✗" if row.is_slower_than_rival else " =", style="bold yellow")
    return text


def _clock(row: Row) -> Text:
    if row.sm_clock_mhz is None:
        return Text(units.MISSING)
    return Text(f"{row.sm_clock_mhz:.0f}", style="yellow" if row.throttle else "")


def _verdict(row: Row) -> Text:
    if row.status is None:
        return Text("")
    style = "yellow" if row.status is Status.WAIVED else "green" if row.status.green else "bold red"
    return Text(row.status.value.replace("_", " "), style=style)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of the table. `needed(row)` returns whether a row fills it; without `needed`, the column always shows.
    `narrowest` is the smallest width to which it may be folded; 0 forbids folding."""

    title: str
    cell: Callable[[Row], Text]
    justify: Literal["left", "right"] = "right"
    needed: Callable[[Row], bool] | None = None
    narrowest: int = 0

    def width(self, every: tuple[Row, ...]) -> int:
        return max(len(self.title), *(self.cell(row).cell_len for row in every))


def _change(row: Row) -> Text:
    """Return the change, with its interval if no reference was timed, because then there is room for it."""
    interval = row.change_interval if _is_compared_alone(row) else ""
    return Text(f"{row.change} {interval}".rstrip(), style="" if row.status is None or row.status.green else "bold red")


def _is_compared_alone(row: Row) -> bool:
    """Return whether the optimized side was timed against that of another revision and not against the reference."""
    return row.before_s is not None and row.reference_s is None


def _may_have_reference(row: Row) -> bool:
    return not _is_compared_alone(row)


COLUMNS = (
    Column(title="workload", cell=lambda r: Text(f"  {r.workload}"), justify="left", narrowest=18),
    Column(title="reference", cell=lambda r: Text(r.reference), needed=_may_have_reference),
    Column(title="before", cell=lambda r: Text(units.seconds(r.before_s)), needed=_is_compared_alone),
    Column(title="optimized", cell=lambda r: Text(units.seconds(r.optimized_s))),
    Column(title="speedup", cell=_speedup, needed=_may_have_reference),
    Column(title="interval", cell=_interval, justify="left", needed=_may_have_reference),
    Column(
        title="change",
        cell=_change,
        justify="left",
        needed=lambda r: r.slowdown is not None,
    ),
    Column(title="best rival", cell=_rival, justify="left", needed=lambda r: r.rival is not None, narrowest=18),
    Column(
        title="limit",
        cell=lambda r: Text(units.percent(r.limit_fraction)),
        needed=lambda r: r.limit_fraction is not None,
    ),
    Column(title="MHz", cell=_clock, needed=lambda r: r.sm_clock_mhz is not None),
    Column(title="verdict", cell=_verdict, justify="left", needed=lambda r: r.status is not None, narrowest=10),
)
