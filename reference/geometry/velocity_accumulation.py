"""Sum of velocities, a new tensor at every step (trainer2, technique 000.5)."""

from collections.abc import Callable

import torch


def velocity_accumulation(start: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build `window(velocities)`, which adds a window's velocities one after the other and returns the sum so far.

    start       [B, n], the sum at the beginning; never written to
    velocities  [W, B, n], of the same dtype and device

    The sums carry no gradient. What is returned stays as it is when more is added.

    Source: trainer2, technique 000.5.
    """
    accumulated = start

    def window(velocities: torch.Tensor) -> torch.Tensor:
        nonlocal accumulated
        for velocity in velocities:
            accumulated = accumulated.detach() + velocity.detach()
        return accumulated.detach().clone()

    return window
