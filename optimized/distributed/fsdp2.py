"""Fully sharded data-parallel training: each rank stores only its shard of the weights (ups, technique 002.7)."""

from collections.abc import Callable, Sequence

import torch
from torch.distributed.fsdp import fully_shard

from optimized.tanh_network import TanhNetwork


def fsdp2(
    weights: Sequence[torch.Tensor], lr: float = 0.1
) -> Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """Build `step(inputs, targets)`, which takes one SGD step on a network's mean squared error; all ranks call it.

    Each rank has its own part of the rows; the parts have the same size. `fully_shard` shards weights, gradients and
    optimizer state layer by layer: a layer is gathered before it is used and freed afterwards. The step returns this
    rank's shard of each weight, as `torch.chunk` splits its first dimension. If a weight has fewer rows than there are
    ranks, the shards of the last ranks are empty.

    weights  one per linear layer, [out, in], without biases, with tanh between the layers; the step copies them
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
