"""Timing of windows: seconds per phase, or a trace of a few windows. Both are off by default."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from perfsuite.errors import PerfsuiteError, in_one_line
from perfsuite.report import units
from suite.naming import shown, utf8_name
from suite.runtime.hotspots import Hotspots, hotspots
from suite.runtime.ranges import set_traced

SKIPPED = 2
"""Windows before a trace begins, since the first ones compile and allocate."""
TRACED = 3


class Phases:
    """Seconds per named phase. If on, the device is synchronised after each phase; if off, nothing is measured."""

    def __init__(self, device: torch.device, on: bool) -> None:
        self._on = on
        self._device = device
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return self._timed(name) if self._on else nullcontext()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        synchronize(self._device)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def table(self) -> Table:
        """Return a table of each phase's mean, p50 and p95."""
        table = Table(title="seconds per phase, the device synchronised after each", title_justify="left")
        for head in ("phase", "calls", "mean", "p50", "p95"):
            table.add_column(head, justify="left" if head == "phase" else "right")
        for name, seconds in self.seconds.items():
            figures = (statistics.fmean(seconds), quantile(seconds, 0.5), quantile(seconds, 0.95))
            table.add_row(name, str(len(seconds)), *(units.seconds(value) for value in figures))
        return table


def quantile(values: list[float], share: float) -> float:
    """Return the quantile of the values at the fraction `share`, without interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Trace:
    """A Chrome trace of windows 3 to 5 of this run, which is written to `path` afterwards.

    A profiler that fails does not end the run: `warn` is called with the reason, and `failed` is set.
    """

    def __init__(self, path: Path | None, device: torch.device, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._device = device
        self._windows = 0
        self._profiler: Any = None
        self._begun = 0.0
        self.written: Path | None = None
        self.hotspots: Hotspots | None = None
        self.failed = False
        if path is not None:  # fail now, not after minutes
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PerfsuiteError(
                    f"profile: cannot write {shown(path)}: {error.strerror or error}; name another file"
                ) from None
            if path.is_dir() or not os.access(path.parent, os.W_OK):
                raise PerfsuiteError(
                    f"profile: cannot write {shown(path)}; name a file in a folder that can be written"
                )

    def before(self) -> None:
        """Start the trace if it is due. Called before each window."""
        if self._path is not None and self._windows == SKIPPED:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            try:
                # PyTorch 2.11 warns unless `acc_events` is set.
                profiler = torch.profiler.profile(activities=kinds, acc_events=True)
                profiler.start()
            except Exception as error:  # of many types, from the profiler's C++
                self._fail(f"the profiler did not start: {in_one_line(error)}; the run goes on without it")
                return
            self._profiler = profiler
            set_traced(True)
            synchronize(self._device)
            self._begun = time.perf_counter()

    def after(self) -> bool:
        """Write the trace if it is due, and return True if it was written. Called after each window."""
        self._windows += 1
        return self._windows == SKIPPED + TRACED and self.close()

    def close(self) -> bool:
        """Write the trace so far. Return False if nothing was traced, or the trace is already written, or cannot be
        written."""
        if self._profiler is None or self._path is None:
            return False
        synchronize(self._device)
        seconds = time.perf_counter() - self._begun
        set_traced(False)
        profiler, self._profiler = self._profiler, None
        try:
            profiler.stop()
            if self._windows == SKIPPED:  # the batches ended before its first window
                return False
            self.hotspots = hotspots(profiler.key_averages(), self._windows - SKIPPED, seconds)
        except Exception as error:  # of many types, from the profiler's C++
            return self._fail(f"the profiler failed: {in_one_line(error)}; nothing was written")
        return self._write(profiler, self._path)

    def _write(self, profiler: Any, path: Path) -> bool:
        name = f".{os.getpid()}.trace" + ".gz" * (path.suffix == ".gz")  # PyTorch compresses files of this name
        temporary = path.with_name(name)
        try:
            with utf8_name(path.parent) as folder:
                profiler.export_chrome_trace(str(folder / name))
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:
            for left in (temporary, temporary.with_name(f"{name}.tmp")):  # PyTorch renames the second to the first
                with suppress(OSError):
                    left.unlink()
            # PyTorch only logs that it could not write the file, which is missing then.
            missing = isinstance(error, FileNotFoundError)
            reason = "PyTorch wrote no whole file" if missing else getattr(error, "strerror", None) or error
            return self._fail(f"cannot write {shown(path)}: {reason}; free space there, or name another file")
        self.written = path
        return True

    def _fail(self, reason: str) -> bool:
        self.failed = True
        self._warn(f"profile: {reason}")
        return False
