"""What is watched while a side is timed: a neighbour on the device is no fault of the side's."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite import scrutiny
from perfsuite.clocks import CpuClock, CudaClock
from perfsuite.equivalence import NotEquivalent

Call = Callable[[], object]

EVEN = [1e-4] * 64
BURSTS = [1e-6 if i % 8 else 1e-4 for i in range(64)]
"""Every eighth call does the work of all."""


def test_calls_that_do_the_work_of_others_are_named() -> None:
    scrutiny.bursts(EVEN, "it")
    with pytest.raises(NotEquivalent, match="it does 93% of its work in 8 of 64 calls"):
        scrutiny.bursts(BURSTS, "it", lambda typical: EVEN)
    scrutiny.bursts(BURSTS[: scrutiny.BURST_CALLS - 1], "it")


def test_bursts_of_the_whole_machine_are_not_the_side_s() -> None:
    asked: list[float] = []

    def sliced(typical: float) -> list[float]:
        asked.append(typical)
        return BURSTS

    scrutiny.bursts(BURSTS, "it", sliced)
    assert asked == [1e-6]
    scrutiny.bursts(EVEN, "it", sliced)
    assert asked == [1e-6]


class Device(CudaClock):
    """After a call's last event it is busy as `side` says, after a lone kernel's as `lone` says."""

    def __init__(self, side: Iterator[float], lone: Iterator[float]) -> None:
        self.side, self.lone, self.asked = side, lone, 0

    def flush(self) -> None:
        raise AssertionError("only called through after_last_event")

    def after_last_event(self, reset: Call, call: Call) -> float:
        if call == self.flush:
            return next(self.lone)
        self.asked += 1
        return next(self.side)


def always(seconds: float) -> Iterator[float]:
    while True:
        yield seconds


def sliced(share: float) -> Iterator[float]:
    """This share of the calls waits for a neighbour's time slice."""
    rng = random.Random(1)
    while True:
        yield 1e-3 if rng.random() < share else 4e-6


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrutiny, "UNSEEN_PAUSE_S", 0.0)


def unseen(clock: CudaClock | CpuClock) -> float:
    return scrutiny.unseen_seconds(clock, lambda: None, lambda: None)


@pytest.mark.usefixtures("no_pause")
def test_work_beside_the_stream_is_seen_at_every_call() -> None:
    assert unseen(Device(always(4e-5), always(4e-6))) == pytest.approx(3.6e-5)
    quiet = Device(always(5e-6), always(4e-6))
    assert unseen(quiet) == pytest.approx(1e-6)
    assert quiet.asked == scrutiny.UNSEEN_CALLS
    assert unseen(CpuClock()) == 0.0


@pytest.mark.usefixtures("no_pause")
def test_a_neighbour_on_the_device_is_not_taken_for_work_beside_the_stream() -> None:
    assert unseen(Device(sliced(0.7), sliced(0.7))) < scrutiny.UNSEEN_S
    # A device that is never idle tells nothing.
    assert unseen(Device(always(1e-3), always(1e-3))) == 0.0


def test_what_the_timer_has_not_seen_is_named() -> None:
    with pytest.raises(NotEquivalent, match="busy for 40 µs after the timer has stopped at 10 µs"):
        scrutiny.hidden(4e-5, 1e-5, "it")
    scrutiny.hidden(1.4e-5, 1e-5, "it")
    scrutiny.hidden(4e-5, 1e-3, "it")


def test_l2_is_asked_of_a_device_that_nothing_has_used_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of our own, which has no answer before the thread has a context."""
    used: list[str] = []

    def asked(found: Any, limit: int) -> int:
        if not used:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        ctypes.cast(found, ctypes.POINTER(ctypes.c_size_t))[0] = 1 << 20
        return 0

    monkeypatch.setattr(scrutiny, "_driver", lambda: SimpleNamespace(cuCtxGetLimit=asked))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: used.append("device"))
    assert scrutiny.persisting_l2_bytes() == 1 << 20
