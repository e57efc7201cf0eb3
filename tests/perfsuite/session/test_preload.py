"""The server from which proving processes are forked: when it exists, and what runs in its forks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from scratch import ROOT, SMALL, TWO_LINES, Project, real_workers

from perfsuite.records import WorkloadProof
from perfsuite.session import lanes, preload
from perfsuite.session.fork_server import Command
from perfsuite.session.tasks import PROVE, Task
from perfsuite.session.worker_pool import Workers
from perfsuite.session.worker_process import Lane
from perfsuite.system import machine

pytest_plugins = ["pytester"]

PARENT = """
    from pathlib import Path
    import os

    Path("parent.txt").write_text(Path(f"/proc/{os.getppid()}/cmdline").read_text())
"""


@pytest.fixture
def light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a server import nothing, and be ready once the file at the returned path exists."""
    go = tmp_path / "go"
    (tmp_path / "light.py").write_text(
        f"import pathlib, time\ndef prepare():\n    while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    monkeypatch.setattr(preload, "PREPARE", "light:prepare")
    yield go
    preload.close()


def test_a_new_server_starts_only_if_a_setting_that_modules_read_changes(
    light: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = preload.server()
    assert preload.server() is first
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/x")  # importing the compiler sets it
    monkeypatch.setenv("UNRELATED", "1")
    assert preload.server() is first
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert preload.server() is not first
    assert first._server is None  # it has ended
    preload.close()
    assert not preload._servers


def test_no_worker_starts_while_the_server_prepares(light: Path, tmp_path: Path) -> None:
    """Otherwise all would import torch at the same time and be slower."""
    assert not preload.is_preparing()
    server = preload.server()
    task = Command(module="this", arguments=[], cwd=tmp_path, environment=dict(os.environ), log=tmp_path / "log")
    fork = server.start(task)
    assert preload.is_preparing()
    made = Workers(root=tmp_path, folder=tmp_path / "workers", arguments=[])
    made.prepare([Lane()], ["a"], 1, 9)
    assert not made._waiting
    light.touch()
    assert fork.wait(120) == 0
    assert not preload.is_preparing()


@pytest.mark.parametrize("system", ["linux", "darwin"])
@pytest.mark.parametrize("gpu", [True, False])
def test_forks_are_used_on_linux_with_a_gpu(monkeypatch: pytest.MonkeyPatch, system: str, gpu: bool) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr(preload, "has_gpu", lambda: gpu)
    assert preload.is_useful() is (gpu and system == "linux")


@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        (("gate", "--changed"), 1),
        (("accept", "--reason", "x"), 1),
        (("compare", "HEAD"), 1),
        (("list",), 0),
        (("run", "-k", "nothing"), 0),
    ],
)
def test_the_server_starts_before_anything_is_collected(
    project: Project, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], started: int
) -> None:
    project.write("conftest.py", "raise RuntimeError('this conftest cannot be imported')")
    seen: list[object] = []
    monkeypatch.setattr(preload, "is_useful", lambda: True)
    monkeypatch.setattr(preload, "server", lambda: seen.append(1))
    monkeypatch.setattr(preload, "close", lambda: seen.append(-1))
    assert project.cli(*arguments).exit_code != 0
    assert seen.count(1) == started
    assert seen == [1, -1] * started


def test_a_workload_is_proven_in_a_fork_of_the_server(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write("test_scale.py", PARENT.lstrip("\n") + TWO_LINES)
    monkeypatch.setattr(preload, "is_useful", lambda: True)
    task = Task(id=SMALL, kind=PROVE, thorough=False)
    chosen = lanes.for_proving([task], machine.identify())
    assert [lane.forked for lane in chosen] == [True]
    made = real_workers(project.path)
    try:
        ((id, outcome),) = list(made.run([task], chosen))
    finally:
        made.close()
        preload.close()
    assert id == SMALL
    assert isinstance(outcome, WorkloadProof), outcome
    assert "fork_server.serve" in (project.path / "parent.txt").read_text()
