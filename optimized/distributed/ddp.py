"""Data-parallel training with DistributedDataParallel, reducing gradients once per step (eigenstate_lm, 004.15)."""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from optimized.tanh_network import TanhNetwork


def ddp(weights: Sequence[torch.Tensor], lr: float = 0.1) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Build `step(inputs, targets)`, which takes one SGD step on a network's mean squared error; all ranks call it.

    All ranks have the same weights. Each has its own part of every micro-batch; the parts have the same size. The
    gradient is the mean over micro-batches and ranks. Each rank first sums it over the micro-batches: `no_sync` skips
    the all-reduce of all except the last.

    weights  one per linear layer, [out, in], without biases, with tanh between the layers; changed in place
    inputs   [micro-batches, rows, in]
    targets  [micro-batches, rows, out]

    Source: eigenstate_lm, technique 004.15.
    """
    network = TanhNetwork(weights)
    device = weights[0].device
    parallel = DistributedDataParallel(
        network,
        device_ids=[device.index] if device.type == "cuda" else None,
        # All ranks already have the same weights.
        init_sync=False,
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.enable_grad():
            for i, (x, target) in enumerate(zip(inputs, targets, strict=True)):
                last = i == len(inputs) - 1
                with contextlib.nullcontext() if last else parallel.no_sync():
                    ((parallel(x) - target).square().mean() / len(inputs)).backward()
        optimizer.step()

    return step
