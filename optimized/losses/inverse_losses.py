"""The inverse losses, computed only for the batches that a schedule selects (ups, technique 002.3)."""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from suite.ups.losses import InverseTask


def inverse_losses(
    tasks: Sequence[InverseTask],
    batch: int,
    frequency: int = 1,
    at_queries: Callable[..., torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (MSE(D(z₀)(x_q), u(x_q)), MSE(E(D(z₀)), stop(z₀))), each 0-d: means over all examples of a batch.

    Batches 0, frequency, 2 · frequency, … have these losses. In all other batches both are 0 without a gradient, and
    nothing is decoded: a frequency of 4 saves three quarters of the work. The source claims 87.5% together with half as
    many query points. But the second loss decodes the whole grid, whatever the number of query points. The first loss
    is therefore read from the same decoded field, and its query points cost nothing extra.

    tasks       each task's part of the batch; at least one task, with at least one example each
    batch       index of the batch, from 0; a resumed run continues to count
    frequency   1 or more
    at_queries  (decode, latents, field, points, queries) → the first error of a task; it calls `decode` itself, as
                `query_sampling` does. None: the error is read from the field decoded for the second loss

    Source: ups, technique 002.3.
    """
    if batch % frequency != 0:
        none = tasks[0].latents.new_zeros(())
        return none, none.clone()
    examples = sum(len(task.latents) for task in tasks)
    losses = [torch.stack(_of_task(task, at_queries)) * (len(task.latents) / examples) for task in tasks]
    first, second = torch.stack(losses).sum(0)
    return first, second


def _of_task(task: InverseTask, at_queries: Callable[..., torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
    whole = task.decode(task.latents, task.points.flatten(0, -2))
    again = task.encode(whole.unflatten(1, task.points.shape[:-1]), task.points)
    if at_queries is not None:
        first = at_queries(task.decode, task.latents, task.field, task.points, task.queries)
    else:
        first = functional.mse_loss(
            whole.index_select(1, task.queries), task.field.flatten(1, -2).index_select(1, task.queries)
        )
    return first, functional.mse_loss(again, task.latents.detach())
