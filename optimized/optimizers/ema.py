"""Exponential moving average of all weights in one foreach operation (ups)."""

from collections.abc import Callable, Sequence

import torch


def ema(averages: Sequence[torch.Tensor], decay: float = 0.999) -> Callable[[Sequence[torch.Tensor]], None]:
    """Build `step(params)`, which moves each average towards its parameter: `a += (1 - decay) * (p - a)`.

    averages  tensors of any shapes, changed in place; initially copies of the parameters
    params    one for each average, of its shape and any dtype; another number of them raises ValueError

    Source: ups, the averaged weights of its operator.
    """
    averages = list(averages)

    @torch.no_grad()
    def step(params: Sequence[torch.Tensor]) -> None:
        if len(params) != len(averages):
            raise ValueError(f"{len(params)} parameters for {len(averages)} averages; give one for each")
        if averages:
            own = [p.to(average.dtype) for p, average in zip(params, averages, strict=True)]
            torch._foreach_lerp_(averages, own, 1 - decay)

    return step
