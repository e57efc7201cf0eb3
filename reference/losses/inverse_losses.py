"""The inverse losses, computed for every batch; a schedule selects which are used (ups, technique 002.3)."""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from reference.losses.query_sampling import query_sampling
from suite.ups.losses import InverseTask


def inverse_losses(
    tasks: Sequence[InverseTask],
    batch: int,
    frequency: int = 1,
    at_queries: Callable[..., torch.Tensor] = query_sampling,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (MSE(D(z₀)(x_q), u(x_q)), MSE(E(D(z₀)), stop(z₀))), each 0-d: means over all examples of a batch.

    Batches 0, frequency, 2 · frequency, … have these losses. In all other batches both are 0 without a gradient.

    tasks       each task's part of the batch; at least one task, with at least one example each
    batch       index of the batch, from 0; a resumed run continues to count
    frequency   1 or more
    at_queries  (decode, latents, field, points, queries) → the first error of a task

    Source: ups, technique 002.3.
    """
    examples = sum(len(task.latents) for task in tasks)
    first, second = [], []
    for task in tasks:
        share = len(task.latents) / examples
        error = at_queries(task.decode, task.latents, task.field, task.points, task.queries)
        decoded = task.decode(task.latents, task.points.flatten(0, -2)).reshape(task.field.shape)
        first.append(share * error)
        second.append(share * functional.mse_loss(task.encode(decoded, task.points), task.latents.detach()))
    losses = torch.stack(first).sum(), torch.stack(second).sum()
    return losses if batch % frequency == 0 else (torch.zeros_like(losses[0]), torch.zeros_like(losses[1]))
