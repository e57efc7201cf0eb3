"""What claims are measured with, of whatever trainer: times and counts of calls, and what an interval says."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from perfsuite.counting import count_calls
from perfsuite.report import units
from suite.ablation import Ratio
from suite.claims.record import CONFIRMED, REFUTED, UNMEASURED, Answer

Make = tuple[Callable[..., Callable[[], object]], tuple[Any, ...]]
"""A function of a module, and what it is given, in another process: it gives what is timed there."""
PATIENCE = 10.0
"""Seconds that a process has to end by itself."""


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


def saved(ratio: Ratio) -> tuple[float, float]:
    """The interval of the time saved, in percent, of how many times as long it takes without."""
    return 100 * (1 - 1 / ratio.low), 100 * (1 - 1 / ratio.high)


def within(low: float, high: float, least: float, most: float, told: str) -> Answer:
    """Whether an interval and what is claimed have anything in common; one that holds 0 as well tells nothing."""
    if low > most or high < least:
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
