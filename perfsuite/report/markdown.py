"""Markdown: the job summary of a CI run, and the README's table between its markers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from perfsuite.baseline import Entry
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Measurement
from perfsuite.report import units
from perfsuite.report.model import Row, RunReport, entry_row, headline, left_out, machine_line, not_green, row, rows

BEGIN = "<!-- perfsuite:table -->"
END = "<!-- /perfsuite:table -->"

HEADINGS = ("technique", "workload", "reference", "optimized", "speedup", "best rival", "limit")
RIGHT = ("reference", "optimized", "speedup", "limit")


def table(source: Iterable[Entry] | Mapping[str, Sequence[Measurement]]) -> str:
    """Return the README's table: of a baseline's entries, or of measurements by workload id."""
    if isinstance(source, Mapping):
        made = [row(i, found) for i, found in source.items()]
    else:
        made = [entry_row(entry) for entry in source]
    return _table(HEADINGS, [_cells(r) for r in made])


def insert(text: str, content: str) -> str:
    """Return `text` with the content between the markers replaced. Raises PerfsuiteError where it lacks the markers or
    has them twice."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise PerfsuiteError(
            f"no place for the table: put the lines {BEGIN} and {END} once, in this order, in the file"
        )
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{content.strip()}\n{END}{rest.partition(END)[2]}"


def summary(report: RunReport) -> str:
    """Return the run for a pull request's reader: the answer first, then the table."""
    every = rows(report)
    bad = bool(report.problems or not report.complete or not_green(report) or report.correctness.failed)
    lines = [f"## {'❌' if bad else '✅'} perfsuite: {escape(headline(report))}", ""]
    failures = list(report.problems)
    if not report.complete:
        failures.append("interrupted: this report holds what was measured until then")
    failures += [f"{item}: {why}" for item, why in report.correctness.failures.items()]
    failures += [f"{v.status.value}: {v.message}" for v in not_green(report)]
    lines += [f"- {escape(failure)}" for failure in failures]
    if failures:
        lines.append("")
    if every:
        cells = [[*_cells(r), _clock(r), r.status.value if r.status else ""] for r in every]
        lines += [_table((*HEADINGS, "SM clock", "verdict"), cells), ""]
    notes = left_out(report)
    lines += [f"- {escape(note)}" for note in notes]
    if notes:
        lines.append("")
    revision = f", revision {report.revision}" if report.revision else ""
    lines.append(
        escape(f"{machine_line(report.machine)}{revision}, {report.started}, {units.duration(report.seconds)}")
    )
    return "\n".join(lines) + "\n"


def append_job_summary(report: RunReport) -> bool:
    """Append the summary to the file that GitHub names in GITHUB_STEP_SUMMARY; False where it names none."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return False
    try:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(summary(report))
    except OSError as error:
        raise PerfsuiteError(f"cannot write the job summary {path}: {error.strerror or error}") from None
    return True


def escape(text: str) -> str:
    """Escape text so that it shows as it is, also in a table cell: no markup of its own, one line."""
    one_line = " ".join(text.split())
    for character in "\\`*[]<>|":
        one_line = one_line.replace(character, f"\\{character}" if character not in "<>" else _ENTITIES[character])
    return one_line


_ENTITIES = {"<": "&lt;", ">": "&gt;"}


def _cells(r: Row) -> list[str]:
    return [
        escape(r.technique),
        escape(r.workload),
        r.reference,
        units.seconds(r.optimized_s),
        r.times_as_fast,
        _rival(r),
        f"{units.percent(r.limit_fraction)} {r.limit_by}".strip() if r.limit_fraction is not None else units.MISSING,
    ]


def _rival(r: Row) -> str:
    if r.rival is None:
        return units.MISSING
    text = f"{escape(r.rival)} {units.seconds(r.rival_s)}"
    if not r.loses or r.against_rival is None:
        return text
    return text + (" **(not beaten)**" if r.is_slower_than_rival else " **(equal)**")


def _clock(r: Row) -> str:
    if r.sm_clock_mhz is None:
        return units.MISSING
    return f"{r.sm_clock_mhz:.0f} MHz" + (f" ({', '.join(r.throttle)})" if r.throttle else "")


def _table(headings: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    rule = ["---:" if heading in RIGHT else "---" for heading in headings]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *cells))
