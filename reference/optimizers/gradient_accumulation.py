"""The gradient of a large batch at once (eigenstate_lm, technique 004.3; ups, technique 002.2)."""

from collections.abc import Callable, Sequence

import torch

Loss = Callable[..., torch.Tensor]


def gradient_accumulation(
    loss: Loss, weights: Sequence[torch.Tensor], batch: Sequence[torch.Tensor], rows: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The mean loss of a batch, 0-d, and its gradient by each weight.

    loss     (weights, *batch) → the mean over the batch's rows, 0-d; no row may matter to another
    weights  leaves that want a gradient
    batch    tensors with the rows in their first dimension; one row or more
    rows     of a micro-batch; here of no effect

    Source: eigenstate_lm, technique 004.3.
    """
    with torch.enable_grad():
        whole = loss(weights, *batch)
        return whole.detach(), list(torch.autograd.grad(whole, list(weights)))
