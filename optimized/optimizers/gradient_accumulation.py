"""Gradient of a large batch, one micro-batch at a time (eigenstate_lm, technique 004.3; ups, technique 002.2)."""

from collections.abc import Callable, Sequence

import torch

Loss = Callable[..., torch.Tensor]


def gradient_accumulation(
    loss: Loss, weights: Sequence[torch.Tensor], batch: Sequence[torch.Tensor], rows: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the mean loss of a batch, 0-d, and its gradient with respect to each weight.

    Each micro-batch is weighted by its number of rows, so that a shorter last one has the right weight; the source
    divides by the number of micro-batches. Only the activations of one micro-batch are kept at a time. The gradients
    are added up in place.

    loss     (weights, *batch) → the mean over the batch's rows, 0-d; the rows must be independent of each other
    weights  leaves that require a gradient
    batch    tensors with the rows in their first dimension, at least one row
    rows     rows of a micro-batch, at least 1

    Raises ValueError if a micro-batch or the batch has no row.

    Source: eigenstate_lm, technique 004.3.
    """
    if rows < 1:
        raise ValueError(f"rows={rows}: a micro-batch has at least one")
    leaves, count = list(weights), len(batch[0])
    total: torch.Tensor | None = None
    sums: list[torch.Tensor] = []
    for start in range(0, count, rows):
        part = [t[start : start + rows] for t in batch]
        with torch.enable_grad():
            share = loss(weights, *part) * (len(part[0]) / count)
            grads = torch.autograd.grad(share, leaves)
        if total is None:
            total, sums = share.detach().clone(), [g.clone() for g in grads]
        else:
            total += share.detach()
            torch._foreach_add_(sums, list(grads))
    if total is None:
        raise ValueError("the batch has no rows")
    return total, sums
