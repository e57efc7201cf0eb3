"""Parameters and gradients that FSDP2 shards, for a training loop (ups, technique 002.7)."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from optimized.over_ranks import agreed
from optimized.shards import Shards


class ShardedGradients:
    """Sharded gradients of named groups of modules, summed over a step's micro-batches and averaged over the ranks.

    The training loop uses it in place of `FlatGradients`. The parameters of a module are all-gathered before its
    forward and stay whole until its backward has ended. One reduce-scatter then reduces and shards its gradients.

    groups  name → modules, which the constructor shards in place
    """

    def __init__(self, groups: Mapping[str, Sequence[torch.nn.Module]], shards: Shards) -> None:
        self.ranks = shards.ranks
        self.modules: dict[str, list[FSDPModule]] = {}
        self.params: dict[str, list[torch.nn.Parameter]] = {}
        self._loss: torch.Tensor | None = None
        self._is_quiet = False
        first = next(p for modules in groups.values() for module in modules for p in module.parameters())
        # The default mesh uses GPUs if there are any, even if the weights are on the CPU.
        mesh = init_device_mesh(first.device.type, (shards.ranks,))
        for name, modules in groups.items():
            self.modules[name] = [fully_shard(m, mesh=mesh, reshard_after_forward=False) for m in modules]
            self.params[name] = [p for module in modules for p in module.parameters()]

    def weights(self, name: str) -> list[torch.Tensor]:
        """Return this rank's parts of a group's parameters, in the modules' own memory."""
        return [_part(p.detach()) for p in self.params[name]]

    def backward(self, loss: torch.Tensor, names: Sequence[str], last: Collection[str]) -> None:
        """Add a micro-batch's gradients to these groups; groups in `last` have no further micro-batch in the step."""
        for name in names:
            for module in self.modules[name]:
                module.set_requires_gradient_sync(name in last)
        loss.backward()

    def begin(self, name: str, number: torch.Tensor) -> None:
        """Average a number over the ranks. The last micro-batch's `backward` has already reduced the gradients."""
        if self._loss is None:
            self._loss = number / self.ranks
            dist.all_reduce(self._loss)

    def finished(self, name: str) -> list[torch.Tensor]:
        """Return this rank's parts of the group's gradients."""
        return [_part(p.grad) if p.grad is not None else torch.zeros_like(_part(p.detach())) for p in self.params[name]]

    def number(self, name: str) -> torch.Tensor:
        """Return the mean of the number over the ranks, 0-d."""
        assert self._loss is not None
        return self._loss

    def reset(self) -> None:
        """Begin a new step: drop the gradients and the number."""
        if not self._is_quiet:
            # Encoders and decoders return views. No loss changes them in place, so the warning does not apply.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
            self._is_quiet = True
        self._loss = None
        for params in self.params.values():
            for p in params:
                p.grad = None

    def agreed(self, *, finite: bool) -> bool:
        """Return whether the gradients are finite on all ranks."""
        return agreed(finite=finite)


def _part(tensor: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]  # a DTensor
    return part
