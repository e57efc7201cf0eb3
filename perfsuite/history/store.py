"""`.perfsuite/history/`: one file for each run. The index in the same folder is built from these files."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from perfsuite.codec import from_json
from perfsuite.errors import PerfsuiteError, printable
from perfsuite.history.records import Run, compact
from perfsuite.report import files
from perfsuite.system.folders import SCRATCH

SCHEMA = 1
"""Version of the files' format."""
KEY = "perfsuite_history"
FOLDER = "history"
SUFFIX = ".json"
REMEDY = "remove it, or put a sound copy in its place"


def folder_of(root: Path) -> Path:
    """Return the folder of a project's history."""
    return root / SCRATCH / FOLDER


def find(start: Path) -> Path | None:
    """Return the nearest folder at or above `start` that has a history; None if there is none. The search ends at the
    top folder of a repository."""
    for folder in (start, *start.parents):
        if folder_of(folder).is_dir():
            return folder
        if (folder / ".git").exists():
            break
    return None


def write(run: Run, folder: Path) -> Path:
    """Write a run's file atomically, under a name that no other run has. Raises PerfsuiteError in one line if that
    fails."""
    path = folder / f"{run.when:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}{SUFFIX}"
    workloads = {id: compact(figures) for id, figures in run.workloads.items()}
    data = {KEY: SCHEMA, **compact(replace(run, workloads={})), "workloads": workloads}
    return files.write(path, json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n")


def read(path: Path) -> tuple[Run, dict[str, Any]]:
    """Return the run in a file, and its JSON, with texts as `storable` makes them. Raises PerfsuiteError in one line,
    with the remedy, if the file cannot be read or is damaged."""
    try:
        data = _storable(json.loads(path.read_text(encoding="utf-8")))
        schema = data.pop(KEY, None) if isinstance(data, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise PerfsuiteError(
                f"its format {schema} is newer than this perfsuite knows ({SCHEMA}); upgrade perfsuite"
            )
        if schema != SCHEMA:
            raise PerfsuiteError(f"it is no run of perfsuite; {REMEDY}")
        run = _read(data)
    except PerfsuiteError as error:
        raise PerfsuiteError(printable(f"{path}: {error}")) from None
    except OSError as error:
        raise PerfsuiteError(printable(f"{path}: cannot be read ({error.strerror}); make it readable")) from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise PerfsuiteError(printable(f"{path}: it is damaged ({reason}); {REMEDY}")) from None
    return run, data


def storable(text: str) -> str:
    """Return the text with Python's escapes for lone surrogates, which neither SQLite nor an output can hold. They
    come from names of files and hosts that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _storable(data: Any) -> Any:
    match data:
        case str():
            return storable(data)
        case dict():
            return {storable(name): _storable(value) for name, value in data.items()}
        case list():
            return [_storable(value) for value in data]
    return data


def _read(data: object) -> Run:
    try:
        run = from_json(Run, data)
    except PerfsuiteError as error:
        raise PerfsuiteError(f"it is damaged ({error}); {REMEDY}") from None
    if datetime.fromisoformat(run.started).tzinfo is None:
        raise ValueError(f"started is {run.started!r}, without an offset from UTC")
    try:
        run.when.timestamp()
    except OverflowError:
        raise ValueError(f"started is {run.started!r}, which is no time of a run") from None
    return run
