"""Muon for the matrices and AdamW for the other parameters, one after the other (ups, technique 002.8)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reference.optimizers.fused_adamw import adamw
from reference.optimizers.muon import muon


def hybrid_muon_adamw(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> "HybridMuonAdamW":
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    Tensors of two dimensions are Muon's; biases, norms and what has more dimensions are AdamW's. Both have the same
    learning rate and weight decay.

    params  tensors of any shapes, changed in place
    dtype   what Muon orthogonalizes float32 matrices in
    grads   one for each parameter, of its shape

    Source: ups, technique 002.8.
    """
    return HybridMuonAdamW(params, lr, weight_decay, dtype)


class HybridMuonAdamW:
    """The step of `hybrid_muon_adamw`, and its state."""

    def __init__(self, params: Sequence[torch.Tensor], lr: float, weight_decay: float, dtype: torch.dtype) -> None:
        self.count = len(params)
        self.matrices = [i for i, p in enumerate(params) if p.dim() == 2]
        self.others = [i for i, p in enumerate(params) if p.dim() != 2]
        self.muon = muon([params[i] for i in self.matrices], lr, weight_decay=weight_decay, dtype=dtype)
        self.adamw = adamw([params[i] for i in self.others], lr, weight_decay=weight_decay)

    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        if len(grads) != self.count:
            raise ValueError(f"{len(grads)} gradients for {self.count} parameters; give one for each")
        self.muon([grads[i] for i in self.matrices])
        self.adamw([grads[i] for i in self.others])

    def state_dict(self) -> dict[str, Any]:
        """Copies of both optimizers' states; the optimized side reads them, too."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on a state, by copying."""
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
