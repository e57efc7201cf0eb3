"""Report of an optimizer step, the same for both trainers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Report:
    """Metrics of an optimizer step."""

    step: int
    """Number of the step, counted from 1."""
    cross_entropy: float
    """Mean over the step's tokens that have a loss."""
    diversity: float
    """Mean over the step's sets; 0 if no replies were sampled."""
    tokens: float
    """Mean number of tokens per sampled reply; 0 if none were sampled."""
    rate: float
    norm: float
    """Global norm of the gradients before clipping."""
    weight: float
    """λ, the weight of the diversity."""

    @property
    def loss(self) -> float:
        """The source's loss, cross-entropy minus λ times diversity."""
        return self.cross_entropy - self.weight * self.diversity

    def metrics(self) -> dict[str, float]:
        """Return the metrics under the names that the shared loop expects."""
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
        """Return True if the loss is not finite. `Reports` then keeps it as the latest, even if later ones arrive."""
        return not math.isfinite(self.loss)
