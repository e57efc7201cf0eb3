"""One-cycle learning rate, computed step by step (eigenstate_lm, technique 004.5)."""

import math

import torch

WARM_UP, START, END = 0.1, 25.0, 1e4


def one_cycle(steps: torch.Tensor, total_steps: int, max_lr: float) -> torch.Tensor:
    """Return the learning rate of each step, float64 [N].

    The rate rises to `max_lr` over the first tenth of the steps, then falls to almost 0. Both curves are cosines.
    It begins at `max_lr / 25` and ends at `max_lr / 250,000`.

    steps        int64 [N], from 0, below `total_steps`
    total_steps  more than 10, else ValueError

    Source: eigenstate_lm, technique 004.5.
    """
    if total_steps <= 1 / WARM_UP:
        raise ValueError(f"total_steps={total_steps}: warming up over a tenth takes more than {1 / WARM_UP:.0f}")
    top = WARM_UP * total_steps - 1
    first, last = max_lr / START, max_lr / START / END
    rates = []
    for step in steps.tolist():
        if step <= top:
            begin, end, share = first, max_lr, step / top
        else:
            begin, end, share = max_lr, last, (step - top) / (total_steps - 1 - top)
        rates.append(end + (begin - end) * (1 + math.cos(math.pi * share)) / 2)
    return torch.tensor(rates, dtype=torch.float64, device=steps.device)
