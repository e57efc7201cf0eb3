"""Muon and AdamW on sharded parameters (ups, techniques 002.7 and 002.8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from optimized.memory.cpu_offload_optimizer import cpu_offload_optimizer, host_buffer
from optimized.optimizers.fused_adamw import adamw
from optimized.optimizers.muon import MOMENTUM, orthogonalized, places_by_shape
from optimized.shards import Shards


class ShardedHybrid:
    """`hybrid_muon_adamw` with a state that is sharded like the parameters.

    Momenta and AdamW's moments are elementwise, so each rank keeps those of its parts. Muon orthogonalizes whole
    matrices: the updates are gathered from all ranks, and each rank orthogonalizes all of them and keeps its parts.

    params   this rank's parts, changed in place
    shapes   shapes of the whole parameters
    dtype    dtype in which Muon orthogonalizes float32 matrices
    offload  keep the state in host memory: AdamW then runs on the CPU, and momenta are copied for each step
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        shapes: Sequence[torch.Size],
        shards: Shards,
        lr: float = 1.4e-3,
        weight_decay: float = 0.03,
        dtype: torch.dtype = torch.bfloat16,
        *,
        offload: bool = False,
    ) -> None:
        self.device = params[0].device
        self.shards, self.lr, self.weight_decay, self.dtype = shards, lr, weight_decay, dtype
        self.matrices = [i for i, shape in enumerate(shapes) if len(shape) == 2]
        self.others = [i for i, shape in enumerate(shapes) if len(shape) != 2]
        self.params = [params[i] for i in self.matrices]
        self.shapes = [shapes[i] for i in self.matrices]
        self.other_shapes = [shapes[i] for i in self.others]
        self.momenta = [host_buffer(p, p.dtype).zero_() if offload else torch.zeros_like(p) for p in self.params]
        make = cpu_offload_optimizer if offload else adamw
        self.adamw = make([params[i] for i in self.others], lr, weight_decay=weight_decay)

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        """Run a step, with one gradient for each part, of its shape."""
        own = [grads[i] for i in self.matrices]
        if own:
            self._muon(own)
        self.adamw([grads[i] for i in self.others])

    def _muon(self, own: list[torch.Tensor]) -> None:
        momenta = self._on_device()
        torch._foreach_lerp_(momenta, own, 1 - MOMENTUM)
        updates = torch._foreach_lerp(own, momenta, MOMENTUM)
        for kept, momentum in zip(self.momenta, momenta, strict=True):
            if kept is not momentum:
                kept.copy_(momentum, non_blocking=True)
        low = self.dtype if own[0].dtype == torch.float32 else own[0].dtype
        whole = self.shards.whole([u.to(low) for u in updates], self.shapes)
        torch._foreach_mul_(self.params, 1 - self.lr * self.weight_decay)
        for at in places_by_shape(whole):
            rows, columns = self.shapes[at[0]]
            rate = self.lr * max(1.0, rows / columns) ** 0.5
            turned = orthogonalized(torch.stack([whole[i] for i in at]))
            for i, update in zip(at, turned, strict=True):
                self.params[i].add_(self.shards.part(update), alpha=-rate)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, in the form of `hybrid_muon_adamw`. All ranks must call it."""
        moments = self.adamw.state_dict()
        for name in ("first", "second"):
            there = [m.to(self.device) for m in moments[name]]
            moments[name] = self.shards.whole(there, self.other_shapes)
        return {"muon": {"momenta": self.shards.whole(self._on_device(), self.shapes)}, "adamw": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's parts of a whole state, by copying."""
        if self.device.type == "cuda":  # wait for the last copies to host memory
            torch.cuda.synchronize(self.device)
        for own, given in zip(self.momenta, state["muon"]["momenta"], strict=True):
            own.copy_(self.shards.part(given))
        moments = dict(state["adamw"])
        for name in ("first", "second"):
            moments[name] = [self.shards.part(given) for given in moments[name]]
        self.adamw.load_state_dict(moments)

    def _on_device(self) -> list[torch.Tensor]:
        """Return the momenta on the device; those in host memory are copied."""
        return [m.to(self.device, non_blocking=True) for m in self.momenta]
