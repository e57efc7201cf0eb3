"""Running sum of velocities, with a new tensor at every step (trainer2, technique 000.5)."""

from collections.abc import Callable

import torch


def velocity_accumulation(start: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build `window(velocities)`, which adds a window's velocities one after another and returns the sum so far.

    start       [B, n], the sum at the beginning; never written to
    velocities  [W, B, n], of the same dtype and device

    The sums carry no gradient. Later windows do not change a sum that was returned.

    Source: trainer2, technique 000.5.
    """
    accumulated = start

    def window(velocities: torch.Tensor) -> torch.Tensor:
        nonlocal accumulated
        for velocity in velocities:
            accumulated = accumulated.detach() + velocity.detach()
        return accumulated.detach().clone()

    return window
