"""A learning rate that rises and falls, looked up on the device (eigenstate_lm, technique 004.5)."""

import functools

import torch

WARM_UP = 0.1


def one_cycle(steps: torch.Tensor, total_steps: int, max_lr: float) -> torch.Tensor:
    """The rate of each step, float64 [N]: up a cosine to `max_lr` over the first tenth, and down to almost nothing.

    torch's OneCycleLR, run through once on the host; from then on a table on the device, so that a step counted there
    finds its rate without the host, within a CUDA graph too.

    steps        int64 [N], from 0, below `total_steps`
    total_steps  more than 10

    ValueError for fewer.

    Source: eigenstate_lm, technique 004.5.
    """
    return _table(total_steps, max_lr, steps.device)[steps]


@functools.lru_cache(maxsize=8)
def _table(total_steps: int, max_lr: float, device: torch.device) -> torch.Tensor:
    if total_steps <= 1 / WARM_UP:
        raise ValueError(f"total_steps={total_steps}: warming up over a tenth takes more than {1 / WARM_UP:.0f}")
    optimizer = torch.optim.SGD([torch.zeros(())], lr=max_lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr, total_steps=total_steps, pct_start=WARM_UP, anneal_strategy="cos", cycle_momentum=False
    )
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(rates) < total_steps:
            schedule.step()
    return torch.tensor(rates, dtype=torch.float64, device=device)
