"""What a step of eigenstate_lm reports, and how fast a run was: the same from either trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perfsuite import ceilings
from suite.eigenstate_lm.config import TrainConfig
from suite.runtime.display import quantity
from suite.stepping import StepSeconds


@dataclass(frozen=True, kw_only=True)
class Report:
    """A step's."""

    step: int
    """From 1."""
    loss: float
    rate: float
    norm: float
    """Of the gradients, before they were clipped."""
    scale: float
    """Of the loss; the step was skipped where the norm is not finite and this is not 1."""

    def metrics(self) -> dict[str, float]:
        """As the shared loop takes them."""
        return {
            "loss": self.loss,
            "learning_rate": self.rate,
            "gradient_norm": self.norm,
            "loss_scale": self.scale,
            "window": self.step,
        }

    def stays(self) -> bool:
        """Whether its loss is no finite number."""
        return not math.isfinite(self.loss)


class Throughput(StepSeconds):
    """Tokens a second, the share of the device's arithmetic that they take, and the memory in use at most.

    The device's most is measured here once, by a matrix product in the precision of the trainer's own.
    """

    def __init__(self, config: TrainConfig, vocabulary: int, device: torch.device) -> None:
        super().__init__()
        self._tokens, self._flops = config.tokens, config.flops(vocabulary)
        self._device = device
        self._most: float | None = None
        if device.type == "cuda":
            with torch.random.fork_rng(devices=[device]):  # what is dropped must not depend on it
                self._most = ceilings.matmul_flops_per_s(str(device), config.precision)
            torch.cuda.reset_peak_memory_stats(device)  # the product's matrices are none of the trainer's

    def metrics(self) -> dict[str, float]:
        """tokens_per_second; on a GPU also mfu (model FLOPs utilisation, 0 to 1) and peak_gib. Empty before a step."""
        seconds = self.median_s()
        if seconds is None:
            return {}
        rate = self._tokens / seconds
        found = {"tokens_per_second": rate}
        if self._most is not None:
            found["mfu"] = rate * self._flops / self._most
            found["peak_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return found

    def summary(self) -> str | None:
        """The same in a line for the user."""
        found = self.metrics()
        if not found:
            return None
        told = f"{quantity(found['tokens_per_second'])} tokens/s"
        if self._most is not None:
            told += f", {100 * found['mfu']:.1f}% of the {self._most / 1e12:.0f} TFLOP/s that a matrix product reaches"
            told += f", peak memory {found['peak_gib']:.1f} GiB"
        return told


def finish(trainer: Any, folder: Path) -> str | None:
    """Say at the end of a run how fast it was, and what the held-out sequences lost."""
    lines = [line for line in (trainer.held_out.summary(), trainer.throughput.summary()) if line is not None]
    return "\n".join(lines) or None


def quality(trainer: Any, given: Any) -> dict[str, float]:
    """Return the last validation's metrics, for `perfsuite ab`; empty where nothing was held out."""
    found: dict[str, float] = trainer.held_out.metrics()
    return found
