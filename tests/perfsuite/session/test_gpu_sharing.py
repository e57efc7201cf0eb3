"""Processes prepare beside each other on one GPU, and time alone."""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scale import FULLY
from scratch import SMALL, TWO_LINES, Project

from perfsuite.errors import PerfsuiteError
from perfsuite.session import gpu_sharing
from perfsuite.session.worker_pool import Workers
from perfsuite.session.worker_process import Lane

pytest_plugins = ["pytester"]

SCRIPT = """
import sys
sys.path.insert(0, {top!r})
from perfsuite.session.gpu_sharing import Gpu
gpu = Gpu({lock!r})
for line in sys.stdin:
    getattr(gpu, line.strip())()
    print(line.strip(), flush=True)
"""
TOP = str(Path(gpu_sharing.__file__).parents[2])


class Other:
    """Another process: `ask` starts an action there, `did` waits for its end."""

    def __init__(self, lock: str) -> None:
        script = SCRIPT.format(top=TOP, lock=lock)
        self.child = subprocess.Popen(
            [sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{what}\n")
        self.child.stdin.flush()

    def did(self, what: str) -> None:
        assert self.child.stdout is not None
        assert self.child.stdout.readline().strip() == what

    def do(self, what: str) -> None:
        self.ask(what)
        self.did(what)


@contextmanager
def processes(lock: str, count: int) -> Iterator[list[Other]]:
    made = [Other(lock) for _ in range(count)]
    try:
        yield made
    finally:
        for other in made:
            other.child.kill()
            other.child.communicate()


def next_of(*others: Other) -> Other:
    """Return the process whose request is granted first."""
    ready, _, _ = select.select([other.child.stdout for other in others], [], [], 30)
    return next(other for other in others if other.child.stdout in ready)


def is_blocked(process: subprocess.Popen[Any]) -> bool:
    """Return whether the kernel lets the process wait for a lock."""
    waiting = [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return any(f" {process.pid} " in line for line in waiting)


def wait_until_blocked(process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 30
    while not is_blocked(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux's list of locks")
def test_several_processes_prepare_and_one_times(tmp_path: Path) -> None:
    with processes(str(tmp_path / "gpu.lock"), 3) as (a, b, c):
        for other in (a, b):
            other.do("prepare")
        a.ask("alone")
        wait_until_blocked(a.child)
        b.ask("alone")  # gives up its share, so that the two do not wait for each other
        first = next_of(a, b)
        first.did("alone")
        second = b if first is a else a
        wait_until_blocked(second.child)
        c.ask("prepare")
        wait_until_blocked(c.child)
        first.do("leave")
        third = next_of(second, c)
        for other in (third, c if third is second else second):
            other.did("prepare" if other is c else "alone")
            other.do("leave")


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux's list of locks")
def test_all_ready_processes_time_before_another_prepares(tmp_path: Path) -> None:
    with processes(str(tmp_path / "gpu.lock"), 4) as (a, b, c, d):
        for other in (a, b, c):
            other.do("prepare")
        a.ask("alone")
        wait_until_blocked(a.child)
        d.ask("prepare")
        wait_until_blocked(d.child)  # although a has not begun to time
        b.do("leave")
        c.ask("alone")
        first = next_of(a, c)
        first.did("alone")
        first.ask("prepare")  # it has timed, and lets the other one time before it prepares again
        second = a if first is c else c
        second.did("alone")
        wait_until_blocked(first.child)
        second.do("leave")
        for other in (first, d):
            other.did("prepare")


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux's list of locks")
def test_processes_prepare_but_do_not_time_during_proofs(tmp_path: Path) -> None:
    lock, elsewhere = str(tmp_path / "made" / "gpu-0.lock"), str(tmp_path / "gpu-1.lock")
    with processes(elsewhere, 1) as (other,), gpu_sharing.proving([lock, "", lock]), processes(lock, 2) as (a, b):
        other.do("alone")
        a.do("prepare")
        a.ask("alone")
        wait_until_blocked(a.child)
        b.do("prepare")  # although a waits to time
        b.do("leave")
    with processes(lock, 1) as (c,), processes(elsewhere, 1) as (d,):
        with gpu_sharing.proving([lock, elsewhere]):
            for process in (c, d):
                process.ask("alone")
                wait_until_blocked(process.child)
        for process in (c, d):
            process.did("alone")


def test_a_lock_folder_that_cannot_be_created_raises_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(PerfsuiteError, match=r"file/gpu-0.lock cannot be locked \(File exists\); make"),
        gpu_sharing.proving([str(tmp_path / "file" / "gpu-0.lock")]),
    ):
        raise AssertionError


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux's list of locks")
def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    with processes(str(tmp_path / "gpu.lock"), 2) as (a, b):
        a.do("alone")
        a.do("alone")  # a second call does no harm
        b.ask("prepare")
        wait_until_blocked(b.child)
        a.child.kill()
        b.did("prepare")


def test_without_a_lock_nothing_waits() -> None:
    gpu = gpu_sharing.Gpu("")
    assert not gpu.shared
    gpu.prepare()
    gpu.alone()
    gpu.leave()


@FULLY
@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux's list of locks")
def test_a_process_does_not_start_while_another_times_on_its_device(project: Project, tmp_path: Path) -> None:
    """It does not even import torch; and the other process waits until it has started."""
    project.write("test_scale.py", TWO_LINES)
    lock = str(tmp_path / "gpu-0.lock")
    made = Workers(root=project.path, folder=tmp_path / "workers", arguments=["-q", "-m", "", "-p", "perfsuite.plugin"])
    with processes(lock, 1) as (other,):
        other.do("alone")
        made.prepare([Lane(lock=lock)], [SMALL], 1, 1)
        (process,) = made._waiting
        try:
            wait_until_blocked(process.child)
            other.do("leave")
            while not process.ready:
                assert list(process.poll(deque())) == []
            other.do("alone")
        finally:
            made.close()
