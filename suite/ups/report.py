"""Report of a step of ups, the same from either trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of a step."""

    step: int
    """Number of the step, counted from 1."""
    loss: float
    """Mean over the micro-batches, including the inverse losses of those that have them."""
    norm: float | None
    """Norm of the gradients before clipping; None if they are not clipped."""
    scale: float
    """Scale of the loss. Where it is not 1, steps with non-finite gradients are skipped."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics in the form that the shared loop takes."""
        norm = {} if self.norm is None else {"gradient_norm": self.norm}
        return {"loss": self.loss, **norm, "loss_scale": self.scale, "window": self.step}

    def stays(self) -> bool:
        """Return whether the loss is not finite, so that the report must not be replaced by a later one."""
        return not math.isfinite(self.loss)
