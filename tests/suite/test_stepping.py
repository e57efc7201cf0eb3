"""Seconds per step, from the times between reports."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from suite.stepping import StepSeconds


@dataclass(frozen=True)
class Report:
    step: int


def per_step(*seconds: float) -> float | None:
    found = StepSeconds()
    found.add(Report(0), None)
    for step, spent in enumerate(seconds, start=1):
        found.add(Report(step), spent)
        found.add(Report(step), spent)  # a report that is read twice counts once
    return found.per_step()


def test_steps_of_two_kinds_are_averaged() -> None:
    assert per_step(*[1, 3] * 50) == pytest.approx(2)
    assert per_step(*[1, 1, 1, 5] * 25) == pytest.approx(2)


def test_a_pause_is_excluded() -> None:
    assert per_step(*[1] * 55, 100, *[1] * 4) == 1


def test_per_step_is_the_mean_of_a_few_steps_and_none_without_steps() -> None:
    assert per_step() is None
    assert per_step(1, 2, 6) == 3
