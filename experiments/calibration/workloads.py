"""The kinds of pair that are calibrated, each with an optimized side that can do a given share more work.

This module is imported twice in a measuring process: the second import supplies the accepted side, as the gate imports
the accepted revision in addition to the current one.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

Call = Callable[..., Any]
Timer = Callable[[Call], float]
"""Seconds of one call, on the kind's clock."""

ROUNDS = 60
"""Interleaved samples to calibrate a wait: their median is accurate to a tenth of the smallest planted share."""
PROBES = (0.02, 0.06)
"""Lengths of the waits that are timed to calibrate waits, as shares of the call."""


class Kind(ABC):
    """One kind of pair: a reference, and an optimized side that can do a share `extra` more work."""

    name: str
    clock: str
    n: Mapping[str, int]
    """Size of the inputs by type of device."""

    @abstractmethod
    def inputs(self, device: str, most: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return inputs that are large enough for the share `most` of extra work."""

    @abstractmethod
    def reference(self, device: str) -> Call:
        """Return the reference, a slower implementation of the same work."""

    @abstractmethod
    def optimized(self, device: str, extra: float, planting: Mapping[str, float]) -> Call:
        """Return the optimized side with the share `extra` more work; `planting` is the result of `calibrate`."""

    @abstractmethod
    def launches(self, side: float | None) -> int:
        """Return the number of kernels that one call launches. `side` is the share of extra work; None stands for the
        reference."""

    def calibrate(self, device: str, call: Call, timed: Timer) -> dict[str, float]:
        """Return the figures that planting needs on this device; empty if the work itself can be increased in small
        steps.

        `call` runs the side without extra work.
        """
        return {}


class Memory(Kind):
    """Doubling of all elements of a large vector, in Triton on a GPU if installed; extra work is more elements."""

    name, clock = "memory", "device"
    n: Mapping[str, int] = {"cuda": 1 << 26, "cpu": 1 << 19}

    def inputs(self, device: str, most: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.rand(self._elements(device, most), generator=generator, device=device)
        return {"x": x, "y": torch.zeros_like(x)}

    def reference(self, device: str) -> Call:
        k = self._elements(device, 0.0)

        def call(x: torch.Tensor, y: torch.Tensor) -> None:
            torch.add(x[:k], x[:k], out=y[:k])
            y[:k].mul_(1.0)

        return call

    def optimized(self, device: str, extra: float, planting: Mapping[str, float]) -> Call:
        k = self._elements(device, extra)
        twice = _twice() if _type(device) == "cuda" and importlib.util.find_spec("triton") else None

        def in_torch(x: torch.Tensor, y: torch.Tensor) -> None:
            torch.mul(x[:k], 2.0, out=y[:k])

        def in_triton(x: torch.Tensor, y: torch.Tensor) -> None:
            assert twice is not None
            twice(x, y, k)

        return in_torch if twice is None else in_triton

    def launches(self, side: float | None) -> int:
        return 2 if side is None else 1

    def _elements(self, device: str, extra: float) -> int:
        # A multiple of 64: a ragged end would take another path through the kernel.
        return round(self.n[_type(device)] * (1 + extra) / 64) * 64


class Matmul(Kind):
    """A large matrix product; extra work is a wait after it, on the device.

    Extra rows would not do, because a product's time rises in steps of whole waves of tiles.
    """

    name, clock = "matmul", "device"
    n: Mapping[str, int] = {"cuda": 8192, "cpu": 384}

    def inputs(self, device: str, most: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        n, dtype = self.n[_type(device)], torch.bfloat16 if _type(device) == "cuda" else torch.float32
        a, b = (torch.randn(n, n, generator=generator, device=device).to(dtype) for _ in range(2))
        return {"a": a, "b": b, "c": torch.zeros_like(a)}

    def reference(self, device: str) -> Call:
        h = self.n[_type(device)] // 2

        def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
            torch.mm(a[:, :h], b[:h], out=c)
            c.addmm_(a[:, h:], b[h:])

        return call

    def optimized(self, device: str, extra: float, planting: Mapping[str, float]) -> Call:
        wait = _wait(device, extra, planting)

        def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
            torch.mm(a, b, out=c)
            if wait is not None:
                wait()

        return call

    def launches(self, side: float | None) -> int:
        return 1 if side == 0 else 2

    def calibrate(self, device: str, call: Call, timed: Timer) -> dict[str, float]:
        return _spin(call, timed) if _type(device) == "cuda" else _busy(call, timed)


class Launch(Kind):
    """20 tiny kernels on the wall clock, bound by the host; extra work is a busy wait of the host."""

    name, clock = "launch", "wall"
    n: Mapping[str, int] = {"cuda": 4096, "cpu": 4096}
    kernels = 20

    def inputs(self, device: str, most: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.rand(self.n[_type(device)], generator=generator, device=device)
        return {"x": x, "y": torch.zeros_like(x)}

    def reference(self, device: str) -> Call:
        return self._calls(2 * self.kernels, None)

    def optimized(self, device: str, extra: float, planting: Mapping[str, float]) -> Call:
        # The wait is on the host, with a CPU and a GPU alike: it delays the launches.
        return self._calls(self.kernels, _wait("cpu", extra, planting))

    def _calls(self, kernels: int, wait: Callable[[], None] | None) -> Call:
        def call(x: torch.Tensor, y: torch.Tensor) -> None:
            if wait is not None:
                wait()
            for _ in range(kernels):
                torch.mul(x, 2.0, out=y)

        return call

    def launches(self, side: float | None) -> int:
        return 2 * self.kernels if side is None else self.kernels

    def calibrate(self, device: str, call: Call, timed: Timer) -> dict[str, float]:
        return _busy(call, timed)


class Kernels(Kind):
    """200 small kernels a call; extra work is more kernels."""

    name, clock = "kernels", "device"
    n: Mapping[str, int] = {"cuda": 1 << 16, "cpu": 256}
    kernels = 200

    def inputs(self, device: str, most: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.rand(self.n[_type(device)], generator=generator, device=device)
        return {"x": x, "y": torch.zeros_like(x)}

    def reference(self, device: str) -> Call:
        return self._calls(2 * self.kernels)

    def optimized(self, device: str, extra: float, planting: Mapping[str, float]) -> Call:
        return self._calls(self.launches(extra))

    def _calls(self, kernels: int) -> Call:
        def call(x: torch.Tensor, y: torch.Tensor) -> None:
            for _ in range(kernels):
                torch.mul(x, 2.0, out=y)

        return call

    def launches(self, side: float | None) -> int:
        return 2 * self.kernels if side is None else round(self.kernels * (1 + side))


KINDS: Mapping[str, Kind] = {k.name: k for k in (Memory(), Matmul(), Launch(), Kernels())}


def _type(device: str) -> str:
    return torch.device(device).type


@cache
def _twice() -> Call:
    """Return this import's own copy of the Triton kernel. The two imports share torch's kernels only."""
    path = Path(__file__).with_name("kernels.py")
    spec = importlib.util.spec_from_file_location(f"{__name__}_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    twice: Call = module.twice
    return twice


# --- planted waits ---------------------------------------------------------------------------------------------------


def _wait(device: str, extra: float, planting: Mapping[str, float]) -> Callable[[], None] | None:
    """Return a wait as long as the share `extra` of the calibrated call; None for no extra work."""
    if extra == 0:
        return None
    seconds = max(extra * planting["seconds"] - planting["overhead_s"], 0.0)
    if _type(device) == "cuda":
        cycles, sleep = int(seconds * planting["cycles_per_s"]), _sleep()
        return lambda: sleep(cycles)
    ns = int(seconds * 1e9)

    def busy() -> None:
        end = perf_counter_ns() + ns
        while perf_counter_ns() < end:
            pass

    return busy


def _sleep() -> Callable[[int], None]:
    sleep: Callable[[int], None] = getattr(torch.cuda, "_sleep")  # noqa: B009 - private, and untyped
    return sleep


def _busy(call: Call, timed: Timer) -> dict[str, float]:
    """Return the call's seconds, and by how many seconds a busy wait of the host takes longer than asked."""
    seconds = statistics.median(timed(call) for _ in range(ROUNDS))
    asked = 2e-6
    wait = _wait("cpu", 1.0, {"seconds": asked, "overhead_s": 0.0})
    assert wait is not None
    took = []
    for _ in range(50 * ROUNDS):
        start = perf_counter_ns()
        wait()
        took.append(perf_counter_ns() - start)
    return {"seconds": seconds, "overhead_s": max(statistics.median(took) * 1e-9 - asked, 0.0)}


def _spin(call: Call, timed: Timer) -> dict[str, float]:
    """Return the call's seconds, and from a line through two waits after it: the cycles per second, and the fixed
    seconds of a wait."""
    sleep = _sleep()
    seconds = min(timed(call) for _ in range(5))
    # A first guess of the rate gives two waits; the line goes through their times.
    guess = 1_000_000 / max(timed(lambda: sleep(1_000_000)), 1e-9)
    short, long = (int(share * seconds * guess) for share in PROBES)

    def waits(cycles: int) -> Call:
        def both() -> None:
            call()
            sleep(cycles)

        return both

    turns = {0: call, short: waits(short), long: waits(long)}
    times: dict[int, list[float]] = {c: [] for c in turns}
    for _ in range(ROUNDS):
        for cycles, turn in turns.items():
            times[cycles].append(timed(turn))
    alone = statistics.median(times[0])
    # Differences within each round, because the clock frequency falls as the device heats up.
    steps = [b - a for a, b in zip(times[short], times[long], strict=True)]
    step = statistics.median(steps)
    rate = (long - short) / step if step > 0 else guess
    gaps = [a - b for a, b in zip(times[short], times[0], strict=True)]
    overhead = statistics.median(gaps) - short / rate
    return {"seconds": alone, "cycles_per_s": rate, "overhead_s": max(overhead, 0.0)}
