"""Exponential moving average of the weights, one tensor at a time (ups)."""

from collections.abc import Callable, Sequence

import torch


def ema(averages: Sequence[torch.Tensor], decay: float = 0.999) -> Callable[[Sequence[torch.Tensor]], None]:
    """Build `step(params)`, which moves each average towards its parameter: `a = decay * a + (1 - decay) * p`.

    averages  tensors of any shapes, changed in place; initially copies of the parameters
    params    one for each average, of its shape and any dtype; another number of them raises ValueError

    Source: ups, the averaged weights of its operator.
    """

    @torch.no_grad()
    def step(params: Sequence[torch.Tensor]) -> None:
        for average, p in list(zip(averages, params, strict=True)):  # raises before anything is changed
            average.copy_(decay * average + (1 - decay) * p)

    return step
