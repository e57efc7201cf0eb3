"""What a step of polychromic reports: the same from either trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from suite.polychromic.config import TrainConfig
from suite.runtime.display import quantity
from suite.stepping import StepSeconds


@dataclass(frozen=True, kw_only=True)
class Report:
    """A step's."""

    step: int
    """From 1."""
    cross_entropy: float
    """The mean of the step's trained tokens."""
    diversity: float
    """The mean of the step's sets; 0 where nothing was generated."""
    tokens: float
    """Of a reply, on average; 0 where none was generated."""
    rate: float
    norm: float
    """Of the gradients, before they were clipped."""
    weight: float
    """λ."""

    @property
    def loss(self) -> float:
        """What the source calls the loss."""
        return self.cross_entropy - self.weight * self.diversity

    def metrics(self) -> dict[str, float]:
        """As the shared loop takes them."""
        return {
            "loss": self.loss,
            "cross_entropy": self.cross_entropy,
            "diversity": self.diversity,
            "reply_tokens": self.tokens,
            "learning_rate": self.rate,
            "gradient_norm": self.norm,
            "window": self.step,
        }

    def stays(self) -> bool:
        """Whether its loss is no finite number."""
        return not math.isfinite(self.loss)


class Throughput(StepSeconds):
    """Examples a second, and the memory in use at most."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        super().__init__()
        self._examples, self._device = config.examples, device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def metrics(self) -> dict[str, float]:
        """examples_per_second, and on a GPU peak_gib. Empty before a step."""
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
        memory = f", peak memory {found['peak_gib']:.1f} GiB" if "peak_gib" in found else ""
        return f"{quantity(found['examples_per_second'])} examples/s{memory}"
