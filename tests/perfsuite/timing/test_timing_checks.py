"""Observations while a side is timed: a neighbour on the device is not blamed on the side."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite.errors import NoisyError, NotEquivalent, NotTimed
from perfsuite.records import Limit
from perfsuite.system import host
from perfsuite.timing import timing_checks
from perfsuite.timing.clocks import CpuClock, CudaClock

Call = Callable[[], object]

EVEN = [1e-4] * 64
BURSTS = [1e-6 if i % 8 else 1e-4 for i in range(64)]
"""Seconds of calls of which every eighth does the work of all."""


def test_calls_that_do_the_work_of_others_are_rejected() -> None:
    timing_checks.bursts(EVEN, "it")
    with pytest.raises(NotEquivalent, match="it does 93% of its work in 8 of 64 calls"):
        timing_checks.bursts(BURSTS, "it", lambda typical: EVEN)
    timing_checks.bursts(BURSTS[: timing_checks.BURST_CALLS - 1], "it")
    longest = max(BURSTS) - min(BURSTS)
    timing_checks.bursts(BURSTS, "it", least_s=1.01 * longest)
    with pytest.raises(NotTimed):
        timing_checks.bursts(BURSTS, "it", least_s=0.99 * longest)


def test_bursts_of_the_whole_machine_are_not_blamed_on_the_side() -> None:
    asked: list[float] = []

    def sliced(typical: float) -> list[float]:
        asked.append(typical)
        return BURSTS

    timing_checks.bursts(BURSTS, "it", sliced)
    assert asked == [1e-6]
    timing_checks.bursts(EVEN, "it", sliced)
    assert asked == [1e-6]


class Device(CudaClock):
    """Device that is busy after a call's last event as `side` says, and after a lone kernel's as `lone` says."""

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
    """Yield delays: this share of the calls waits for a neighbour's time slice."""
    rng = random.Random(1)
    while True:
        yield 1e-3 if rng.random() < share else 4e-6


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_checks, "UNSEEN_PAUSE_S", 0.0)


def unseen(clock: CudaClock | CpuClock) -> float:
    return timing_checks.unseen_seconds(clock, lambda: None, lambda: None)


@pytest.mark.usefixtures("no_pause")
def test_work_outside_the_stream_is_detected_at_every_call() -> None:
    assert unseen(Device(always(4e-5), always(4e-6))) == pytest.approx(3.6e-5)
    quiet = Device(always(5e-6), always(4e-6))
    assert unseen(quiet) == pytest.approx(1e-6)
    assert quiet.asked == timing_checks.UNSEEN_CALLS
    assert unseen(CpuClock()) == 0.0


@pytest.mark.usefixtures("no_pause")
def test_a_neighbour_on_the_device_is_not_mistaken_for_work_outside_the_stream() -> None:
    assert unseen(Device(sliced(0.7), sliced(0.7))) < timing_checks.UNSEEN_S
    # A device that is never idle shows nothing.
    assert unseen(Device(always(1e-3), always(1e-3))) == 0.0


def test_work_after_the_timer_has_stopped_is_rejected() -> None:
    with pytest.raises(NotEquivalent, match="busy for 40 µs after the timer has stopped at 10 µs"):
        timing_checks.hidden(4e-5, 1e-5, "it")
    timing_checks.hidden(1.4e-5, 1e-5, "it")
    timing_checks.hidden(4e-5, 1e-3, "it")


LEAST_S = 1e-3


def needs(seconds: float) -> Limit:
    """Return the limit of a device that needs this many seconds."""
    return Limit(seconds=seconds, by="compute", bytes=0.0, flops=1e9, ceiling=1e9 / seconds)


class Floor:
    """A call that takes `took`; `limits` are measured one after the other, `others` is the CPU's other work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, took: float, *limits: float, others: float = 0.0) -> None:
        self.took, self.limits, self.beside = took, list(limits), False

        @contextlib.contextmanager
        def used_elsewhere() -> Iterator[Callable[[], float]]:
            self.beside = True
            yield lambda: others
            self.beside = False

        monkeypatch.setattr(host, "used_elsewhere", used_elsewhere)

    def again(self) -> Limit:
        assert self.beside
        return needs(self.limits.pop(0) if self.limits else LEAST_S)

    def judge(self, first: float = LEAST_S, device: str = "cpu") -> Limit:
        return timing_checks.floor(needs(first), self.again, lambda: self.took, device, "it")


def test_the_limit_is_not_measured_again_for_a_possible_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Floor(monkeypatch, 0.9 * LEAST_S, 0.0, others=9.0).judge() == needs(LEAST_S)


def test_a_limit_that_was_measured_on_a_busy_device_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (20 * LEAST_S, 5 * LEAST_S, LEAST_S)
    assert Floor(monkeypatch, LEAST_S, *limits).judge(first=10 * LEAST_S) == needs(LEAST_S)
    assert Floor(monkeypatch, LEAST_S, *limits, others=0.5).judge(first=10 * LEAST_S) == needs(LEAST_S)


@pytest.mark.parametrize("others", [0.0, 0.1])
def test_an_impossible_time_is_rejected(monkeypatch: pytest.MonkeyPatch, others: float) -> None:
    words = r"it takes 500 µs, and this device needs 1e\+03 µs for the 1e\+09 operations that cost= names"
    measured = Floor(monkeypatch, 0.5 * LEAST_S, *[LEAST_S] * timing_checks.FLOOR_ATTEMPTS, others=others)
    with pytest.raises(NotTimed, match=words):
        measured.judge()
    assert not measured.limits, "nobody is accused before the limit was measured again"


def test_an_impossible_time_on_a_busy_cpu_raises_noisy_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoisyError, match="other processes use this CPU"):
        Floor(monkeypatch, 0.5 * LEAST_S, others=0.5).judge()
    with pytest.raises(NoisyError, match="other processes use this CPU"):
        Floor(monkeypatch, LEAST_S / timing_checks.LOWERED, others=2.0).judge()


def test_a_time_that_no_neighbour_can_explain_is_rejected_on_a_busy_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotTimed, match="does not do the work, or cost= overstates it"):
        Floor(monkeypatch, 0.8 * LEAST_S / timing_checks.LOWERED, others=2.0).judge()


def test_the_ceiling_of_a_gpu_does_not_depend_on_the_load_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotTimed, match="does not do the work"):
        Floor(monkeypatch, 0.5 * LEAST_S, others=2.0).judge(device="cuda")


def test_persisting_l2_bytes_are_read_from_an_unused_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated driver has no answer before the thread has a context."""
    used: list[str] = []

    def asked(found: Any, limit: int) -> int:
        if not used:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        ctypes.cast(found, ctypes.POINTER(ctypes.c_size_t))[0] = 1 << 20
        return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing_checks, "_driver", lambda: SimpleNamespace(cuCtxGetLimit=asked))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: used.append("device"))
    assert timing_checks.persisting_l2_bytes() == 1 << 20
