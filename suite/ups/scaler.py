"""Loss scaling for float16 on the host, with the rules of `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from suite.scaling import scaling_for


class LossScale:
    """The factor by which a loss is multiplied. It starts at 65536 in float16 and is always 1 in other precisions.

    It doubles after 2000 consecutive steps with finite gradients, and halves after a step with a non-finite gradient.
    """

    def __init__(self, *, float16: bool) -> None:
        self._scaling = scaling_for(float16=float16)
        self.active = float16
        self.value, self.growth = self._scaling.init_scale, 0

    @torch.no_grad()
    def undo(self, grads: Sequence[torch.Tensor]) -> bool:
        """Divide the gradients of a scaled loss by the scale, in place; return whether all are finite.

        In float16, the host waits for the device. In other precisions, the function only returns True.
        """
        if not self.active:
            return True
        own = [g for g in grads if g.numel()]  # a rank may have an empty shard of a weight with few rows
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
        """Return the scale and the number of consecutive finite steps."""
        return {"scale": self.value, "growth": self.growth}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. In a precision other than float16, the scale stays 1."""
        if self.active:
            self.value, self.growth = float(state["scale"]), int(state["growth"])
