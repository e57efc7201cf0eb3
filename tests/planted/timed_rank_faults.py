"""Sides for timing in two processes; they are slow or wrong on rank 1, some only after ten calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from perfsuite import Pair, Workload, floats, tensor

SLEEP_S = 0.02
"""Seconds of a sleep that is longer than the rest of a call."""


def total(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' rows."""
    found = x.sum(0)
    dist.all_reduce(found)
    return found


def late(then: Callable[[], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a correct side that, from its 11th call, first calls `then` on rank 1."""
    calls = 0

    def optimized(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 10 and dist.get_rank() == 1:
            then()
        return total(x)

    return optimized


def slow_on_one_rank(x: torch.Tensor) -> torch.Tensor:
    """Compute the sum, and sleep on rank 1."""
    found = total(x)
    if dist.get_rank() == 1:
        time.sleep(SLEEP_S)
    return found


def wrong_on_one_rank(x: torch.Tensor) -> torch.Tensor:
    """Compute the sum, with an error on rank 1."""
    return total(x) + 0.01 * dist.get_rank()


def goes_wrong() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a side that is wrong on rank 1 from its 11th call."""
    calls = 0

    def optimized(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return total(x) + 0.01 * (calls > 10 and dist.get_rank() == 1)

    return optimized


def leaves_a_setting(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    return total(x)


def raises() -> None:
    raise ValueError("no gradient here")


def hangs() -> None:
    time.sleep(600)


SIDES = {
    "slow": slow_on_one_rank,
    "wrong": wrong_on_one_rank,
    "goes_wrong": goes_wrong(),
    "leaves_a_setting": leaves_a_setting,
    "raises": late(raises),
    "dies": late(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "hangs": late(hangs),
}

totals = {
    name: Pair(
        reference=total,
        optimized=optimized,
        inputs={"x": tensor("ranks * rows", "n", values=floats(-2, 2), by_rank=0)},
        gradients=False,
        ranks=(2,),
        workloads=[Workload("w", ranks=2, rows=8, n=16, clock="wall")],
    )
    for name, optimized in SIDES.items()
}
