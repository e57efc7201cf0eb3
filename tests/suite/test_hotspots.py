"""The summary of a trace: a run's phases, and advice on what to optimize first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from rich.console import Console

from suite.runtime.hotspots import Hotspots, hotspots
from suite.runtime.ranges import PREFIX, phase, set_traced


@dataclass
class Event:
    """Event with the fields of the profiler's averages; times in microseconds."""

    key: str
    count: int
    cpu_time_total: float = 0.0
    device_time_total: float = 0.0
    self_cpu_time_total: float = 0.0
    self_device_time_total: float = 0.0
    device_type: str = "DeviceType.CPU"
    is_user_annotation: bool = False


def on_gpu(key: str, count: int, us: float) -> Event:
    return Event(key, count, self_device_time_total=us, device_type="DeviceType.CUDA")


def ranges(**device_us: float) -> list[Event]:
    return [
        Event(PREFIX + name, 2, cpu_time_total=9e5, device_time_total=us, is_user_annotation=True)
        for name, us in device_us.items()
    ]


def shown(found: Hotspots) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(found.table())
    return captured.get()


def test_phases_are_ordered_by_gpu_time() -> None:
    events = [
        *ranges(train=1.8e6, generation=1.2e6, policy=4e5),
        Event(f"{PREFIX}generation", 2, device_time_total=1.2e6, device_type="DeviceType.CUDA"),
        on_gpu("gemm", 40, 1.5e6),
        on_gpu("softmax", 10, 3e5),
        Event("aten::mm", 40, self_cpu_time_total=1e5),
    ]
    found = hotspots(events, windows=2, seconds=2.0)
    assert found.launches == 50
    assert found.phases["generation"] == (2, 0.9, 1.2)
    assert found.advice() == (
        "First look at the phase generation, 60% of the time; the largest operation is gemm, 75% of the time."
    )
    table = shown(found)
    assert "aten::mm" not in table
    assert table.index("generation") < table.index("policy")


def test_advice_says_that_the_gpu_waits_for_the_host() -> None:
    found = hotspots([*ranges(train=2e5), on_gpu("add", 3000, 2e5)], windows=2, seconds=2.0)
    assert found.advice().startswith(
        "The GPU works 10% of the time: the host is the limit, with 1500 launches a window."
    )


def test_operations_are_ordered_by_cpu_time_without_a_gpu() -> None:
    found = hotspots([*ranges(train=0.0), Event("aten::mm", 4, self_cpu_time_total=1e6)], windows=1, seconds=2.0)
    assert found.advice() == (
        "First look at the phase train, 45% of the time; the largest operation is aten::mm, 50% of the time."
    )
    assert hotspots([], 1, 1.0).advice() == "Nothing was recorded."


@pytest.mark.parametrize("traced", [False, True])
def test_phases_are_recorded_only_while_tracing(traced: bool) -> None:
    set_traced(traced)
    try:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler, phase("own"):
            torch.zeros(1)
    finally:
        set_traced(False)
    assert ("own" in hotspots(profiler.key_averages(), 1, 1.0).phases) == traced
