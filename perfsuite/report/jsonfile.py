"""The run as JSON, for other programs. It can be read back into the same records."""

from __future__ import annotations

import json
import math
from pathlib import Path

from perfsuite.codec import from_json, to_json
from perfsuite.errors import PerfsuiteError, printable
from perfsuite.report.files import write as write_text
from perfsuite.report.model import RunReport

SCHEMA = 1
MOST = 300
"""Maximum length of an error message, which quotes the file."""


def document(report: RunReport) -> str:
    """Return the report as JSON text. Raises PerfsuiteError if a figure is infinite or NaN, which JSON cannot hold."""
    data = {"perfsuite_report": SCHEMA, **to_json(report)}
    try:
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError as error:
        raise PerfsuiteError(f"the report has a figure that is no finite number: {error}; run again") from None


def write(report: RunReport, path: Path) -> Path:
    """Write the report to `path`."""
    return write_text(path, document(report))


def parse(text: str, source: str = "the report") -> RunReport:
    """Return the report in the output of `document`. Raises PerfsuiteError in one line for any other text."""
    try:
        data = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise PerfsuiteError(f"{source} is not JSON: {error}; run again to write a new one") from None
    schema = data.pop("perfsuite_report", None) if isinstance(data, dict) else None
    if schema != SCHEMA:
        known = "no perfsuite report" if schema is None else f"a report of schema {schema}; this version reads {SCHEMA}"
        raise PerfsuiteError(f"{source} is {known}")
    try:
        return from_json(RunReport, data)
    except PerfsuiteError as error:
        raise PerfsuiteError(f"{source}: {printable(error)[:MOST]}; run again to write a new one") from None


def _finite(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise ValueError(f"{token} is no finite number")
    return value


def read(path: Path) -> RunReport:
    """Return the report in the file `path`. Raises PerfsuiteError if it cannot be read or is not a report."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PerfsuiteError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return parse(text, str(path))
