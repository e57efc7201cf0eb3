"""The report of a step of eigenstate_lm, and the throughput of a run, for both trainers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perfsuite.timing import roofline
from suite.eigenstate_lm.config import TrainConfig
from suite.runtime.display import quantity
from suite.stepping import StepSeconds


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a step."""

    step: int
    """Number of the step, from 1."""
    loss: float
    rate: float
    norm: float
    """Norm of the gradients before clipping."""
    scale: float
    """Scale of the loss. If it is not 1 and the norm is not finite, the step was skipped."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics, with the names that the shared training loop expects."""
        return {
            "loss": self.loss,
            "learning_rate": self.rate,
            "gradient_norm": self.norm,
            "loss_scale": self.scale,
            "window": self.step,
        }

    def stays(self) -> bool:
        """Return whether the loss is not finite. If so, later reports do not replace this one."""
        return not math.isfinite(self.loss)


class Throughput(StepSeconds):
    """Tokens per second; on a GPU also the model FLOPs utilisation and the peak memory.

    The peak FLOP/s of the GPU are measured once, with a matrix product in the precision of the trainer's products.
    """

    def __init__(self, config: TrainConfig, vocabulary: int, device: torch.device) -> None:
        super().__init__()
        self._tokens, self._flops = config.tokens, config.flops(vocabulary)
        self._device = device
        self._most: float | None = None
        if device.type == "cuda":
            with torch.random.fork_rng(devices=[device]):  # do not change the state that dropout draws from
                self._most = roofline.matmul_flops_per_s(str(device), config.precision)
            torch.cuda.reset_peak_memory_stats(device)  # do not count the product's matrices

    def metrics(self) -> dict[str, float]:
        """Return tokens_per_second; on a GPU also mfu (model FLOPs utilisation, 0 to 1) and peak_gib.

        The result is empty before the first step has been timed.
        """
        seconds = self.per_step()
        if seconds is None:
            return {}
        rate = self._tokens / seconds
        found = {"tokens_per_second": rate}
        if self._most is not None:
            found["mfu"] = rate * self._flops / self._most
            found["peak_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return found

    def summary(self) -> str | None:
        """Return the metrics as one line for the user; None if there are none."""
        found = self.metrics()
        if not found:
            return None
        text = f"{quantity(found['tokens_per_second'])} tokens/s"
        if self._most is not None:
            text += f", {100 * found['mfu']:.1f}% of the {self._most / 1e12:.0f} TFLOP/s that a matrix product reaches"
            text += f", peak memory {found['peak_gib']:.1f} GiB"
        return text


def finish(trainer: Any, folder: Path) -> str | None:
    """Return the held-out loss and the throughput of a finished run as lines for the user; None without both."""
    lines = [line for line in (trainer.held_out.summary(), trainer.throughput.summary()) if line is not None]
    return "\n".join(lines) or None


def quality(trainer: Any, trainer_data: Any) -> dict[str, float]:
    """Return the last validation's metrics, for `perfsuite ab`; empty if nothing was held out."""
    found: dict[str, float] = trainer.held_out.metrics()
    return found
