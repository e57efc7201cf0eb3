"""The report of an optimizer step; both trainers make the same."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Report:
    """A step's."""

    step: int
    """Number of the step, from 1."""
    cross_entropy: float
    """The mean of the step's trained tokens."""
    diversity: float
    """The mean of the step's sets; 0 where nothing was generated."""
    tokens: float
    """Mean tokens of a drawn reply; 0 where none was drawn."""
    rate: float
    norm: float
    """Norm of all gradients together, before clipping."""
    weight: float
    """λ."""

    @property
    def loss(self) -> float:
        """The source's loss, cross-entropy minus λ times diversity."""
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
