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
    """Turn each listed rotor angle against the change of the loss, in place; returns `theta`.

    For each row (i, j, slot) of `index`:
    `theta[slot] += 0.01 * eta * (-loss_delta) * atan2(v_j, v_i) * hypot(v_i, v_j)`. A row is skipped where the
    length is below 1e-6, an index is out of range, or the value is not finite. Slots may repeat and then
    accumulate. At the end every angle is wrapped to [-pi, pi).

    theta       [k], radians, changed in place
    velocity    [n], mean velocity over batch and window
    index       [P, 3] int64, rows (i, j, slot)
    loss_delta  0-d, nudged minus free loss

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
    """Angles in [-pi, pi); one that is there already is returned exactly."""
    turns = torch.floor((theta + math.pi) / (2 * math.pi))
    wrapped = theta - 2 * math.pi * turns
    # Rounding can land on either end.
    wrapped = torch.where(wrapped >= math.pi, -math.pi, wrapped)
    return torch.where(wrapped < -math.pi, -math.pi, wrapped)
