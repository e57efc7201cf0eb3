"""A small network with weights and optimizer state sharded over the ranks, for tests of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Tensors that AdamW keeps per parameter, in addition to the number of steps."""


class ShardedNetwork:
    """Linear layers sharded by `fully_shard`, with an AdamW optimizer.

    The optimizer's state exists from the start, so a saved state can be loaded into it. `step` works only on the local
    shards, since the harness does not track operations on DTensors.

    weights  weights of the layers, each [out, in], the same on every rank; the network copies them
    """

    def __init__(self, weights: Sequence[torch.Tensor], lr: float = 0.1) -> None:
        # Without a device type, the mesh would use GPUs if there are any, even for weights on the CPU.
        mesh = init_device_mesh(weights[0].device.type, (dist.get_world_size(),))
        layers: list[torch.nn.Module] = []
        for weight in weights:
            layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            layer.weight = torch.nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
            fully_shard(layer, mesh=mesh)
            layers.append(layer)
        self.model = torch.nn.Sequential(*layers)
        fully_shard(self.model, mesh=mesh)
        self.lr = lr
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        for p in self.model.parameters():
            assert isinstance(p, DTensor)
            moments = {key: torch.zeros_like(p.to_local().detach()) for key in MOMENTS}
            self.optimizer.state[p] = {
                "step": torch.tensor(0.0),
                **{key: _sharded_as(p, local) for key, local in moments.items()},
            }

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Perform one Adam step. Every rank has the full gradients and updates its own shards."""
        beta1, beta2 = 0.9, 0.999
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            assert isinstance(p, DTensor)
            state = self.optimizer.state[p]
            state["step"] += 1
            own, shard = p.to_local().detach(), shard_of(gradient)
            first, second = (state[key].to_local() for key in MOMENTS)
            first.mul_(beta1).add_((1 - beta1) * shard)
            second.mul_(beta2).add_((1 - beta2) * shard * shard)
            corrected = (second / (1 - beta2 ** state["step"].item())).sqrt()
            own.sub_(self.lr * first / (1 - beta1 ** state["step"].item()) / (corrected + 1e-8))

    def shards(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's rows of each weight and its moments, and each weight's number of steps.

        Rows are divided as by `torch.chunk`: with fewer rows than ranks, the last ranks have none.
        """
        found: dict[str, torch.Tensor] = {}
        for name, p in self.model.named_parameters():
            state = self.optimizer.state[p]
            found |= {name: _local(p)} | {f"{key} of {name}": _local(state[key]) for key in MOMENTS}
            found[f"steps of {name}"] = torch.tensor(int(state["step"]))
        return found


def shard_of(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a tensor."""
    shards, rank = whole.chunk(dist.get_world_size()), dist.get_rank()
    return shards[rank] if rank < len(shards) else whole[:0]


def _sharded_as(p: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
