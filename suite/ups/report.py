"""What a step of ups reports, and how fast a run was: the same from either trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
