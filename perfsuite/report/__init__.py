"""Reports of a run: terminal, JSON, Markdown, JUnit XML, HTML and GitHub annotations. Reports decide nothing."""

# No `from __future__ import annotations` here: the name would hide the submodule `annotations`.

from pathlib import Path

from perfsuite.report import html, jsonfile, junit, markdown
from perfsuite.report.files import write
from perfsuite.report.model import Correctness, RunReport

__all__ = ["Correctness", "RunReport", "write_all"]


def write_all(report: RunReport, folder: Path) -> dict[str, Path]:
    """Write the report to `folder` in every file format. Return the paths by "json", "junit", "markdown" and "html"."""
    texts = {
        "json": ("report.json", jsonfile.document(report)),
        "junit": ("junit.xml", junit.document(report)),
        "markdown": ("summary.md", markdown.summary(report)),
        "html": ("report.html", html.page(report)),
    }
    return {form: write(folder / name, text) for form, (name, text) in texts.items()}
