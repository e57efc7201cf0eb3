"""Loss scaling for half precision: the parameters that both implementations of the scaler's step share."""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.errors import PerfsuiteError

NEVER = 2**31 - 1
"""A `growth_interval` longer than any run, so that the scale never grows."""
CLIP_EPS = 1e-6
"""Added to the norm, as in torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Arguments of `torch.amp.GradScaler`; PerfsuiteError if a value is out of range."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    """Factor after `growth_interval` consecutive steps without infinity or NaN."""
    backoff_factor: float = 0.5
    """Factor after a step with infinity or NaN."""
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
    """Return torch's default scaling for float16, otherwise a scale of 1 that never grows."""
    return Scaling() if float16 else Scaling(init_scale=1.0, growth_interval=NEVER)
