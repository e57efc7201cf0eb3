"""The clocks on a simulated device: which time they measure and which they exclude."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite.errors import MachineError
from perfsuite.timing import clocks
from perfsuite.timing.clocks import QUEUE_DEPTH, CpuClock, CudaClock, clock_for, middle
from perfsuite.timing.timing_checks import burst_share

RATE = 2e9
LAUNCH_S = 5e-6
KERNEL_S = 3e-6


class Device:
    """Simulated stream and host, each with its own exact time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.stream = 0.0
        self.spins: list[float] = []
        self.syncs = 0
        device, zeros = self, torch.zeros

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                device.stream = max(device.stream, device.host)
                self.at = device.stream

            def query(self) -> bool:
                return self.at <= device.host

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at) * 1e3

        monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **{**k, "device": "cpu"}))
        properties = SimpleNamespace(L2_cache_size=4096)
        for name, value in {
            "Event": Event,
            "_sleep": self.spin,
            "synchronize": self.synchronize,
            "current_device": lambda: 0,
            "get_device_properties": lambda index: properties,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)
        monkeypatch.setattr(CudaClock, "flush", lambda clock: self.launch(1e-6))
        monkeypatch.setattr(clocks, "perf_counter_ns", lambda: self.host * 1e9)

    def launch(self, seconds: float = KERNEL_S) -> None:
        self.host += LAUNCH_S
        self.stream = max(self.stream, self.host) + seconds

    def spin(self, cycles: int) -> None:
        self.spins.append(cycles / RATE)
        self.launch(cycles / RATE)

    def synchronize(self) -> None:
        self.syncs += 1
        self.host = self.stream = max(self.host, self.stream)


def nothing() -> None:
    pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_device_clock_excludes_launch_latency(device: Device) -> None:
    clock = CudaClock()
    assert clock._cycles_per_s == pytest.approx(RATE, rel=5e-3)
    seconds = clock.sample("device", nothing, device.launch, 16, 1, "a")
    assert seconds == pytest.approx(KERNEL_S)
    assert clock.unhidden == 0


def test_resets_and_flushes_are_not_timed(device: Device) -> None:
    clock = CudaClock()
    done: list[str] = []

    def reset() -> None:
        done.append("reset")
        device.launch(50e-6)

    def call() -> None:
        done.append("call")
        device.launch()

    assert clock.sample("device", reset, call, 3, 1, "a") == pytest.approx(KERNEL_S)
    assert done == ["reset", "call"] * 3
    assert clock.sample("wall", reset, call, 3, 1, "a") == pytest.approx(KERNEL_S + LAUNCH_S)


def test_spin_that_ends_too_early_is_lengthened(device: Device) -> None:
    clock = CudaClock()

    def slow_to_enqueue() -> None:
        device.host += 1e-3
        device.launch()

    device.spins.clear()
    assert clock.sample("device", nothing, slow_to_enqueue, 16, 1, "slow") == pytest.approx(KERNEL_S)
    assert len(device.spins) == 2
    assert device.spins[0] < 16e-3 < device.spins[1]
    assert clock.unhidden == 0
    device.spins.clear()
    clock.sample("device", nothing, slow_to_enqueue, 16, 1, "slow")
    assert len(device.spins) == 1, "the time to enqueue is remembered"
    clock.sample("device", nothing, device.launch, 16, 1, "another")
    assert device.spins[1] < 2e-3, "for this side only"


def test_samples_with_visible_launch_latency_are_counted(device: Device) -> None:
    clock = CudaClock()
    waits = iter(range(1, 1000))

    def ever_slower() -> None:
        device.host += 1e-3 * 4 ** next(waits)
        device.launch()

    seconds = clock.sample("device", nothing, ever_slower, 2, 1, "a")
    assert seconds > KERNEL_S
    assert clock.unhidden == 1
    device.spins.clear()
    clock.sample("device", nothing, device.launch, 1, QUEUE_DEPTH + 1, "many")
    assert not device.spins, "more launches than the queue holds are not put behind a spin"
    assert clock.unhidden == 2


