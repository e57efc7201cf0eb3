"""Data-parallel training in which each rank stores all weights (ups, technique 002.7)."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from reference.distributed.ddp import ddp


def fsdp2(
    weights: Sequence[torch.Tensor], lr: float = 0.1
) -> Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """Build `step(inputs, targets)`, which takes one SGD step on a network's mean squared error; all ranks call it.

    Each rank has its own part of the rows; the parts have the same size. The step returns this rank's shard of each
    weight, as `torch.chunk` splits its first dimension. If a weight has fewer rows than there are ranks, the shards of
    the last ranks are empty.

    weights  one per linear layer, [out, in], without biases, with tanh between the layers; the step copies them
    inputs   [rows, in]
    targets  [rows, out]

    Source: ups, technique 002.7.
    """
    weights = [w.clone() for w in weights]
    replicated = ddp(weights, lr)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        replicated(inputs[None], targets[None])
        return [shard(w) for w in weights]

    return step


def shard(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's rows of the weight."""
    shards = weight.chunk(dist.get_world_size())
    return shards[dist.get_rank()].clone() if dist.get_rank() < len(shards) else weight[:0].clone()
