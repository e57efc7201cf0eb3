"""Progress display for building a data set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from suite import terminal

REFRESH_S = 0.1
LINE_S = 30.0
"""Seconds between two lines if stderr is not a terminal."""


class Bar:
    """Progress bar, or a line every 30 s if stderr is not a terminal.

    units  name of a step → plural unit of its count; "files" by default
    """

    def __init__(self, console: Any = None, units: Mapping[str, str] | None = None) -> None:
        self._units = units or {}
        self._console = console or terminal.console()
        self._bar: Any = None
        self._next = 0.0
        self._next_line = time.monotonic() + LINE_S

    def __enter__(self) -> Bar:
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[text]}"))
            self._bar = Progress(
                *columns, TimeElapsedColumn(), console=self._console, transient=True, auto_refresh=False
            )
            self._bar.add_task("", total=None, text="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress if an update is due. Called often; most calls do nothing."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + REFRESH_S
        text = f"{done} of {total} {self._units.get(what, 'files')}"
        if self._bar is not None:
            self._bar.update(self._bar.tasks[0].id, description=what, completed=done, total=total, text=text)
            self._bar.refresh()
        elif now >= self._next_line:
            self._next_line = now + LINE_S
            self.say(f"{what}: {text}")

    def say(self, line: str) -> None:
        """Print a permanent line above the bar."""
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)
