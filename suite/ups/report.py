"""The report of a training step of ups, which both trainers use."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of a training step."""

    step: int
    """Number of the step, counted from 1."""
    loss: float
    """Mean loss over the micro-batches, including the inverse losses of the micro-batches that have them."""
    norm: float | None
    """Global norm of the gradients before clipping; None without clipping."""
    scale: float
    """Loss scale; 1 in every precision except float16. In float16, steps with non-finite gradients are skipped."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics as the shared training loop expects them."""
        norm = {} if self.norm is None else {"gradient_norm": self.norm}
        return {"loss": self.loss, **norm, "loss_scale": self.scale, "window": self.step}

    def stays(self) -> bool:
        """Return whether the loss is not finite. A later report must not replace such a report."""
        return not math.isfinite(self.loss)
