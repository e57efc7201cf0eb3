"""Two measuring runs on one device wait for each other, and report that they wait."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from perfsuite.session.device_lock import HELD, turn

OTHER = """
import sys
from perfsuite.session.device_lock import turn

with turn(sys.argv[1:], "the other", lambda line: print(line, flush=True)):
    print("has it", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv(HELD, raising=False)


def other(*devices: str, inherits: bool = False) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if inherits or k != HELD}
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, *devices],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_the_second_run_waits_and_reports_it() -> None:
    message: list[str] = []
    with turn(["GPU-1"], "this GPU", message.append):
        child = other("GPU-1")
        assert line(child).startswith("waiting: another perfsuite run is measuring on the other;")
    assert line(child) == "has it"
    child.communicate("")
    assert message == []


def test_a_killed_run_releases_its_turn() -> None:
    child = other("GPU-1")
    assert line(child) == "has it"
    child.kill()
    child.communicate()
    message: list[str] = []
    with turn(["GPU-1"], "this GPU", message.append):
        assert message == []


def test_runs_on_other_devices_do_not_wait() -> None:
    child = other("GPU-2")
    assert line(child) == "has it"
    with turn(["GPU-1"], "this GPU", pytest.fail):
        child.communicate("")


def test_a_process_started_by_a_run_does_not_wait_for_it() -> None:
    with turn(["GPU-1"], "this GPU", pytest.fail):
        child = other("GPU-1", inherits=True)
        assert line(child) == "has it"
        child.communicate("")
        with turn(["GPU-1", "GPU-2"], "this GPU", pytest.fail):
            assert os.environ[HELD] == "GPU-1,GPU-2"
        assert os.environ[HELD] == "GPU-1"
    assert HELD not in os.environ


def test_a_run_that_cannot_lock_continues_and_reports_it(tmp_path: Path) -> None:
    (tmp_path / "perfsuite-measuring-GPU-1.lock").mkdir()
    message: list[str] = []
    with turn(["GPU-1"], "this GPU", message.append):
        pass
    assert len(message) == 1
    assert "cannot be locked" in message[0]
