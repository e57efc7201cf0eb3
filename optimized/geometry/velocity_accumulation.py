"""Sum of velocities in place, in a tensor of its own (trainer2, technique 000.5)."""

from collections.abc import Callable

import torch


class VelocitySum:
    """A running sum of velocities: cloned once, then added to in place, with no allocation a step.

    The clone is what makes it the same function: added to the first velocity itself, the sum would change the caller's
    tensor, and handed out itself, it would change in the caller's hands. The sum carries no gradient.

    start  [B, n], the sum at the beginning; never written to

    Source: trainer2, technique 000.5.
    """

    def __init__(self, start: torch.Tensor) -> None:
        # Contiguous: an expanded tensor has several elements in one place.
        self._sum = start.detach().clone(memory_format=torch.contiguous_format)

    def add(self, velocity: torch.Tensor) -> None:
        """Add a velocity [B, n], of the same dtype and device."""
        self._sum.add_(velocity.detach())

    def reset(self) -> None:
        """Begin again from zero, in the same memory."""
        self._sum.zero_()

    def value(self) -> torch.Tensor:
        """The sum so far, [B, n], as a copy: it stays as it is when more is added."""
        return self._sum.clone()


def velocity_accumulation(start: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build `window(velocities)`, which adds a window's velocities one after the other and returns the sum so far.

    start       [B, n], the sum at the beginning; never written to
    velocities  [W, B, n], of the same dtype and device

    The sums carry no gradient. What is returned stays as it is when more is added.

    As many kernels as without: what is saved is an allocation a step, and at sizes beyond the cache nothing of the
    traffic.

    Source: trainer2, technique 000.5.
    """
    accumulated = VelocitySum(start)

    def window(velocities: torch.Tensor) -> torch.Tensor:
        for velocity in velocities:
            accumulated.add(velocity)
        return accumulated.value()

    return window
