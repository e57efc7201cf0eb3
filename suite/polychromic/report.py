"""The report of an optimizer step; both trainers make the same."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a step."""

    step: int
    """Number of the step, from 1."""
    cross_entropy: float
    """Mean over the tokens that the step trained on."""
    diversity: float
    """Mean over the step's sets; 0 if no reply was drawn."""
    tokens: float
    """Mean number of tokens of a drawn reply; 0 if none was drawn."""
    rate: float
    norm: float
    """Norm of all gradients together, before clipping."""
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
        """Return whether the loss is not finite. Such a report stays the latest one."""
        return not math.isfinite(self.loss)
