"""Muon and AdamW, with each rank updating a share of the weights (ups, techniques 002.7 and 002.8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optimized.flat_gradients import FlatGradients

MOMENTS = ("first", "second")


class SharedHybrid:
    """`hybrid_muon_adamw` on the weights that this rank owns. Each rank has only the state of its own weights.

    weights    all weights of the group
    gradients  gradients of the group, which assign each weight to a rank
    name       name of the group
    make       weights → the optimizer of these weights
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        gradients: FlatGradients,
        name: str,
        make: Callable[[list[torch.Tensor]], Any],
    ) -> None:
        self.gradients, self.name = gradients, name
        self.own = gradients.owned(name)
        self.matrices = [i for i, w in enumerate(weights) if w.dim() == 2]
        self.others = [i for i, w in enumerate(weights) if w.dim() != 2]
        self.optimizer = make([weights[i] for i in self.own])

    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        """Update this rank's weights with their gradients, and start to send them to the other ranks."""
        self.optimizer(grads)
        self.gradients.send(self.name)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, in the form of `hybrid_muon_adamw`. All ranks must call it."""
        own = self.optimizer.state_dict()
        momenta, moments = own["muon"]["momenta"], dict(own["adamw"])
        for name in MOMENTS:
            moments[name] = self._whole(moments[name], self.others)
        return {"muon": {"momenta": self._whole(momenta, self.matrices)}, "adamw": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole state, by copying."""
        moments = dict(state["adamw"])
        for name in MOMENTS:
            moments[name] = self._part(moments[name], self.others)
        momenta = self._part(state["muon"]["momenta"], self.matrices)
        self.optimizer.load_state_dict({"muon": {"momenta": momenta}, "adamw": moments})

    def _whole(self, tensors: Sequence[torch.Tensor], places: Sequence[int]) -> list[torch.Tensor]:
        """Gather the tensors of the weights with these indices. `tensors` holds those of this rank's weights."""
        own = [place for place in places if place in self.own]
        found = self.gradients.gathered(self.name, dict(zip(own, tensors, strict=True)))
        return [found[place] for place in places]

    def _part(self, tensors: Sequence[torch.Tensor], places: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensors of this rank's weights, from those of all weights with these indices."""
        return [tensor for place, tensor in zip(places, tensors, strict=True) if place in self.own]
