"""Progress lines count every task, including those that are added during a run."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from scratch import Project, times
from test_fail_closed import OTHER, SCALE

from perfsuite.faults import OUT_OF_MEMORY
from perfsuite.gate import exit_codes
from perfsuite.records import Status
from perfsuite.session import progress
from perfsuite.session.tasks import Failure

pytest_plugins = ["pytester"]


def counters(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"^\[(\d+)/(\d+)\] ", text, re.MULTILINE)]


def check(lines: str) -> None:
    """Check that each series counts from 1 to its announced number, and not beyond it."""
    seen = counters(lines)
    assert seen
    assert seen[0][0] == 1, seen
    assert all(ended <= total for ended, total in seen), seen
    for (ended, total), (later, _) in pairwise(seen):
        assert later == ended + 1 or (later == 1 and ended == total), seen
    assert seen[-1][0] == seen[-1][1], seen


class Screen(io.StringIO):
    """Output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_names_are_shown_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    reporter = SimpleNamespace(_tw=SimpleNamespace(_file=screen), ensure_newline=lambda: None)
    plugins: Any = SimpleNamespace(get_plugin={"terminalreporter": reporter}.get)
    shown: Any = progress.Progress(SimpleNamespace(pluginmanager=plugins))  # type: ignore[arg-type]
    shown.expect("", 2)
    for name in ("window64", "/x"):
        shown.begin(0, f"tests/test_dots.py::dots::speed[{name}]")
        assert f"dots[{name}] " in screen.getvalue()
        shown.ended(f"tests/test_dots.py::dots::speed[{name}]", "[/red] :smile:")
        assert f"dots[{name}]: [/red] :smile:\n" in screen.getvalue()
    shown.done()


@pytest.fixture
def accepted(project: Project) -> Project:
    project.write("tests/test_scale.py", SCALE)
    project.write("tests/test_other.py", OTHER)
    project.accept_again("progress")
    return project


@pytest.mark.parametrize(("slower", "code"), [(0.0, exit_codes.GREEN), (0.5, exit_codes.CODE_AT_FAULT)])
def test_progress_of_a_gate_stays_within_its_total(accepted: Project, slower: float, code: int) -> None:
    """A workload that is not decided by its first processes gets more of them, and is confirmed alone."""
    accepted.measured(times(slower=slower))
    done = accepted.cli("gate")
    assert done.exit_code == code, done.output
    check(done.output)


def test_a_workload_that_is_timed_again_alone_is_counted(accepted: Project) -> None:
    lacked: list[str] = []

    def outcome(id: str, process: int, second: bool) -> Any:
        if "large" in id and not lacked:
            lacked.append(id)
            return Failure(status=Status.UNMEASURED, message=f"{id} {OUT_OF_MEMORY}")
        return times()(id, process, second)

    accepted.measured(outcome)
    done = accepted.cli("gate")
    assert lacked
    assert done.exit_code == exit_codes.GREEN, done.output
    check(done.output)
