"""Stored coordinates, all rotated again at every query (trainer2, technique 000.F4)."""

from collections.abc import Callable

import torch

from reference.geometry.rotor_apply import rotor_apply


class RotorCache:
    """Stored coordinates, which every call of `rotated` rotates again.

    theta        [k], radians
    coordinates  [M, n], copied; n even, else ValueError
    """

    def __init__(self, theta: torch.Tensor, coordinates: torch.Tensor) -> None:
        self.coordinates = coordinates.detach().clone()
        self.set_theta(theta)

    @torch.no_grad()
    def set_theta(self, theta: torch.Tensor) -> None:
        """Use these angles from now on. They are copied, so later changes of `theta` have no effect."""
        self.theta = theta.detach().clone()

    @torch.no_grad()
    def write(self, slots: torch.Tensor, coordinates: torch.Tensor) -> None:
        """Store `coordinates` [W, n] in `slots`, int64 [W], each in [0, M). A repeated slot gets its last row."""
        if slots.shape[0]:
            rows = torch.arange(slots.shape[0], device=slots.device)
            last = torch.where(slots[:, None] == slots, rows, -1).amax(1)
            self.coordinates[slots] = coordinates[last]

    @torch.no_grad()
    def rotated(self) -> torch.Tensor:
        """Return the rotated coordinates, [M, n]. Do not write to them; they are valid until the next change."""
        return rotor_apply(self.theta, self.coordinates)


def rotor_cache(
    theta: torch.Tensor, coordinates: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Build `step(slots, written, theta=None)`, which sets theta if given, writes, and returns all rotated coordinates.

    Source: trainer2, technique 000.F4.
    """
    cache = RotorCache(theta, coordinates)

    def step(slots: torch.Tensor, written: torch.Tensor, theta: torch.Tensor | None = None) -> torch.Tensor:
        if theta is not None:
            cache.set_theta(theta)
        cache.write(slots, written)
        return cache.rotated()

    return step
