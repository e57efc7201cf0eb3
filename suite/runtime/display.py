"""Display of a run: a progress bar, or a line every 30 s if the output is not a terminal; optionally TensorBoard."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from perfsuite.errors import PerfsuiteError
from suite.naming import shown, utf8_name

REFRESH_S = 0.1
LINE_S = 30.0
"""Seconds between two lines if the output is not a terminal."""
RATE_S = 5.0
"""Seconds over which the displayed throughput is averaged."""


class Rate:
    """Items per second over the last `seconds` seconds."""

    def __init__(self, seconds: float = RATE_S) -> None:
        self._seconds = seconds
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, items: int) -> None:
        """Record the number of items so far at time `now`, in seconds."""
        self._seen.append((now, items))
        while len(self._seen) > 2 and now - self._seen[0][0] > self._seconds:
            self._seen.popleft()

    def value(self) -> float | None:
        """Return the items per second; None before two different times are recorded."""
        if len(self._seen) < 2 or self._seen[-1][0] <= self._seen[0][0]:
            return None
        return (self._seen[-1][1] - self._seen[0][1]) / (self._seen[-1][0] - self._seen[0][0])


class Display:
    """Progress display, drawn at most 10 times per second in the calling thread: another would disturb the run."""

    def __init__(
        self, console: Console, name: str, total: int | None, done: int, unit: str, noun: str = "window"
    ) -> None:
        self._console = console
        self._name = name
        self.unit = unit
        self._noun = noun
        self._rate = Rate()
        self._next = 0.0
        self._next_line = time.monotonic() + LINE_S
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[text]}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, auto_refresh=False)
            self._bar.add_task(name, total=total, completed=done, text="")

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, windows: int, total: int | None, items: int, metrics: Mapping[str, float] | None) -> None:
        """Update the display if it is due. Called after every window; most calls do nothing."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + REFRESH_S
        self._rate.add(now, items)
        if self._bar is not None:
            self._bar.update(self._bar.tasks[0].id, completed=windows, text=self._text(windows, total, metrics))
            self._bar.refresh()
        elif now >= self._next_line:
            self._next_line = now + LINE_S
            self.say(f"{self._name}: {self._text(windows, total, metrics)}")

    def say(self, line: str) -> None:
        """Print a permanent line above the bar."""
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def leave(self, line: str) -> None:
        """Print a line and show the cursor again, since the next signal may end the process immediately."""
        self.say(line)
        self._console.show_cursor(True)

    def _text(self, windows: int, total: int | None, metrics: Mapping[str, float] | None) -> str:
        parts = [f"{windows} of {total} {self._noun}s" if total else f"{windows} {self._noun}s"]
        rate = self._rate.value()
        if rate is not None:
            parts.append(f"{quantity(rate)} {self.unit}/s")
        if metrics is not None and "loss" in metrics:
            parts.append(f"loss {float(metrics['loss']):.4g}")
        return " · ".join(parts)


def quantity(value: float) -> str:
    """Format a number with three significant digits and a suffix: 1234 → 1.23k."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{float(f'{value / size:.3g}'):g}{letter}"
    return f"{value:.3g}"


@contextmanager
def board(folder: Path, windows: int) -> Iterator[Any]:
    """Open TensorBoard's writer. Points that an abandoned run in the folder wrote after `windows` are hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise PerfsuiteError(
            "tensorboard: true needs the package tensorboard, which is not installed; "
            "pip install 'perfsuite[train]', or set tensorboard: false"
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            writer = SummaryWriter(str(stack.enter_context(utf8_name(folder))), purge_step=windows + 1)
            kept = stack.pop_all()
    except OSError as error:
        raise PerfsuiteError(
            f"cannot write {shown(folder)}: {error.strerror or error}; name another --folder"
        ) from None
    with kept:
        try:
            yield writer
        finally:
            with suppress(OSError):  # only the last points of the curves are lost
                writer.close()
