"""Log of a run's metrics per window: JSON lines in the run's folder, which `perfsuite curve` plots."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

FILE, ABOUT = "metrics.jsonl", "run.json"
DENSE, EVERY = 100, 10
"""The log has every window up to 100, and then every tenth."""


class CurveLog:
    """Appends lines to `metrics.jsonl`: the window, the seconds of training so far, and the metrics.

    windows  number of windows before a resume; lines of later windows belong to an abandoned run and are removed
    about    content of run.json in the same folder: the trainer, its configuration, the machine

    Every method may raise OSError.
    """

    def __init__(self, folder: Path, windows: int, about: Mapping[str, Any] | None = None) -> None:
        self._folder, self._windows, self._about = folder, windows, about
        self._began = time.monotonic()
        self._last = 0
        self._file: IO[str] | None = None

    def add(self, window: int, metrics: Mapping[str, float]) -> None:
        """Write a line, unless this window or a later one has one already, or no line is due."""
        file = self._file or self._opened()
        if window <= self._last or (window > DENSE and window - self._last < EVERY):
            return
        self._last = window
        line: dict[str, Any] = {"window": window, "seconds": round(time.monotonic() - self._began, 4)}
        values = {name: float(value) for name, value in metrics.items() if name not in line}
        line |= {name: value for name, value in values.items() if math.isfinite(value)}
        file.write(f"{json.dumps(line)}\n")

    def flush(self) -> None:
        """Write all buffered lines to the file. Called before each checkpoint, from which a killed run may resume."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write the buffered lines and close the file."""
        if self._file is not None:
            self._file.close()

    def _opened(self) -> IO[str]:
        """Open the file, and keep only the lines up to the window at which the run starts."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / FILE
        kept = [line for line in read(self._folder) if line["window"] <= self._windows]
        if kept:
            self._last = kept[-1]["window"]
            self._began -= kept[-1]["seconds"]
        _write(path, "".join(f"{json.dumps(line)}\n" for line in kept))
        if self._about is not None:
            _write(self._folder / ABOUT, json.dumps(self._about, indent=1, default=str) + "\n")
        self._file = path.open("a")
        return self._file


def _write(path: Path, content: str) -> None:
    """Replace a file atomically: it is written completely, or left unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def about_of(folder: Path) -> dict[str, Any]:
    """Return the content of a run's run.json; an empty dict if it is missing or damaged."""
    try:
        found = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the log's lines from a run's folder. Damaged lines are skipped: a killed run may leave half a line."""
    try:
        content = (folder / FILE).read_text(errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in content.splitlines():
        try:
            made = json.loads(line)
            numbers = [value for value in made.values() if isinstance(value, int | float)]
            timed = isinstance(made["window"], int) and isinstance(made["seconds"], int | float)
            if timed and all(map(math.isfinite, numbers)):
                found.append(made)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError, OverflowError):
            continue
    return found
