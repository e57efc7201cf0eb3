"""How a loss is scaled for half precision: the numbers that both sides of the scaler's step share."""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.errors import PerfsuiteError

NEVER = 2**31 - 1
"""More steps than are ever made: a scale of 1 never grows."""
CLIP_EPS = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds it to the norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """As `torch.amp.GradScaler` has them; PerfsuiteError for what would not scale."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    """After `growth_interval` steps in a row without an infinity or NaN."""
    backoff_factor: float = 0.5
    """After a step with one."""
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        for name, right, remedy in (
            ("init_scale", self.init_scale > 0, "give more than 0, e.g. 65536"),
            ("growth_factor", self.growth_factor > 1, "give more than 1, e.g. 2"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "give more than 0 and less than 1, e.g. 0.5"),
            ("growth_interval", self.growth_interval >= 1, "give 1 or more, e.g. 2000"),
        ):
            if not right:
                raise PerfsuiteError(f"{name}: {getattr(self, name)} is out of range; {remedy}")


def scaling_for(*, float16: bool) -> Scaling:
    """As float16 wants it, and by 1 elsewhere."""
    return Scaling() if float16 else Scaling(init_scale=1.0, growth_interval=NEVER)
