"""Rotation of states, then their projection (eigenstate_lm, technique 004.13)."""

import torch


def fused_output_projection(states: torch.Tensor, rotation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `(states R) Wᵀ`, [..., D].

    states    [..., K]
    rotation  [K, K]: R
    weight    [D, K]: W

    Source: eigenstate_lm, technique 004.13.
    """
    return states @ rotation @ weight.T
