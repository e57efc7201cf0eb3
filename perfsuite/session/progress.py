"""Show what a run is about to do and its progress: a line for each workload, and a bar if the output is a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from perfsuite.records import Measurement, WorkloadProof
from perfsuite.report import terminal, units
from perfsuite.session.tasks import Failure, Outcome, Task
from perfsuite.session.worker_process import Lane


class Progress:
    """Progress display that writes past pytest's capture."""

    def __init__(self, config: pytest.Config) -> None:
        self._reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        reporter = self._reporter
        self._capture: Any = config.pluginmanager.get_plugin("capturemanager")
        self._console = terminal.console(reporter._tw._file) if reporter else Console(quiet=True)
        self._bar: Bar | None = None
        self._task: Any = None
        self._total = self._ended = 0

    def expect(self, text: str, total: int) -> None:
        """Announce `total` tasks. `text` describes them and how long they will take."""
        self.done()
        self._total, self._ended = total, 0
        if text:
            self.say(text)

    def add(self, tasks: int) -> None:
        """Announce this number of further tasks."""
        self._total += tasks

    def include(self, tasks: int) -> None:
        """Announce that this number of tasks follows. Raise the total only if it is too small for them."""
        self._total = max(self._total, self._ended + tasks)

    def begin(self, lane: int, id: str) -> None:
        """Show that a task begins in the given lane."""
        if self._console.is_terminal:
            with self._uncaptured():
                self._draw(name_of(id))

    def ended(self, id: str, text: str) -> None:
        """Show that a task has ended, with its result."""
        self._ended += 1
        self.say(f"[{self._ended}/{self._total}] {name_of(id)}: {text}")

    def say(self, line: str) -> None:
        """Print a line, separate from the bar."""
        with self._uncaptured():
            if self._reporter is not None:
                self._reporter.ensure_newline()  # pytest's own line may be unfinished
            self._console.print(line, soft_wrap=True)

    def _uncaptured(self) -> AbstractContextManager[None]:
        if self._capture is None:
            return nullcontext()
        found: AbstractContextManager[None] = self._capture.global_and_fixture_disabled()
        return found

    def _draw(self, text: str) -> None:
        if self._bar is None:
            name = TextColumn("{task.description}", markup=False)
            columns = (name, BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=self._console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task(text, total=self._total)
            self._bar.start()
        self._bar.update(self._task, description=text, completed=self._ended, total=self._total)
        self._bar.refresh()

    def done(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            with self._uncaptured():
                self._bar.stop()
            self._bar = None


def name_of(id: str) -> str:
    """Return the short name of a workload for the display: its pair and name."""
    return id.partition("::")[2].replace("::speed", "") or id


def measurements(ids: Sequence[str]) -> str:
    """Return "2 workloads", or "8 measurements of 2 workloads" if some are measured more than once."""
    workloads = len(set(ids))
    several = f"{len(ids)} measurements of " if len(ids) > workloads else ""
    return f"{several}{units.count(workloads, 'workload')}"


def proofs_on(tasks: Sequence[Task], chosen: Sequence[Lane]) -> str:
    """Return words such as "12 proofs on 2 cores"."""
    return f"{units.count(len(tasks), 'proof')} on {units.count(len(chosen), 'core')}"


def shown(outcome: Outcome) -> str:
    """Return a line about a task's outcome; empty if pytest itself reports it."""
    if isinstance(outcome, WorkloadProof):
        return f"proven in {outcome.seconds:.1f} s" + (f"; {outcome.unloaded}" if outcome.unloaded else "")
    if isinstance(outcome, Failure):
        return f"{outcome.status}: {outcome.message}"
    if not isinstance(outcome, Measurement):
        return ""
    times = [f"{name} {units.seconds(median(side.blocks_s))}" for name, side in outcome.sides.items() if side.blocks_s]
    return ", ".join(times)
