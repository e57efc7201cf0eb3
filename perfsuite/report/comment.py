"""The comment on a pull request: the verdict, the findings, and all rows in a collapsed section.

The report may come from code that nobody has reviewed, so its text is shown literally and cannot mention anybody. This
module needs only the standard library, because the job that posts the comment holds a token with write access.
"""

from __future__ import annotations

import re

from perfsuite.errors import PerfsuiteError
from perfsuite.gate.exit_codes import CODE_AT_FAULT, ENDED_EARLY, GREEN, UNDECIDED
from perfsuite.report import markdown, units
from perfsuite.report.escaping import escape
from perfsuite.report.model import (
    RunReport,
    excused,
    exit_code,
    findings,
    headline,
    machine_line,
    notes,
    sentence,
    without_waivers,
)

MARKER = "<!-- perfsuite:comment -->"
"""Invisible first line of the comment, by which a later run finds the comment to update."""

LIMIT = 65_536
"""Maximum length of a comment on GitHub, counted here in UTF-16 units, which are never fewer than GitHub counts."""

PARTS = {"findings": 24_000, "excuses": 12_000, "notes": 4_000}
"""Maximum length of each part before the table of all rows, which gets the rest of LIMIT."""

MARKS = {GREEN: "✅", CODE_AT_FAULT: "❌", ENDED_EARLY: "❌", UNDECIDED: "⚠️"}


def text(report: RunReport, page: str | None = None) -> str:
    """Return the comment. Its lists and tables are cut to keep it within `LIMIT`, and say what they leave out. `page`
    is the URL of the whole report.

    Raises PerfsuiteError if `page` is not an http or https URL, or if a figure cannot be shown."""
    if page is not None and not re.fullmatch(r"https?://[^\s<>()\[\]\\\"`|]+", page):
        raise PerfsuiteError(f"--page {page!r} is no address; give one that begins with https:// and has no space")
    try:
        return _text(report, page)
    except (ArithmeticError, ValueError) as error:  # perfsuite did not write this report
        raise PerfsuiteError(f"the report has a figure that cannot be shown: {error}; run again") from None


def _text(report: RunReport, page: str | None) -> str:
    code = exit_code(report)
    verdict, counted = (escape(text(report), markdown.MOST) for text in (sentence, headline))
    lines = [MARKER, f"### {MARKS[code]} {verdict}", "", counted, ""]
    end = [f"[The whole report]({page})", ""] if page else []
    place = escape(f"{machine_line(report.machine)}, revision {report.revision or 'unknown'}", markdown.MOST)
    end.append(f"<sub>{place}</sub>")
    lines += _list(findings(report), PARTS["findings"])
    if excused(report):
        lines += [f"**{escape(without_waivers(report))}:**", ""]
        lines += _table(markdown.every_excuse(report), PARTS["excuses"])
    listed = _list(notes(report), PARTS["notes"])
    if report.ids:
        name = f"<summary>{units.count(len(report.ids), 'workload')}</summary>"
        fold, closing = ["<details>", name, ""], ["</details>", ""]
        used = _length([*lines, *fold, *closing, *listed, *end])
        lines += [*fold, *_table(markdown.every_row(report), LIMIT - used - 200), *closing]
    return "\n".join([*lines, *listed, *end]) + "\n"


def _list(texts: list[str], room: int) -> list[str]:
    """Return a Markdown list of the texts that fit into `room`, and a line with the number of the others."""
    kept = _fitting([f"- {escape(text, markdown.MOST)}" for text in texts], room)
    if len(kept) < len(texts):
        kept.append(f"- … and {len(texts) - len(kept)} more, in the whole report")
    return [*kept, ""] if kept else []


def _table(table: list[str], room: int) -> list[str]:
    """Return the lines of a table that fit into `room`, and a line with the number of the other rows. The first two
    lines are the heading, which is left out if no row fits."""
    kept = _fitting(table, room)
    heading, shown = kept[:2], kept[2:]
    count, left = len(table) - 2, len(table) - 2 - len(shown)
    more = [f"… and {left} of {count} more, in the whole report", ""] if left else []
    return [*heading, *shown, "", *more] if shown else more


def _fitting(lines: list[str], room: int) -> list[str]:
    kept = []
    for line in lines:
        room -= _length([line])
        if room < 0:
            break
        kept.append(line)
    return kept


def _length(lines: list[str]) -> int:
    return sum(len(line.encode("utf-16-le", "surrogatepass")) // 2 + 1 for line in lines)