def test_spin_is_not_lengthened_without_limit_for_a_call_that_synchronizes(device: Device) -> None:
    """The driver can block invisibly to a profiler, for instance when a limit is set or memory is allocated."""
    clock = CudaClock()

    def waits() -> None:
        device.launch()
        device.synchronize()

    for _ in range(20):
        clock.sample("device", nothing, waits, 4, 1, "a")
        clock.sample("device", nothing, device.launch, 4, 1, "b")
    assert clock.waiting == {"a"}
    assert sum(device.spins) < 0.1
    assert clock.unhidden == 20


@pytest.mark.parametrize(
    ("tried", "waits"),
    [
        ([(1.0, 1.1), (2.0, 2.1), (4.0, 4.1)], True),
        ([(1.0, 1.1), (2.0, 2.3), (4.0, 4.7)], True),
        ([(1.0, 1.1), (2.0, 2.4), (4.0, 4.4)], False),  # it grows by too much more than the spin
        ([(1.0, 1.1), (2.0, 1.8), (4.0, 3.4)], False),  # it grows by too little
        ([(1.0, 9.0), (2.0, 9.0), (4.0, 9.0)], False),  # slow to enqueue
        ([(1.0, 0.9), (2.0, 1.9), (4.0, 3.9)], False),  # shorter than the spin
        ([(1.0, 1.1), (2.0, 2.1)], False),
    ],
)
def test_a_call_waits_if_its_time_grows_with_the_spin(tried: list[tuple[float, float]], waits: bool) -> None:
    assert clocks._waits(tried) is waits


def test_wall_clock_includes_the_wait_for_the_device(device: Device) -> None:
    clock = CudaClock()
    before = device.syncs
    assert clock.sample("wall", nothing, lambda: device.launch(1e-3), 4, 1) == pytest.approx(1e-3 + LAUNCH_S)
    assert device.syncs - before == 8
    clock.synchronize()
    assert device.syncs - before == 9


@pytest.mark.parametrize("elapsed", [0.0, -1.0, float("nan")])
def test_events_that_measure_no_time_are_an_error(
    device: Device, monkeypatch: pytest.MonkeyPatch, elapsed: float
) -> None:
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda start, end: elapsed)
    with pytest.raises(MachineError, match="the device's events measure no time; its clock cannot be trusted"):
        CudaClock()


@pytest.mark.parametrize("launches", [0, 1, 7, 92, 99, 100, 800, 5000])
def test_calls_within_queue_never_exceed_the_queue_depth(launches: int) -> None:
    calls = CudaClock.calls_within_queue(32, launches)
    assert 1 <= calls <= 32
    assert calls == 1 or calls * (launches + 8) <= QUEUE_DEPTH
    assert CudaClock.calls_within_queue(3, 0) == 3


def test_cpu_clock_excludes_resets_and_outliers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(clocks, "perf_counter_ns", lambda: now[0])
    costs = iter([100, 200, 300, 400, 10_000, 500, 100, 200])

    def spend(nanoseconds: int) -> None:
        now[0] += nanoseconds

    seconds = CpuClock().sample("wall", lambda: spend(77), lambda: spend(next(costs)), 8, 0)
    assert seconds == pytest.approx(275e-9), "an interrupted call does not move it"
    assert isinstance(clock_for("cpu"), CpuClock)


def test_even_work_repeats_additions_for_the_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One addition in forty takes 100 times as long as the others."""
    now, added = [0], [0]
    monkeypatch.setattr(clocks, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(clocks, "usage", lambda: (0, now[0]))

    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        added[0] += 1
        now[0] += 700 if added[0] % 40 == 0 else 7

    monkeypatch.setattr(clocks.torch, "add", add)
    work = CpuClock().even_work(70e-9, 20)
    assert len(work) == 20
    assert sorted(set(work)) == pytest.approx([70e-9, 763e-9])
    assert burst_share(work) > 0.7


def test_middle_averages_the_middle_half() -> None:
    assert middle([5.0]) == 5.0
    assert middle([1.0, 2.0]) == 1.5
    assert middle([1.0, 2.0, 3.0, 1000.0]) == 2.5
    assert middle(range(8)) == 3.5
