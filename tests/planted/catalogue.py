"""Planted faults, which must be rejected by name, and honest look-alikes, which must not be.

Each is a pair whose optimized side has the fault, or resembles it. The tests run the pair's proofs, or
`perfsuite.measure` for faults that show only while they are timed. There the clock is simulated (`Time`), so that no
verdict depends on the machine's speed; faults marked `gpu` run on a real GPU, with its own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from perfsuite import Pair, Workload, floats, tensor

Call = Callable[..., Any]

NUMBERS = range(1, 59)
"""Numbers of all faults in the catalogue."""
X = {"x": tensor("m", "n", values=floats(-4, 4))}
SIZES = {"m": 23, "n": 37}


class Time:
    """Clock that planted sides advance, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds * 1e9


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One pair: a fault of the catalogue, with the words that its rejection must contain, or an honest look-alike."""

    number: int
    name: str
    make: Callable[[Time], Pair]
    says: tuple[str, ...] = ()
    timed: bool = False
    gpu: bool = False
    stage: str = ""
    """The only proof to run, because the others would take long; empty for all proofs."""
    device: str = ""
    """The only device on which it is a fault; empty for every device."""

    def __str__(self) -> str:
        return f"{self.number:02}-{self.name.replace(' ', '_')}"


FAULTS: list[Planted] = []
HONEST: list[Planted] = []


def fault(
    number: int, name: str, *says: str, timed: bool = False, gpu: bool = False, stage: str = "", device: str = ""
) -> Callable[[Any], Any]:
    """Register a factory of pairs as a fault; its rejection must contain each of `says`."""

    def register(make: Callable[[Time], Pair]) -> Callable[[Time], Pair]:
        kind: dict[str, Any] = {"timed": timed, "gpu": gpu, "stage": stage, "device": device}
        FAULTS.append(Planted(number=number, name=name, make=make, says=says, **kind))
        return make

    return register


def honest(number: int, name: str, *, timed: bool = False, gpu: bool = False) -> Callable[[Any], Any]:
    """Register a factory of pairs as the honest look-alike of a fault."""

    def register(make: Callable[[Time], Pair]) -> Callable[[Time], Pair]:
        HONEST.append(Planted(number=number, name=name, make=make, timed=timed, gpu=gpu))
        return make

    return register


def wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * torch.exp(x / 4)


def fast(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x * 0.25).mul_(x.sin())


def pair(optimized: Any, *, reference: Any = wave, inputs: Any = X, **fields: Any) -> Pair:
    """Return a pair with this optimized side; the reference is `wave` by default, and gradients are off."""
    made = {"gradients": False, "name": "planted", "workloads": [Workload("w", **SIZES, clock="wall")]}
    return Pair(reference=reference, optimized=optimized, inputs=inputs, **{**made, **fields})


def lasting(time: Time, seconds: float, call: Call) -> Call:
    """Return a function that calls `call` and takes `seconds` on the test's clock."""

    def timed(*args: Any) -> Any:
        time.spend(seconds)
        return call(*args)

    return timed


def timed_pair(time: Time, optimized: Any, **fields: Any) -> Pair:
    """Return a pair whose reference takes 6 ms on the test's clock; the optimized side must advance the clock."""
    return pair(optimized, reference=lasting(time, 6e-3, wave), **fields)
