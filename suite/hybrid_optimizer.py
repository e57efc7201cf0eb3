"""Two optimizers that share the parameters of a network: one for the matrices, and one for all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Make = Callable[[list[torch.Tensor]], Any]
"""Parameters → a step that takes their gradients, with `state_dict` and `load_state_dict`."""


class Hybrid:
    """Update the tensors of two dimensions by Muon and the others by AdamW.

    Each side of the pair passes its own implementations of the two.
    """

    def __init__(self, params: Sequence[torch.Tensor], muon: Make, adamw: Make) -> None:
        self.count = len(params)
        self.matrices = [i for i, p in enumerate(params) if p.dim() == 2]
        self.others = [i for i, p in enumerate(params) if p.dim() != 2]
        self.muon = muon([params[i] for i in self.matrices])
        self.adamw = adamw([params[i] for i in self.others])

    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        """Make a step. ValueError where there is not one gradient for each parameter."""
        if len(grads) != self.count:
            raise ValueError(f"{len(grads)} gradients for {self.count} parameters; give one for each")
        self.muon([grads[i] for i in self.matrices])
        self.adamw([grads[i] for i in self.others])

    def state_dict(self) -> dict[str, Any]:
        """Return copies of both optimizers' states, in a form that both sides of the pair read."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, by copying."""
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
