"""The scale of a loss in float16, decided by the host, as `torch.amp.GradScaler` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from suite.scaling import scaling_for


class LossScale:
    """What a loss is multiplied by: 65536 at first in float16, 1 and constant in every other precision.

    It is doubled after 2000 steps in a row without an infinite gradient or NaN, and halved after a step with one.
    """

    def __init__(self, *, float16: bool) -> None:
        self._scaling = scaling_for(float16=float16)
        self.active = float16
        self.value, self.growth = self._scaling.init_scale, 0

    @torch.no_grad()
    def undo(self, grads: Sequence[torch.Tensor]) -> bool:
        """Divide gradients of a scaled loss by the scale, in place; whether they are finite.

        The host waits for the device in float16. In any other precision nothing is done, and the answer is true.
        """
        if not self.active:
            return True
        own = [g for g in grads if g.numel()]  # of a sharded weight with few rows a rank may have none
        if not own:
            return True
        torch._foreach_div_(own, self.value)
        norms = torch.stack(torch._foreach_norm(own, float("inf")))
        return bool(norms.isfinite().all())

    def update(self, *, finite: bool) -> None:
        """Adapt the scale to a step."""
        if not self.active:
            return
        self.growth = self.growth + 1 if finite else 0
        if not finite:
            self.value *= self._scaling.backoff_factor
        elif self.growth == self._scaling.growth_interval:
            self.value *= self._scaling.growth_factor
            self.growth = 0

    def state_dict(self) -> dict[str, Any]:
        """The scale, and the steps towards its growth."""
        return {"scale": self.value, "growth": self.growth}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; in a precision without a scale it stays 1."""
        if self.active:
            self.value, self.growth = float(state["scale"]), int(state["growth"])
