"""A measuring process must not outlive the process that started it: an orphan would disturb the next measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scratch import ROOT, runs, wait_for

from perfsuite.system.orphans import PARENT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is signalled on Linux alone")

START = """
import sys
from pathlib import Path
from perfsuite.session.worker_process import start

child = start([sys.executable, *{command!r}], Path({log!r}), environment={{{variables}}})
print(child.pid, flush=True)
sys.stdin.read()
"""


def started(tmp_path: Path, command: list[str], **environment: str) -> tuple[subprocess.Popen[str], int, Path]:
    """Return (a process that has started a worker, the worker's id, its log)."""
    log = tmp_path / "worker.log"
    variables = (
        "".join(f"{k!r}: {v!r}, " for k, v in environment.items()) + f"{PARENT!r}: str(__import__('os').getpid())"
    )
    code = START.format(command=command, log=str(log), variables=variables)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline()), log


def kill(parent: subprocess.Popen[str]) -> None:
    parent.send_signal(signal.SIGKILL)
    parent.communicate()


# Code of a worker that has imported the plugin and then waits.
WAITS = "import sys, time\nimport perfsuite.plugin\nprint('imported', flush=True)\ntime.sleep(3600)"


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    parent, worker, log = started(tmp_path, ["-c", WAITS], PERFSUITE_JOB="job.json")
    try:
        wait_for(lambda: "imported" in log.read_text())
        assert runs(worker)
        kill(parent)
        wait_for(lambda: not runs(worker))
    finally:
        if runs(worker):
            os.kill(worker, signal.SIGKILL)


def test_a_worker_ends_at_once_if_its_parent_ended_before_the_import(tmp_path: Path) -> None:
    """The parent is killed while the worker's Python starts, before the harness's plugin is imported in it."""
    go = tmp_path / "go"
    early = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n{WAITS}"
    parent, worker, log = started(tmp_path, ["-c", early], PERFSUITE_JOB="job.json")
    try:
        kill(parent)
        assert runs(worker)
        go.touch()
        wait_for(lambda: not runs(worker))
        assert "imported" not in log.read_text()
    finally:
        if runs(worker):
            os.kill(worker, signal.SIGKILL)


def test_a_process_that_is_not_a_worker_survives_its_parent(tmp_path: Path) -> None:
    """A process that a worker starts and that imports the plugin again, such as a data loader's, does not end."""
    code = f"import os\nassert {PARENT!r} in os.environ\n" + WAITS
    parent, worker, log = started(tmp_path, ["-c", code])
    try:
        wait_for(lambda: "imported" in log.read_text())
        kill(parent)
        for _ in range(5):  # it must not end; a later end cannot be excluded
            time.sleep(0.01)
            assert runs(worker)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_parent_variable_is_removed_from_the_worker_s_environment(tmp_path: Path) -> None:
    code = f"import os, perfsuite.plugin\nprint('gone' if {PARENT!r} not in os.environ else 'there', flush=True)"
    parent, _, log = started(tmp_path, ["-c", code], PERFSUITE_JOB="job.json")
    wait_for(log.read_text)
    parent.communicate("")
    assert log.read_text() == "gone\n"
