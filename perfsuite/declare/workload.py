"""Define workloads: the sizes that are timed, their promises, and the least work that they need."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from perfsuite.errors import PairError

CLOCKS = ("device", "wall")
DIRECTIONS = ("forward", "backward", "both")
DTYPES = ("float64", "float32", "bfloat16", "float16")
CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "clock": CLOCKS,
    "direction": DIRECTIONS,
    "dtype": (None, *DTYPES),
    "device": (None, "cpu", "cuda"),
}
"""Argument of a workload → the values that it may have."""
TF32 = "tf32"
"""Precision of matrix products only: no tensor has this dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promises:
    """Promises of a workload, which the gate tests: a speedup over the reference, a throughput, and bounds on the
    counts of one call."""

    speedup: float | None = None
    throughput: Mapping[str, float] = field(default_factory=dict)
    """Items per second, by the device's slug. Other devices have no such promise."""
    peak_bytes: int | None = None
    host_syncs: int | None = None
    launches: int | None = None


class Workload:
    """One size to time: `Workload("window64", k=6, n=8, P=8, clock="wall", speedup=20.0, host_syncs=0)`.

    clock       clock of the promise: "device" (only kernels, without launch latency) or "wall" (from the call to
                synchronised completion)
    direction   "forward", "backward" or "both"
    device      restricts the workload to one kind of device, "cpu" or "cuda"; on others it is skipped with that reason
    repeat      number of consecutive calls that are timed as one, as in a training loop, for calls so short that a cold
                cache and the timer's overhead would dominate; figures are still per call
    ranks       number of torch.distributed processes that call the sides together, each on its own device
                (docs/ranks.md)
    margin      relative slowdown that matters, e.g. 0.1: the gate detects this and larger slowdowns; by default, the
                smallest that the device can resolve
    throughput  promise by device, such as {"nvidia-h200": 640e3}, in items per second as counted by the pair's `Cost`
    sizes       sizes and scalar inputs whose names are parameters of this class; others are given as keywords
    marks       pytest marks, e.g. `pytest.mark.skipif(…)`
    """

    __slots__ = (
        "clock",
        "device",
        "direction",
        "dtype",
        "margin",
        "marks",
        "name",
        "promises",
        "ranks",
        "repeat",
        "sizes",
    )

    def __init__(
        self,
        name: str,
        *,
        clock: str = "device",
        direction: str = "forward",
        dtype: str | None = None,
        device: str | None = None,
        repeat: int = 1,
        ranks: int = 1,
        margin: float | None = None,
        speedup: float | None = None,
        throughput: Mapping[str, float] | None = None,
        peak_bytes: int | None = None,
        host_syncs: int | None = None,
        launches: int | None = None,
        sizes: Mapping[str, int | float] | None = None,
        marks: Collection[Any] = (),
        **named: int | float,
    ) -> None:
        _check_choices(name, clock=clock, direction=direction, dtype=dtype, device=device)
        counts = {"peak_bytes": peak_bytes, "host_syncs": host_syncs, "launches": launches}
        _check_promises(name, speedup, counts, throughput)
        _check_margin(name, margin)
        _check_calls(name, direction, repeat=repeat, ranks=ranks)
        self.name = name
        self.ranks = ranks
        self.margin = margin
        self.repeat = repeat
        self.clock = clock
        self.direction = direction
        self.dtype = dtype
        self.device = device
        self.promises = Promises(
            speedup=speedup,
            throughput={device: float(rate) for device, rate in (throughput or {}).items()},
            peak_bytes=peak_bytes,
            host_syncs=host_syncs,
            launches=launches,
        )
        self.sizes = {**(sizes or {}), **named}
        self.marks = tuple(marks)

    @property
    def described(self) -> dict[str, int | float]:
        """Sizes as shown in records and tables: with the numbers of repeats and processes, if above 1."""
        found = dict(self.sizes)
        for name, count in (("repeat", self.repeat), ("ranks", self.ranks)):
            if count > 1:
                found[name if found.get(name, count) == count else f"Workload.{name}"] = count
        return found

    def with_sizes(self, **sizes: int | float) -> Workload:
        """Return the same workload with further sizes."""
        changed = copy.copy(self)
        changed.sizes = {**self.sizes, **sizes}
        return changed

    def __repr__(self) -> str:
        sizes = ", ".join(f"{k}={v}" for k, v in self.sizes.items())
        return f"Workload({self.name!r}, {sizes})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Least work of the function, and the items that a call processes, as functions of the workload's sizes.

    `bytes` counts each input read once and each output written once. `flops` counts the arithmetic operations in
    `precision` ("float32", "tf32", "bfloat16", "float16"). If a workload's dtype is not float32, its operations are in
    that dtype, unless a lower precision is declared. Both are for the workload's direction: a function with a parameter
    `direction` receives it. `items` is the number of items of a call, for the throughput, and `unit` is their name,
    e.g. "tokens".
    """

    bytes: Callable[..., float] | None = None
    flops: Callable[..., float] | None = None
    precision: str = "float32"
    items: Callable[..., float] | None = None
    unit: str = "items"

    def __post_init__(self) -> None:
        for name in ("bytes", "flops", "items"):
            if (count := getattr(self, name)) is not None and not callable(count):
                raise PairError(f"cost: {name}={count!r} must be a function of the sizes, as {name}=lambda n: 8 * n")
        if self.precision not in (*DTYPES, TF32):
            raise PairError(f"cost: precision={self.precision!r} is not one of {', '.join((*DTYPES, TF32))}")

    def of(self, sizes: Mapping[str, Any], direction: str) -> tuple[float, float]:
        """Return (bytes, operations) at these sizes."""
        return _call_cost(self.bytes, sizes, direction), _call_cost(self.flops, sizes, direction)

    def items_of(self, sizes: Mapping[str, Any], direction: str) -> float:
        """Return the number of items that a call processes at these sizes; 0 if they are not counted. Raises PairError
        if it is negative or not finite."""
        found = _call_cost(self.items, sizes, direction)
        if not 0 <= found < math.inf:
            raise PairError(f"cost=Cost(items=…) gives {found:g} items at {dict(sizes)}")
        return found

    def precision_in(self, dtype: str) -> str:
        """Return the precision of the arithmetic if the inputs are in `dtype`: that dtype, unless it is float32 or a
        lower precision is declared."""
        return dtype if dtype != "float32" and self.precision in ("float32", "tf32") else self.precision


def _check_choices(name: str, **chosen: str | None) -> None:
    """Raise PairError if an argument is not one of its CHOICES."""
    for what, value in chosen.items():
        if value not in CHOICES[what]:
            choices = ", ".join(str(a) for a in CHOICES[what] if a is not None)
            raise PairError(f"workload {name!r}: {what}={value!r} is not one of {choices}")


def _check_promises(
    name: str, speedup: float | None, counts: Mapping[str, int | None], throughput: Mapping[str, float] | None
) -> None:
    """Raise PairError if a promised figure is of the wrong type or out of its range."""
    if speedup is not None and not (_is_number(speedup) and 0 < speedup < math.inf):
        raise PairError(f"workload {name!r}: speedup={speedup!r} must be a number above 0")
    for what, count in counts.items():
        if count is not None and (type(count) is not int or count < 0):
            raise PairError(f"workload {name!r}: {what}={count!r} must be a whole number, 0 or more")
    if throughput is not None and not _is_by_device(throughput):
        raise PairError(
            f"workload {name!r}: throughput={throughput!r} must have items a second by device, as the baselines' "
            f'files are named: {{"nvidia-h200": 640e3}}'
        )


def _check_margin(name: str, margin: float | None) -> None:
    if margin is not None and not (_is_number(margin) and 0 < margin < 1):
        raise PairError(f"workload {name!r}: margin={margin!r} must be between 0 and 1, such as 0.1 for 10%")


def _check_calls(name: str, direction: str, *, repeat: int, ranks: int) -> None:
    """Raise PairError if a call in this direction cannot be timed with so many repeats or processes."""
    if type(repeat) is not int or repeat < 1:
        raise PairError(f"workload {name!r}: repeat={repeat!r} must be a whole number, 1 or more")
    if repeat > 1 and direction == "backward":
        raise PairError(f"workload {name!r}: a backward pass cannot be repeated; use direction='both'")
    if type(ranks) is not int or ranks < 1:
        raise PairError(f"workload {name!r}: ranks={ranks!r} must be the number of processes, 1 or more")
    if ranks > 1 and direction != "forward":
        raise PairError(
            f"workload {name!r}: ranks={ranks} with direction={direction!r}; several processes are timed forward "
            "only: make the sides steps that compute their own gradients"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_by_device(rates: Any) -> bool:
    """Return whether this is a mapping of device slugs to positive numbers."""
    return isinstance(rates, Mapping) and all(
        isinstance(device, str)
        and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", device)
        and _is_number(rate)
        and 0 < rate < math.inf
        for device, rate in rates.items()
    )


def _call_cost(count: Callable[..., float] | None, sizes: Mapping[str, Any], direction: str) -> float:
    if count is None:
        return 0.0
    parameters = inspect.signature(count).parameters
    known = {**sizes, "direction": direction}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return float(count(**{k: v for k, v in known.items() if takes_all or k in parameters}))
