"""Data-parallel training steps by DistributedDataParallel, with one all-reduce a step (eigenstate_lm, 004.15)."""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from optimized.tanh_network import TanhNetwork


def ddp(weights: Sequence[torch.Tensor], lr: float = 0.1) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Build `step(inputs, targets)`: one step of SGD on the mean squared error of a network, in all ranks together.

    Every rank has the same weights and its own part of each micro-batch; the parts are of equal size. The gradient is
    the mean over the micro-batches and ranks. It is summed over the micro-batches first: `no_sync` leaves out the
    all-reduce of all but the last.

    weights  of linear layers without biases, [out, in] each, with tanh between them; changed in place
    inputs   [micro-batches, rows, in]
    targets  [micro-batches, rows, out]

    Source: eigenstate_lm, technique 004.15.
    """
    network = TanhNetwork(weights)
    device = weights[0].device
    parallel = DistributedDataParallel(
        network,
        device_ids=[device.index] if device.type == "cuda" else None,
        # All ranks have the same weights already.
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
