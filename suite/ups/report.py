"""What a step of ups reports, and how fast a run was: the same from either trainer."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from suite.runtime.display import quantity

REMEMBERED = 50
"""Steps of whose times the median is told."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A step's."""

    step: int
    """From 1."""
    loss: float
    """The mean over the micro-batches, with the inverse losses of those that have them."""
    norm: float | None
    """Of the gradients before they were clipped; None where they are not."""
    scale: float
    """Of the loss; a step whose gradients were not finite was left out where it is not 1."""

    def metrics(self) -> dict[str, float]:
        """As the shared loop takes them."""
        norm = {} if self.norm is None else {"gradient_norm": self.norm}
        return {"loss": self.loss, **norm, "loss_scale": self.scale, "window": self.step}

    def stays(self) -> bool:
        """Whether its loss is no finite number."""
        return not math.isfinite(self.loss)


class Throughput:
    """Examples a second, and on a GPU the memory in use at most."""

    def __init__(self, examples: int, device: torch.device) -> None:
        self._examples, self._device = examples, device
        self._step: int | None = None
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def add(self, report: Report | None, seconds: float | None) -> None:
        """The last step's report, if it is new, and how long after the one before it came."""
        if report is None or report.step == self._step:
            return
        self._step = report.step
        if seconds is not None and seconds > 0:
            self._seconds.append(seconds)

    def metrics(self) -> dict[str, float]:
        """examples_per_second, and on a GPU peak_gib; empty before the second step."""
        if not self._seconds:
            return {}
        found = {"examples_per_second": self._examples / median(self._seconds)}
        if self._device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return found

    def told(self) -> str | None:
        """The same in a line for the user."""
        found = self.metrics()
        if not found:
            return None
        told = f"{quantity(found['examples_per_second'])} examples/s"
        return told + (f", peak memory {found['peak_gib']:.1f} GiB" if "peak_gib" in found else "")


def finish(trainer: Any, folder: Path) -> str | None:
    """At the end of a run: how fast it was."""
    found: str | None = trainer.throughput.told()
    return found
