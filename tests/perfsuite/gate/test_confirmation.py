"""A small slowdown is reported only if the current code is not as much slower than a copy of itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from builders import counting, entry, measurement, workload_id
from scratch import SMALL, TWO_LINES, Project, lines_with, times

from perfsuite.gate import confirmation, decision
from perfsuite.gate.confirmation import confirmed, is_needed
from perfsuite.records import Measurement, Status, Verdict

pytest_plugins = ["pytester"]

ID = workload_id(0)
SPREAD = (-0.001, 0.0005, 0.001, -0.0005)
FOUND = Verdict(
    id=ID, status=Status.REGRESSED, message=f"REGRESSED {ID}: 1.3% slower", slowdown=0.013, moved="optimized"
)


def copies(slower: float, noise: float = 1.0) -> list[Measurement]:
    """Return processes in which the current code takes 1 + `slower` times as long as a second import."""
    return [measurement(ID, accepted=-math.log1p(slower) + noise * s) for s in SPREAD]


@pytest.mark.parametrize("slower", [0.0, 0.004, -0.013])
def test_slowdown_is_confirmed_if_the_copy_is_not_slower(slower: float) -> None:
    assert confirmed(FOUND, copies(slower)) is FOUND


@pytest.mark.parametrize("slower", [0.0075, 0.013, 0.02])
def test_slowdown_becomes_noisy_if_the_copy_is_as_much_slower(slower: float) -> None:
    verdict = confirmed(FOUND, copies(slower))
    assert verdict == replace(FOUND, status=Status.NOISY, moved=None, message=verdict.message)
    assert verdict.message.startswith(
        f"NOISY {ID}: 1.3% slower; but the current code, imported twice, is {slower:.1%} "
    )


def test_id_with_a_colon_is_no_part_of_the_reason() -> None:
    id = "t.py::pair::speed[rows: 5]"
    found = replace(FOUND, id=id, message=f"REGRESSED {id}: 1.3% slower")
    assert confirmed(found, copies(0.013)).message.startswith(f"NOISY {id}: 1.3% slower; but")


def test_slowdown_is_confirmed_if_the_copies_differ_only_by_noise() -> None:
    assert confirmed(FOUND, copies(0.013, noise=20.0)) is FOUND


def test_confirmation_is_needed_only_for_small_interleaved_slowdowns() -> None:
    runs = tuple(copies(0.0))
    assert is_needed(FOUND, runs, None)
    assert not is_needed(replace(FOUND, status=Status.PASS), runs, None)
    assert not is_needed(replace(FOUND, slowdown=confirmation.SMALL + 0.001), runs, None)
    assert not is_needed(replace(FOUND, slowdown=None), runs, None)
    assert not is_needed(FOUND, (measurement(ID), *runs[1:]), None)  # compared with stored figures


def test_confirmation_is_not_needed_if_launches_increased() -> None:
    before = entry([tuple(counting(m, launches=3) for m in copies(0.0))])
    for launches, needed in ((3, True), (4, False)):
        assert is_needed(FOUND, [counting(m, launches=launches) for m in copies(0.0)], before) is needed


# --- in a whole gate ------------------------------------------------------------------------------------------------


def outcome(copy_slower: float) -> Callable[[str, int, bool], object]:
    """Return an outcome 2% slower than the accepted code, and `copy_slower` slower than a second import."""

    def of(id: str, process: int, second: bool) -> object:
        slower = 0.02 if process < decision.RED_PROCESSES else copy_slower
        return times(slower=slower, noise=0.1)(id, process, second)

    return of


@pytest.mark.parametrize(("copy_slower", "status", "code"), [(0.0, "REGRESSED", 1), (0.02, "NOISY", 10)])
def test_gate_times_the_current_code_against_its_own_copy(
    project: Project, copy_slower: float, status: str, code: int
) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.accept(times(noise=0.1))
    accepted = project.git("rev-parse", "HEAD")
    project.replace("test_scale.py", "3 * x", "2 * x + x")
    fake = project.measured(outcome(copy_slower))
    result = project.gate()
    assert result.ret == code, result.stdout.str()
    assert lines_with(result.stdout.str(), f"{status} {SMALL}", "2.0% slower")
    assert len(fake.calls) == 2 * decision.RED_PROCESSES
    with_accepted, with_copy = fake.calls[0][1][SMALL], fake.calls[-1][1][SMALL]
    assert with_accepted == accepted != with_copy
    assert "2 * x + x" in project.git("show", f"{with_copy}:test_scale.py")
    assert project.git("rev-parse", "HEAD") == accepted


def test_slowdown_is_confirmed_if_no_copy_can_be_made(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from perfsuite.errors import RevisionError
    from perfsuite.revisions import revision

    def refuse(root: object) -> str:
        raise RevisionError("git stash: the disk is full")

    project.write("test_scale.py", TWO_LINES)
    project.accept(times(noise=0.1))
    monkeypatch.setattr(revision, "snapshot", refuse)
    fake = project.measured(outcome(0.02))
    assert project.gate().ret == 1
    assert len(fake.calls) == decision.RED_PROCESSES
