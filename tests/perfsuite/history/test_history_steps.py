"""Steps in the times: the rate of false alarms, the rate of detection, and which runs are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from histories import figures, run, with_levels
from scale import count

from perfsuite.history import steps
from perfsuite.history.records import Run
from perfsuite.history.steps import Step, Timed
from perfsuite.records import Status

pytestmark = pytest.mark.skipif(find_spec("ruptures") is None, reason="ruptures is not installed")

SERIES = count(quick=100, full=2000)
POINTS = 60
NOISE = 0.01


def timed(runs: Sequence[Run]) -> list[Timed]:
    return [
        Timed(run=r, seconds=f.optimized_s, conditions=steps.conditions(r, f))
        for r in runs
        for f in r.workloads.values()
        if f.optimized_s is not None and steps.has_time(f)
    ]


def find(runs: Sequence[Run]) -> list[Step]:
    return steps.find(timed(runs))


def with_outliers(random: np.random.Generator, points: int) -> Any:
    """Return noise in which one time in 20 is longer, by 20% on average."""
    return random.normal(0, NOISE, points) + (random.random(points) < 0.05) * random.exponential(0.2, points)


NOISES = {
    "normal": lambda random, points: random.normal(0, NOISE, points),
    "heavy tails": lambda random, points: NOISE * random.standard_t(3, points),
    "outliers": with_outliers,
}


@pytest.mark.parametrize("points", [8, 12, 20, POINTS, 300])
@pytest.mark.parametrize("kind", NOISES)
def test_noise_seldom_gives_a_step(kind: str, points: int) -> None:
    random = np.random.default_rng(1)
    series = SERIES if points == POINTS else SERIES // 10
    alarms = sum(bool(steps.changes(list(NOISES[kind](random, points)))) for _ in range(series))
    assert alarms <= max(1, (0.02 if kind == "normal" else 0.05) * series), f"{alarms} of {series}"


@pytest.mark.parametrize(("size", "at"), [(0.05, 30), (0.05, 10), (0.05, 55), (-0.05, 40), (0.03, 30)])
def test_step_is_detected_at_its_place(size: float, at: int) -> None:
    """A step counts as detected if it is found exactly once, within two runs of its place."""
    random = np.random.default_rng(2)
    found = 0
    series = SERIES if (size, at) == (0.05, 30) else max(50, SERIES // 4)
    for _ in range(series):
        times = random.normal(0, NOISE, POINTS)
        times[at:] += math.log1p(size)
        places = steps.changes(list(times))
        found += len(places) == 1 and abs(places[0] - at) <= 2
    assert found >= 0.95 * series, f"{found} of {series}"


def test_step_is_described_with_its_date_revision_and_size() -> None:
    (step,) = find(with_levels((12, 1e-5), (8, 1.041e-5)))
    assert step.shown == "since 2026-11-13, 000000c: 4.1% slower (12 runs before, 8 after)"
    assert (step.last or "")[:7] == "000000b"
    (step,) = find(with_levels((12, 1e-5), (8, 0.9e-5)))
    assert "10.0% faster" in step.shown


def test_several_steps_are_detected() -> None:
    found = find(with_levels((12, 1e-5), (10, 1.1e-5), (9, 1e-5)))
    assert [(s.before, s.after) for s in found] == [(12, 10), (10, 9)]
    assert [s.change > 0 for s in found] == [True, False]


def test_steps_of_times_without_noise_are_at_least_1_percent() -> None:
    assert find(with_levels((12, 1e-5), (12, 1.005e-5), noise=[0.0])) == []
    assert len(find(with_levels((12, 1e-5), (12, 1.02e-5), noise=[0.0]))) == 1


def test_few_runs_have_no_step() -> None:
    assert find(with_levels((3, 1e-5), (4, 2e-5))) == []
    assert find([]) == []


@pytest.mark.parametrize(
    "other",
    [{"driver": "590.1"}, {"torch": "2.12.0"}, {"device": "nvidia-h100"}, {"power_limit_w": 500.0}, {"python": "3.12"}],
    ids=lambda fields: next(iter(fields)),
)
def test_runs_on_other_devices_or_software_are_not_compared(other: dict[str, Any]) -> None:
    runs = with_levels((12, 1e-5), (12, 1.1e-5))
    assert find(runs)
    changed = [r if n < 12 else replace(r, machine=replace(r.machine, **other)) for n, r in enumerate(runs)]
    assert find(changed) == []


def test_runs_with_other_sizes_are_not_compared() -> None:
    larger = {"one": figures(1.1e-5, sizes={"n": 128})}
    assert find([run(n, workloads=larger if n >= 12 else {"one": figures()}) for n in range(24)]) == []


def test_alternating_devices_have_separate_steps() -> None:
    one = with_levels((12, 1e-5), (12, 1.1e-5))
    other = [replace(r, machine=replace(r.machine, device="nvidia-h100")) for r in with_levels((24, 3e-5))]
    (step,) = find([r for both in zip(one, other, strict=True) for r in both])
    assert step.device == "nvidia-h200"
    assert (step.before, step.after) == (12, 12)


def test_step_on_another_host_mentions_the_hosts() -> None:
    runs = [replace(r, host="a" if n < 12 else "b") for n, r in enumerate(with_levels((12, 1e-5), (12, 1.1e-5)))]
    (step,) = find(runs)
    assert step.shown.endswith("; on another host: a → b")


@pytest.mark.parametrize("status", [Status.NOT_EQUIVALENT, Status.NOT_PROVEN, Status.NOT_TIMED])
def test_times_of_wrong_or_unproven_code_are_ignored(status: Status) -> None:
    wrong = [
        run(12 + n, workloads={id: figures(2e-5, verdict=status)})
        for n, r in enumerate(with_levels((12, 1e-5)))
        for id in r.workloads
    ]
    assert find([*with_levels((12, 1e-5)), *wrong]) == []
