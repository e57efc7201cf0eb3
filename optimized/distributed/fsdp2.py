"""Data-parallel training steps in which every rank keeps its shard of the weights alone (ups, technique 002.7)."""

from collections.abc import Callable, Sequence

import torch
from torch.distributed.fsdp import fully_shard

from optimized.tanh_network import TanhNetwork


def fsdp2(
    weights: Sequence[torch.Tensor], lr: float = 0.1
) -> Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """Build `step(inputs, targets)`: one step of SGD on the mean squared error of a network, in all ranks together.

    Every rank has its own part of the rows; the parts are of equal size. Weights, gradients and the optimizer's state
    are sharded by `fully_shard`, a layer at a time: a layer is gathered before it is used and freed after it. Returns
    the rank's shard of each weight, as `torch.chunk` cuts its first dimension: of n ranks and fewer rows the last ones
    have none.

    weights  of linear layers without biases, [out, in] each, with tanh between them; the step has copies of its own
    inputs   [rows, in]
    targets  [rows, out]

    Source: ups, technique 002.7.
    """
    network = TanhNetwork([w.detach().clone(memory_format=torch.contiguous_format) for w in weights])
    for layer in network.layers:
        fully_shard(layer)
    fully_shard(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        with torch.enable_grad():
            (network(inputs) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [layer.weight.detach().to_local().clone() for layer in network.layers]

    return step
