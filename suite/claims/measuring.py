"""What claims are measured with, of whatever trainer: times, counts and memory of calls, and what an interval says."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfsuite.counting import count_calls
from perfsuite.report import units
from suite.ablation import Ratio
from suite.claims.record import CONFIRMED, EXCEEDED, REFUTED, UNMEASURED, Answer

Make = tuple[Callable[..., Callable[[], object]], tuple[Any, ...]]
"""A function of a module, and what it is given, in another process: it gives what is timed there."""
PATIENCE = 10.0
"""Seconds that a process has to end by itself."""
PASSES = 4
"""A measurement that is too noisy for a verdict is continued, up to so many times as long."""


def counts(call: Callable[[], object]) -> tuple[int, int]:
    """(host syncs, launches) of a call on a GPU, after one that is not counted."""
    call()
    return count_calls({"call": (lambda: None, call)})["call"]


def interleaved(
    device: torch.device, rounds: int, calls: Mapping[str, Callable[[], object]], *, count: int = 20
) -> dict[str, list[float]]:
    """Seconds a call by round; a round times `count` calls of each in a row."""
    wait: Callable[[], object] = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            wait()
            began = time.perf_counter()
            for _ in range(count):
                calls[name]()
            wait()
            if number:  # the first warms up
                seconds[name].append((time.perf_counter() - began) / count)
    return seconds


@contextmanager
def apart(made: Mapping[str, Make]) -> Iterator[dict[str, Callable[[], float]]]:
    """Name → what times a call and gives its seconds, each in a process of its own, that ends with the block.

    What is timed has to wait for the device by itself. What is raised there is raised here, at the first call after.
    """
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    children = []
    try:
        for name, (make, given) in made.items():
            ends[name], theirs = context.Pipe()
            children.append(context.Process(target=_serve, args=(theirs, make, given)))
            children[-1].start()
            theirs.close()  # else its end would not be noticed here
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
    """Counts operations, and the bytes that live at once of what they return, but for what was `known` before."""

    def __init__(self, known: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not typed it
        self.count: int = 0
        self.peak: int = 0
        self._known = {t.untyped_storage()._cdata for t in known}  # of which an operation may return a view
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
        """Bytes of what has been made and not freed yet."""
        self._living = {key: own for key, own in self._living.items() if not own[0].expired()}
        return sum(size for _, size in self._living.values())


def peak_bytes(device: torch.device, call: Callable[[], object], known: Sequence[torch.Tensor] = ()) -> int:
    """The most bytes that a call has at once beyond those before it.

    On a GPU all that its allocator hands out, elsewhere what operations return; `known` is what was there already.
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
    """The interval of the time saved, in percent, of how many times as long it takes without."""
    return 100 * (1 - 1 / ratio.low), 100 * (1 - 1 / ratio.high)


def within(low: float, high: float, least: float, most: float, told: str) -> Answer:
    """Whether an interval and what is claimed have anything in common; one that holds 0 as well tells nothing."""
    if low > most:
        return EXCEEDED, told
    if high < least:
        return REFUTED, told
    return (CONFIRMED, told) if low > 0 else (UNMEASURED, f"{told}. That may as well be nothing: too noisy to tell")


def percent(low: float, high: float) -> str:
    """An interval, in words."""
    return f"{(low + high) / 2:.3g}% ({low:.3g} to {high:.3g})"


def typical(seconds: list[float]) -> str:
    """Their median, in words."""
    return units.seconds(median(seconds))


def _serve(end: Connection, make: Callable[..., Callable[[], object]], given: tuple[Any, ...]) -> None:
    try:
        call = make(*given)
        while True:
            end.recv()
            began = time.perf_counter()
            call()
            end.send(time.perf_counter() - began)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # nobody asks any more
    except Exception as error:
        end.send(error)


def _asked(end: Connection) -> float:
    try:
        end.send(None)
        found = end.recv()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise RuntimeError("a process that was to time something has ended") from None
    if isinstance(found, Exception):
        raise found
    return float(found)
