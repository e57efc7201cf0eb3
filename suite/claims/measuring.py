"""Measurements for the claims of any trainer: times, counts and memory of calls, and verdicts on intervals."""

from __future__ import annotations

import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfsuite.report import units
from perfsuite.timing.profiler_counts import count_calls
from suite.ablation import Ratio, noting
from suite.claims.record import CONFIRMED, EXCEEDED, REFUTED, UNMEASURED, Answer

Make = tuple[Callable[..., Callable[[], object]], tuple[Any, ...]]
"""(module-level function, its arguments). Called in another process, the function returns the function to time."""
PATIENCE = 10.0
"""Seconds that a process has to end by itself before it is killed."""
PASSES = 4
"""Maximum number of passes of a measurement while it is too noisy for a verdict."""


class UncompiledError(RuntimeError):
    """Raised if something that must be measured compiled runs uncompiled; the message says why."""


class NotFiniteError(ValueError):
    """Raised if a measured figure is infinite or NaN, so that no verdict follows from it; the message names it."""


def compiled_call(call: Callable[[], object]) -> None:
    """Run a call that may compile something; raise UncompiledError if the compilation fails."""
    notes: list[str] = []
    with noting(notes):
        call()
    for note in notes:
        if "runs uncompiled" in note:
            raise UncompiledError(note)


def counts(call: Callable[[], object]) -> tuple[int, int]:
    """Return (host syncs, launches) of a call on a GPU, after one call that is not counted."""
    call()
    return count_calls({"call": (lambda: None, call)})["call"]


def interleaved(
    device: torch.device, rounds: int, calls: Mapping[str, Callable[[], object]], *, count: int = 20
) -> dict[str, list[float]]:
    """Return the seconds of a call by round. Each round times `count` calls of each function in a row."""
    wait: Callable[[], object] = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            wait()
            began = time.perf_counter()
            for _ in range(count):
                calls[name]()
            wait()
            if number:  # round 0 warms up
                seconds[name].append((time.perf_counter() - began) / count)
    return seconds


@contextmanager
def apart(made: Mapping[str, Make]) -> Iterator[dict[str, Callable[[], float]]]:
    """Yield name → function. Each function times a call in a process of its own and returns its seconds.

    The processes end with the block. A timed call must itself wait for the device. An exception in a process is raised
    here by the next call of its function, or as a RuntimeError if the process has already ended.
    """
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    children = []
    try:
        for name, (make, arguments) in made.items():
            ends[name], theirs = context.Pipe()
            children.append(context.Process(target=_serve, args=(theirs, make, arguments)))
            children[-1].start()
            theirs.close()  # otherwise the end of the process would not be noticed here
        yield {name: partial(_asked, end) for name, end in ends.items()}
    finally:
        for end in ends.values():
            end.close()
        for child in children:
            child.join(PATIENCE)
            if child.is_alive():
                child.kill()
                child.join()


class Operations(TorchDispatchMode):
    """Count operations, and the bytes of the live tensors that they return.

    `known` tensors existed before and are not counted.
    """

    def __init__(self, known: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it
        self.count: int = 0
        self.peak: int = 0
        self._known = {t.untyped_storage()._cdata for t in known}  # an operation may return a view of one of these
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.count += 1
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._living[storage._cdata] = (StorageWeakRef(storage), int(storage.nbytes()))
        self.peak = max(self.peak, self.live())
        return found

    def live(self) -> int:
        """Return the bytes of the returned tensors that are not freed yet."""
        self._living = {key: own for key, own in self._living.items() if not own[0].expired()}
        return sum(size for _, size in self._living.values())


def peak_bytes(device: torch.device, call: Callable[[], object], known: Sequence[torch.Tensor] = ()) -> int:
    """Return the peak bytes during a call beyond those allocated before it.

    On a GPU these are all bytes of the allocator, elsewhere those of the tensors that operations return. `known` are
    the tensors that existed before the call.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with Operations(known) as seen:
        call()
    most: int = seen.peak
    return most


def saved(ratio: Ratio) -> tuple[float, float]:
    """Return the interval of the time saved, in percent; `ratio` is the time without something over that with it."""
    return 100 * (1 - 1 / ratio.low), 100 * (1 - 1 / ratio.high)


def largest(distances: Iterable[float]) -> float:
    """Return the largest distance; infinity if one is NaN, so that it passes no bound."""
    return max(math.inf if math.isnan(d) else d for d in distances)


def within(low: float, high: float, least: float, most: float, detail: str, *, nothing: float = 0.0) -> Answer:
    """Return the verdict on whether the interval [low, high] overlaps the claimed one, [least, most].

    It is EXCEEDED if the interval is above the claimed one and REFUTED if it is below. An interval that overlaps it and
    contains `nothing`, the value without any effect, is UNMEASURED. `detail` describes the measurement.
    """
    if low > most:
        return EXCEEDED, detail
    if high < least:
        return REFUTED, detail
    if low > nothing:
        return CONFIRMED, detail
    return UNMEASURED, f"{detail}. This is too noisy to distinguish from no effect"


def percent(low: float, high: float) -> str:
    """Format an interval of percentages: its middle, and its ends in brackets."""
    return f"{(low + high) / 2:.3g}% ({low:.3g} to {high:.3g})"


def typical(seconds: list[float]) -> str:
    """Format the median of the seconds."""
    return units.seconds(median(seconds))


def _serve(end: Connection, make: Callable[..., Callable[[], object]], arguments: tuple[Any, ...]) -> None:
    try:
        call = make(*arguments)
        while True:
            end.recv()
            began = time.perf_counter()
            call()
            end.send(time.perf_counter() - began)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # no more requests will come
    except Exception as error:
        end.send(error)


def _asked(end: Connection) -> float:
    try:
        with suppress(BrokenPipeError):  # a process that has ended may have left its error in the pipe
            end.send(None)
        found = end.recv()
    except (EOFError, ConnectionResetError):
        raise RuntimeError("a process that was to time something has ended") from None
    if isinstance(found, Exception):
        raise found
    return float(found)
