"""Markdown: the job summary of a CI run, and the table between the markers of a page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Measurement
from perfsuite.report import units
from perfsuite.report.escaping import escape
from perfsuite.report.model import RunReport, excused, findings, headline, machine_line, notes, rows, without_waivers
from perfsuite.report.workload_rows import Row, distinct, entry_row, row

BEGIN = "<!-- perfsuite:table -->"
END = "<!-- /perfsuite:table -->"

HEADINGS = ("technique", "workload", "reference", "optimized", "speedup", "best rival", "limit")
RIGHT = ("reference", "optimized", "speedup", "limit", "change")
MOST, CELL = 1000, 200
"""Maximum length of a text that is not perfsuite's own, such as a failure message: outside a table, and in a cell."""


def table(source: Iterable[Entry] | Mapping[str, Sequence[Measurement]]) -> str:
    """Return the Markdown table of a baseline's entries, or of measurements by workload id."""
    if isinstance(source, Mapping):
        made = [row(i, found) for i, found in source.items()]
    else:
        made = [entry_row(entry) for entry in source]
    return _table(HEADINGS, [_cells(r) for r in distinct(made)])


def insert(text: str, content: str) -> str:
    """Return `text` with the content between the markers replaced. Raises PerfsuiteError if a marker is missing, occurs
    twice or is out of order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise PerfsuiteError(
            f"no place for the table: put the lines {BEGIN} and {END} once, in this order, in the file"
        )
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{content.strip()}\n{END}{rest.partition(END)[2]}"


def summary(report: RunReport) -> str:
    """Return the summary of a run: the result and the findings first, then the table."""
    failures = findings(report)
    lines = [f"## {'❌' if failures else '✅'} perfsuite: {escape(headline(report))}", ""]
    lines += [f"- {escape(failure)}" for failure in failures]
    if failures:
        lines.append("")
    if report.ids:
        lines += [*every_row(report), ""]
    if excused(report):
        lines += [f"{without_waivers(report)}:", "", *every_excuse(report), ""]
    listed = notes(report)
    lines += [f"- {escape(note)}" for note in listed]
    if listed:
        lines.append("")
    revision = f", revision {report.revision}" if report.revision else ""
    lines.append(
        escape(f"{machine_line(report.machine)}{revision}, {report.started}, {units.duration(report.seconds)}")
    )
    return "\n".join(lines) + "\n"


def every_row(report: RunReport) -> list[str]:
    """Return the lines of the table of all workloads: two for the heading, then one for each workload."""
    cells = [[*_cells(r), r.change, _clock(r), r.status.value if r.status else ""] for r in rows(report)]
    return _table((*HEADINGS, "change", "SM clock", "verdict"), cells).splitlines()


def every_excuse(report: RunReport) -> list[str]:
    """Return the lines of the table of waived workloads: two for the heading, then one for each workload."""
    cells = [
        [*_names(r), e.status.value, *(escape(text, CELL) for text in (e.owner, e.until, e.reason))]
        for r, e in excused(report)
    ]
    return _table(("technique", "workload", "without the waiver", "owner", "until", "reason"), cells).splitlines()


def append_job_summary(report: RunReport) -> bool:
    """Append the summary to the file that GITHUB_STEP_SUMMARY names. Return False if the variable names none."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return False
    try:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(summary(report))
    except OSError as error:
        raise PerfsuiteError(f"cannot write the job summary {path}: {error.strerror or error}") from None
    return True


def _names(r: Row) -> tuple[str, str]:
    return escape(r.technique, CELL), escape(r.workload, CELL)


def _cells(r: Row) -> list[str]:
    return [
        *_names(r),
        r.reference,
        units.seconds(r.optimized_s),
        r.times_as_fast,
        _rival(r),
        f"{units.percent(r.limit_fraction)} {escape(r.limit_by, CELL)}".strip()
        if r.limit_fraction is not None
        else units.MISSING,
    ]


def _rival(r: Row) -> str:
    if r.rival is None:
        return units.MISSING
    text = f"{escape(r.rival, CELL)} {units.seconds(r.rival_s)}"
    if not r.loses or r.against_rival is None:
        return text
    return text + (" **(not beaten)**" if r.is_slower_than_rival else " **(equal)**")


def _clock(r: Row) -> str:
    if r.sm_clock_mhz is None:
        return units.MISSING
    return f"{r.sm_clock_mhz:.0f} MHz" + (f" ({escape(', '.join(r.throttle), CELL)})" if r.throttle else "")


def _table(headings: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    rule = ["---:" if heading in RIGHT else "---" for heading in headings]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *cells))
