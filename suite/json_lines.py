"""Documents in a JSON-lines file: each line is an object that has its text in the same field."""

from __future__ import annotations

import json
from pathlib import Path

from perfsuite.errors import PerfsuiteError
from suite.naming import shown

SUFFIX = ".jsonl"


def documents(content: str, path: Path, field: str) -> list[str]:
    """Return all texts that are not blank; PerfsuiteError names the first line that has no valid text."""
    found = []
    for number, line in enumerate(content.removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{shown(path)}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PerfsuiteError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            names = ", ".join(map(repr, row)) if isinstance(row, dict) and row else "none"
            raise PerfsuiteError(f"{where}: no text is called {field!r}; name it with --field. Its fields are {names}")
        try:
            row[field].encode()
        except UnicodeEncodeError:
            raise PerfsuiteError(f"{where}: its text has half of a character (a lone surrogate)") from None
        if row[field].strip():
            found.append(row[field])
    return found
