"""Rotor update, one pair at a time (trainer2, technique 000.2)."""

import math

import torch

# Below this length a pair of velocity components has no meaningful angle.
MIN_LENGTH = 1e-6


def rotor_update(
    theta: torch.Tensor,
    velocity: torch.Tensor,
    index: torch.Tensor,
    loss_delta: torch.Tensor,
    eta: float = 10.0,
) -> torch.Tensor:
    """Update the listed rotor angles in place, against the change of the loss, and return `theta`.

    For each row (i, j, slot) of `index`:
    `theta[slot] += 0.01 * eta * (-loss_delta) * atan2(v_j, v_i) * hypot(v_i, v_j)`. A row is skipped if hypot is below
    1e-6, an index is out of range, or the added value is not finite. The values of a repeated slot add up. Finally,
    every angle is wrapped to [-pi, pi).

    theta       [k], radians, changed in place
    velocity    [n], mean velocity over batch and window
    index       [P, 3] int64, rows (i, j, slot)
    loss_delta  0-d, nudged loss minus free loss

    Source: trainer2, technique 000.2.
    """
    slots, n = theta.shape[0], velocity.shape[0]
    for row in range(index.shape[0]):
        i = int(index[row, 0].item())
        j = int(index[row, 1].item())
        slot = int(index[row, 2].item())
        if not (0 <= i < n and 0 <= j < n and 0 <= slot < slots):
            continue
        length = torch.hypot(velocity[i], velocity[j])
        if length.item() < MIN_LENGTH:
            continue
        angle = torch.atan2(velocity[j], velocity[i])
        delta = 0.01 * eta * (-loss_delta) * angle * length
        if not math.isfinite(delta.item()):
            continue
        theta[slot] += delta
    theta.copy_(wrap(theta))
    return theta


def wrap(theta: torch.Tensor) -> torch.Tensor:
    """Wrap angles to [-pi, pi). In float32, an angle that is already in this range stays exactly the same."""
    turns = torch.floor((theta + math.pi) / (2 * math.pi))
    wrapped = theta - 2 * math.pi * turns
    # Rounding can give pi, or a value just below -pi.
    wrapped = torch.where(wrapped >= math.pi, -math.pi, wrapped)
    return torch.where(wrapped < -math.pi, -math.pi, wrapped)
