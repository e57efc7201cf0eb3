"""Reports: records → terminal, JSON, Markdown, JUnit, HTML, GitHub annotations. They show; they never decide."""

# No `from __future__ import annotations` here: that name would hide the module of that name.

from pathlib import Path

from perfsuite.report import html, jsonfile, junit, markdown
from perfsuite.report.files import write
from perfsuite.report.model import Correctness, RunReport

__all__ = ["Correctness", "RunReport", "write_all"]


def write_all(report: RunReport, folder: Path) -> dict[str, Path]:
    """Write every file form of the report into `folder`: {"json", "junit", "markdown", "html"} → path."""
    texts = {
        "json": ("report.json", jsonfile.document(report)),
        "junit": ("junit.xml", junit.document(report)),
        "markdown": ("summary.md", markdown.summary(report)),
        "html": ("report.html", html.page(report)),
    }
    return {form: write(folder / name, text) for form, (name, text) in texts.items()}
