"""An optimizer that updates a network's matrices by Muon and all other parameters by AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Make = Callable[[list[torch.Tensor]], Any]
"""Parameters → step function of their gradients, with `state_dict` and `load_state_dict`."""


class Hybrid:
    """Update two-dimensional parameters by Muon and the others by AdamW.

    Each side of the pair passes its own implementations of both.
    """

    def __init__(self, params: Sequence[torch.Tensor], muon: Make, adamw: Make) -> None:
        self.count = len(params)
        self.matrices = [i for i, p in enumerate(params) if p.dim() == 2]
        self.others = [i for i, p in enumerate(params) if p.dim() != 2]
        self.muon = muon([params[i] for i in self.matrices])
        self.adamw = adamw([params[i] for i in self.others])

    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        """Perform one step. ValueError unless there is one gradient per parameter."""
        if len(grads) != self.count:
            raise ValueError(f"{len(grads)} gradients for {self.count} parameters; give one for each")
        self.muon([grads[i] for i in self.matrices])
        self.adamw([grads[i] for i in self.others])

    def state_dict(self) -> dict[str, Any]:
        """Return copies of both optimizers' states, in a format that both sides of the pair can load."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a state into both optimizers."""
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
