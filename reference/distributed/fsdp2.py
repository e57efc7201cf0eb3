"""Data-parallel training steps in which every rank keeps all weights (ups, technique 002.7)."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from reference.distributed.ddp import ddp


def fsdp2(
    weights: Sequence[torch.Tensor], lr: float = 0.1
) -> Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """Build `step(inputs, targets)`: one step of SGD on the mean squared error of a network, in all ranks together.

    Every rank has its own part of the rows; the parts are of equal size. Returns the rank's shard of each weight, as
    `torch.chunk` cuts its first dimension: of n ranks and fewer rows the last ones have none.

    weights  of linear layers without biases, [out, in] each, with tanh between them; the step has copies of its own
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
    """The rank's rows of the weight."""
    shards = weight.chunk(dist.get_world_size())
    return shards[dist.get_rank()].clone() if dist.get_rank() < len(shards) else weight[:0].clone()
