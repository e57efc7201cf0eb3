"""A progress bar while worker processes measure; plain lines where the output is no terminal."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """Told of each workload as it begins; draws through pytest's capture."""

    def __init__(self, config: pytest.Config) -> None:
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._capture: Any = config.pluginmanager.get_plugin("capturemanager")
        self._console = Console(file=reporter._tw._file, highlight=False) if reporter else Console(quiet=True)
        self._bar: Bar | None = None
        self._task: Any = None
        self._processes = self._workloads = 0
        self._first = 0
        self._seen = 0

    def expect(self, processes: int, workloads: int) -> None:
        """So many processes through so many workloads are about to run."""
        self._processes, self._workloads, self._first, self._seen = processes, workloads, 0, 0

    def begin(self, process: int, id: str) -> None:
        """A workload begins in the given process."""
        self._first = self._first or process
        name = id.partition("::")[2].replace("::speed", "")
        number = f"process {process - self._first + 1} of {self._processes}"
        with self._capture.global_and_fixture_disabled() if self._capture else nullcontext():
            if self._console.is_terminal:
                self._draw(f"measuring, {number}: {name}")
            elif self._processes > 1 and self._seen % max(1, self._workloads) == 0:
                self._console.print(f"measuring {self._workloads} workloads, {number}")
        self._seen += 1

    def say(self, line: str) -> None:
        """One line for the reader, past the bar."""
        with self._capture.global_and_fixture_disabled() if self._capture else nullcontext():
            self._console.print(line, soft_wrap=True)

    def _draw(self, text: str) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=self._console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task(text, total=self._processes * self._workloads)
            self._bar.start()
        self._bar.update(self._task, description=text, completed=self._seen)
        self._bar.refresh()

    def done(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            with self._capture.global_and_fixture_disabled() if self._capture else nullcontext():
                self._bar.stop()
            self._bar = None
