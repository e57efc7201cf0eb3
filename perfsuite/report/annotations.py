"""GitHub annotations: one workflow command for each finding. GitHub shows it next to the file in a pull request."""

from __future__ import annotations

import os

from perfsuite.records import Status
from perfsuite.report.model import RunReport, rows


def wanted() -> bool:
    """Return whether this process runs in a GitHub workflow."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def lines(report: RunReport) -> list[str]:
    """Return the lines to print to the workflow's log, errors first."""
    errors = [command("error", "perfsuite", problem) for problem in report.problems]
    if not report.complete:
        errors.append(command("error", "perfsuite", "the run was interrupted"))
    errors += [command("error", "NOT EQUIVALENT", why, item) for item, why in report.correctness.failures.items()]
    notes = []
    for row in rows(report):
        where = f"{row.technique}[{row.workload}]"
        if row.status is not None and not row.status.green:
            errors.append(command("error", f"{row.status.value}: {where}", row.message, row.id))
        elif row.status is Status.WAIVED:
            notes.append(command("warning", f"WAIVED: {where}", row.message, row.id))
        elif row.status is Status.IMPROVED:
            notes.append(command("notice", f"IMPROVED: {where}", row.message, row.id))
    return errors + notes


def command(level: str, title: str, message: str, item: str | None = None) -> str:
    """Return `::error file=…,title=…::message`, escaped for GitHub's runner. `item` is a pytest node id."""
    path = item.partition("::")[0] if item else ""
    file = f"file={_property(path)}," if path.endswith(".py") else ""
    return f"::{level} {file}title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
