"""Retrieval by distance in the metric, over the concatenated candidates (trainer2, technique 000.F1)."""

import torch


def retrieval(
    query: torch.Tensor,
    curvature: torch.Tensor,
    coordinates: torch.Tensor,
    states: torch.Tensor,
    filled: torch.Tensor,
    memory_coordinates: torch.Tensor,
    memory_states: torch.Tensor,
    memory_filled: torch.Tensor,
    metric: torch.Tensor | None,
    metric_diag: torch.Tensor | None = None,
    beta: float = 5.0,
    eps: float = 1e-8,
) -> torch.Tensor:
    """Return the mean state of each query's candidates, [B, D], weighted by `softmax(-beta * cost)`.

    `cost = curvature * sqrt(max(d' g d, 0) + eps)` with `d = candidate - query`. A query's candidates are its own and
    those of the memory, which all queries share. An empty slot has weight 0, even if it holds NaN. A query without any
    filled slot returns 0.

    query               [B, n]
    curvature           [B], R_sc
    coordinates         [B, K, n], the query's own candidates
    states              [B, K, D]
    filled              [B, K] bool
    memory_coordinates  [M, n]
    memory_states       [M, D]
    memory_filled       [M] bool
    metric              [n, n] or [B, n, n]; None if metric_diag is given
    metric_diag         [n] or None; if given, it is used instead of metric

    Source: trainer2, technique 000.F1.
    """
    batch = query.shape[0]
    every_coordinate = torch.cat([coordinates, memory_coordinates.expand(batch, -1, -1)], dim=1)
    every_state = torch.cat([states, memory_states.expand(batch, -1, -1)], dim=1)
    full = torch.cat([filled, memory_filled.expand(batch, -1)], dim=1)

    # Mask before any multiplication: 0 * NaN is NaN, in the gradient too.
    d = torch.where(full[..., None], every_coordinate - query[:, None], 0.0)
    every_state = torch.where(full[..., None], every_state, 0.0)
    if metric_diag is not None:
        form = torch.einsum("bki,i,bki->bk", d, metric_diag, d)
    elif metric.dim() == 3:
        form = torch.einsum("bki,bij,bkj->bk", d, metric, d)
    else:
        form = torch.einsum("bki,ij,bkj->bk", d, metric, d)
    # 1 in empty slots: the square root has no derivative at 0.
    form = torch.where(full, form, 1.0)
    cost = curvature[:, None] * torch.sqrt(torch.clamp(form, min=0) + eps)

    logits = (-beta * cost).masked_fill(~full, torch.finfo(cost.dtype).min)
    # Without any filled slot all logits are equal, and the mask sets all weights to 0.
    weights = torch.softmax(logits, dim=1).masked_fill(~full, 0.0)
    return torch.einsum("bk,bkd->bd", weights, every_state)
