"""Rotation and projection in one product (eigenstate_lm, technique 004.13)."""

import torch


def fused_output_projection(states: torch.Tensor, rotation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`states (R Wᵀ)`, [..., D]: the two small factors are multiplied first, once for all states.

    Of many states that saves K / (K + D) of the arithmetic, and writing and reading the rotated ones. Of states that
    are not finite others than in the given order may become NaN.

    states    [..., K]
    rotation  [K, K]: R
    weight    [D, K]: W

    Source: eigenstate_lm, technique 004.13, which expects twice the bandwidth.
    """
    return states @ (rotation @ weight.T)
