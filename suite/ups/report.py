"""What a step of ups reports, and how fast a run was: the same from either trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from suite.runtime.display import quantity
from suite.stepping import StepSeconds


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


class Throughput(StepSeconds):
    """Examples a second, and on a GPU the memory in use at most."""

    def __init__(self, examples: int, device: torch.device) -> None:
        super().__init__()
        self._examples, self._device = examples, device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def metrics(self) -> dict[str, float]:
        """examples_per_second, and on a GPU peak_gib; empty before the second step."""
        seconds = self.median_s()
        if seconds is None:
            return {}
        found = {"examples_per_second": self._examples / seconds}
        if self._device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return found

    def summary(self) -> str | None:
        """The same in a line for the user."""
        found = self.metrics()
        if not found:
            return None
        told = f"{quantity(found['examples_per_second'])} examples/s"
        return told + (f", peak memory {found['peak_gib']:.1f} GiB" if "peak_gib" in found else "")
