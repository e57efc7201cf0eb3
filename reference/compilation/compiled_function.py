"""Softmax-weighted sum of states, run eagerly (trainer2, technique 000.4)."""

import torch


def compiled_function(cost: torch.Tensor, states: torch.Tensor, beta: float = 5.0) -> torch.Tensor:
    """Return `sum_k softmax(-beta * cost)_k * state_k`, [B, D].

    cost    [B, K]
    states  [B, K, D]
    beta    inverse temperature

    Source: trainer2, technique 000.4.
    """
    weights = torch.softmax(-beta * cost, dim=1)
    return torch.einsum("bk,bkd->bd", weights, states)
