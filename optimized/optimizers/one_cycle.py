"""One-cycle learning rate, looked up in a table on the device (eigenstate_lm, technique 004.5)."""

import functools

import torch

WARM_UP = 0.1


def one_cycle(steps: torch.Tensor, total_steps: int, max_lr: float) -> torch.Tensor:
    """Return the learning rate of each step, float64 [N].

    The rate rises to `max_lr` over the first tenth of the steps, then falls to almost 0. Both curves are cosines.

    torch's OneCycleLR runs once on the host and fills a table on the device. A step that is counted on the device then
    finds its rate without the host, also within a CUDA graph.

    steps        int64 [N], from 0, below `total_steps`
    total_steps  more than 10, else ValueError

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
