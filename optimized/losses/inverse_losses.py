"""The inverse losses of those batches alone that a schedule names (ups, technique 002.3)."""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from optimized.losses.query_sampling import query_sampling
from suite.ups.losses import InverseTask


def inverse_losses(
    tasks: Sequence[InverseTask],
    batch: int,
    frequency: int = 1,
    at_queries: Callable[..., torch.Tensor] = query_sampling,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (MSE(D(z₀)(x_q), u(x_q)), MSE(E(D(z₀)), stop(z₀))), each 0-d: means over all examples of a batch.

    Batches 0, frequency, 2 · frequency, … have these losses. In all others both are 0 and have no gradient, and
    nothing is decoded: a frequency of 4 saves three quarters of the work. The source counts 87.5% together with half
    as many query points, but the second loss decodes the whole grid, whatever the number of query points is.

    tasks       what the batch has of each task; one or more, with one example or more each
    batch       the batch's number, from 0; a resumed run goes on counting
    frequency   1 or more
    at_queries  (decode, latents, field, points, queries) → the first of the two errors of a task

    Source: ups, technique 002.3.
    """
    if batch % frequency != 0:
        none = tasks[0].latents.new_zeros(())
        return none, none.clone()
    examples = sum(len(task.latents) for task in tasks)
    losses = [torch.stack(_of_task(task, at_queries)) * (len(task.latents) / examples) for task in tasks]
    first, second = torch.stack(losses).sum(0)
    return first, second


def _of_task(task: InverseTask, at_queries: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    decoded = task.decode(task.latents, task.points.flatten(0, -2)).unflatten(1, task.points.shape[:-1])
    again = functional.mse_loss(task.encode(decoded, task.points), task.latents.detach())
    return at_queries(task.decode, task.latents, task.field, task.points, task.queries), again
