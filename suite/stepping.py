"""Batches that contain only a step number, and the throughput and metrics of trainers that use them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import torch

from suite.batching import check_identity, whole
from suite.runtime.display import quantity

REMEMBERED = 60
"""Maximum number of steps over which the throughput is computed."""
GROUP = 12
"""Steps per mean: whole periods of a schedule of 2, 3, 4, 6 or 12 steps."""


class NumberedSteps(ABC):
    """Iterator over batches {"step": number}, int64 [] on the CPU, with numbers from 0 to `total` - 1.

    A trainer selects a step's examples by its number.
    """

    raised_by = "steps"
    """Names of the configuration fields that increase the number of steps."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.step = 0

    def __iter__(self) -> NumberedSteps:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.step >= self.total:
            raise StopIteration
        self.step += 1
        return {"step": torch.tensor(self.step - 1)}

    @property
    def ended(self) -> str | None:
        """Reason why there are no further steps; None if there are."""
        if self.step < self.total:
            return None
        return f"all {self.total} steps were made before; raise {self.raised_by} to go on"

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return a description of the data and settings to which the position belongs."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and a description of the data and settings to which it belongs."""
        return {"step": self.step, **self.identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; PerfsuiteError if it belongs to other data, ValueError if it is invalid."""
        check_identity(state, self.identity())
        self.step = whole(state, "step")


def check_step(batch: Mapping[str, torch.Tensor], steps: int) -> None:
    """Raise ValueError if `batch["step"]` exists and differs from the number of completed steps."""
    if "step" in batch and int(batch["step"]) != steps:
        raise ValueError(f"step {int(batch['step'])} was given to a trainer that has made {steps}")


class Numbered(Protocol):
    """A report with the number of its step."""

    @property
    def step(self) -> int:
        """Number of the step."""


class StepSeconds:
    """Seconds between the reports of consecutive steps."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, report: Numbered | None, seconds: float | None) -> None:
        """Add the last step's report, if it is new, and the seconds since the report before it."""
        if report is None or report.step == self._step:
            return
        self._step = report.step
        if seconds is not None and seconds > 0:
            self._seconds.append(seconds)

    def per_step(self) -> float | None:
        """Return the seconds per step, as the median of means over `GROUP` steps; None before the second step.

        Means are used because steps may alternate between kinds; their median, because a checkpoint may delay a step.
        """
        seconds = list(self._seconds)
        groups = [seconds[max(end - GROUP, 0) : end] for end in range(len(seconds), 0, -GROUP)]
        if len(groups) > 1 and len(groups[-1]) < GROUP:
            groups.pop()
        return median(fmean(group) for group in groups) if groups else None


class Throughput(StepSeconds):
    """Examples per second and, on a GPU, peak memory."""

    def __init__(self, examples: int, device: torch.device) -> None:
        super().__init__()
        self._examples, self._device = examples, device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def metrics(self) -> dict[str, float]:
        """Return examples_per_second and, on a GPU, peak_gib; an empty dict before the second step."""
        seconds = self.per_step()
        if seconds is None:
            return {}
        found = {"examples_per_second": self._examples / seconds}
        if self._device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return found

    def summary(self) -> str | None:
        """Return the metrics as a line for the user."""
        found = self.metrics()
        if not found:
            return None
        text = f"{quantity(found['examples_per_second'])} examples/s"
        return text + (f", peak memory {found['peak_gib']:.1f} GiB" if "peak_gib" in found else "")


class WaitsForReports:
    """Mixin with the metrics of a trainer that waits for each step. The trainer has `_reports` and `throughput`."""

    _reports: Any
    throughput: Any

    def metrics(self) -> Mapping[str, float] | None:
        """Return the metrics of the last step; None before the first step."""
        report = self.last_report()
        return None if report is None else {**report.metrics(), **self.throughput.metrics()}

    def last_report(self) -> Any:
        """Return the report of the last step; None before the first step."""
        report = self._reports.wait()
        self.throughput.add(report, self._reports.seconds)
        return report


class QueuesReports:
    """Mixin with the metrics of a trainer that only queues its steps. The trainer has `_reports` and `throughput`."""

    _reports: Any
    throughput: Any

    def metrics(self) -> Mapping[str, float] | None:
        """Return the metrics of the last step whose report has arrived, without waiting; None before the first."""
        return self._metrics_of(self._reports.latest())

    def last_metrics(self) -> Mapping[str, float] | None:
        """Wait for the last step's report and return its metrics."""
        return self._metrics_of(self._reports.wait())

    def last_report(self) -> Any:
        """Wait for the last step's report and return it."""
        return self._reports.wait()

    def _metrics_of(self, report: Any) -> Mapping[str, float] | None:
        self.throughput.add(report, self._reports.seconds)
        return None if report is None else {**report.metrics(), **self.throughput.metrics()}


def finish(trainer: Any, folder: Path) -> str | None:
    """Return a line about the throughput for the end of a run; None if the throughput is unknown."""
    found: str | None = trainer.throughput.summary()
    return found
