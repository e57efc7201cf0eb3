"""Loss scaling for float16, decided by the host, with the rules of `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from suite.scaling import scaling_for


class LossScale:
    """Factor that a loss is multiplied by: 65536 at first in float16, and always 1 in every other precision.

    It doubles after 2000 consecutive steps without an infinite or NaN gradient, and halves after a step with one.
    """

    def __init__(self, *, float16: bool) -> None:
        self._scaling = scaling_for(float16=float16)
        self.active = float16
        self.value, self.growth = self._scaling.init_scale, 0

    @torch.no_grad()
    def undo(self, grads: Sequence[torch.Tensor]) -> bool:
        """Divide gradients of a scaled loss by the scale, in place; return whether they are finite.

        In float16 the host waits for the device. In any other precision nothing is done, and the result is True.
        """
        if not self.active:
            return True
        own = [g for g in grads if g.numel()]  # a rank may have no part of a sharded weight with few rows
        if not own:
            return True
        torch._foreach_div_(own, self.value)
        norms = torch.stack(torch._foreach_norm(own, float("inf")))
        return bool(norms.isfinite().all())

    def update(self, *, finite: bool) -> None:
        """Update the scale after a step."""
        if not self.active:
            return
        self.growth = self.growth + 1 if finite else 0
        if not finite:
            self.value *= self._scaling.backoff_factor
        elif self.growth == self._scaling.growth_interval:
            self.value *= self._scaling.growth_factor
            self.growth = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the number of steps towards its growth."""
        return {"scale": self.value, "growth": self.growth}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; in a precision without a scale it stays 1."""
        if self.active:
            self.value, self.growth = float(state["scale"]), int(state["growth"])
