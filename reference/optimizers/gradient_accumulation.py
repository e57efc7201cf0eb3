"""Gradient of a large batch in one backward (eigenstate_lm, technique 004.3; ups, technique 002.2)."""

from collections.abc import Callable, Sequence

import torch

Loss = Callable[..., torch.Tensor]


def gradient_accumulation(
    loss: Loss, weights: Sequence[torch.Tensor], batch: Sequence[torch.Tensor], rows: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the mean loss of a batch, 0-d, and its gradient with respect to each weight.

    loss     (weights, *batch) → the mean over the batch's rows, 0-d; the rows must be independent of each other
    weights  leaves that require a gradient
    batch    tensors with the rows in their first dimension, at least one row
    rows     rows of a micro-batch; unused here

    Source: eigenstate_lm, technique 004.3.
    """
    with torch.enable_grad():
        whole = loss(weights, *batch)
        return whole.detach(), list(torch.autograd.grad(whole, list(weights)))
