"""Rotation and projection in one product (eigenstate_lm, technique 004.13)."""

import torch


def fused_output_projection(states: torch.Tensor, rotation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`states (R Wᵀ)`, [..., D]: the two small factors are multiplied first, once for all states.

    With many states this saves K / (K + D) of the arithmetic, and writing and reading the rotated ones. Other elements
    than in the given order may become NaN where states are not finite. Where R Wᵀ underflows, its elements lose digits
    that the given order keeps.

    states    [..., K]
    rotation  [K, K]: R
    weight    [D, K]: W

    Source: eigenstate_lm, technique 004.13, which expects twice the bandwidth.
    """
    return states @ (rotation @ weight.T)
