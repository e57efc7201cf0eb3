"""Average of gradients over all ranks with the backend's default settings (ups, technique 002.1b)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def nccl_settings(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the mean of each gradient over the examples of all ranks; each rank has the same number of examples.

    gradients  [examples, …] each: one gradient per example of this rank
    returns    [1, …] each, the same on every rank

    Source: ups, technique 002.1b.
    """
    means = []
    for gradient in gradients:
        mean = gradient.mean(0, keepdim=True)
        dist.all_reduce(mean)
        means.append(mean / dist.get_world_size())
    return means
