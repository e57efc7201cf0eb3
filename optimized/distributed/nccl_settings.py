"""Gradients averaged over all ranks in a group with NCCL's variables for sockets (ups, technique 002.1b)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from optimized.process_groups import group_with

VARIABLES = {
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_SOCKET_NTHREADS": "2",
    "NCCL_MIN_NCHANNELS": "4",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_IB_DISABLE": "0",
}
"""As the source sets them. The first two are about sockets between hosts; the last two are NCCL's defaults."""


def nccl_settings(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The mean of each gradient over the examples of all ranks, which have equally many.

    It is summed in a group of its own, whose communicator is made where VARIABLES are set. gloo does not know them.

    NCCL keeps a variable as it first reads it, for as long as the process runs (`NCCL_PARAM` in its
    src/include/param.h). They take effect only where this is the first communicator of the process. So one process
    cannot time the two settings: what it times where the default group has been used before is NCCL's defaults twice.
    A trainer sets them before it starts, as the source does.

    gradients  of each example of this rank, [examples, …] each
    returns    [1, …] each, the same in every rank

    Source: ups, technique 002.1b, which claims 1.36x together with torch.compile.
    """
    means = []
    for gradient in gradients:
        mean = gradient.mean(0, keepdim=True)
        group = group_with(VARIABLES, mean.device)
        dist.all_reduce(mean, group=group)
        means.append(mean / dist.get_world_size(group))
    return means
