"""The README's example is proven, timed, accepted and gated in a project outside the repository.

Processes and times are real, so no test may depend on how fast or how quiet this machine is. Whatever the gate decides,
its exit code and its output must agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from click.testing import Result
from scale import FULL, FULLY
from scratch import ROOT, SMALL, TWO_LINES, Project, lines_with, times

from perfsuite.baseline import storage
from perfsuite.gate import decision
from perfsuite.gate.exit_codes import CODE_AT_FAULT, GREEN, UNDECIDED
from perfsuite.records import Status
from perfsuite.session import lanes
from perfsuite.session.modes import paired
from perfsuite.session.progress import Progress
from perfsuite.session.tasks import PROVE, TIME, Task
from perfsuite.session.worker_process import Lane, WorkerProcess

pytest_plugins = ["pytester"]

DOTS = "test_dots.py::dots::speed[rows256]"
FAST = "return (x * y).sum(-1)"


def example() -> str:
    """Return the example file in the README."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if "test_dots.py" in block]
    assert FAST in text
    return str(text)


@pytest.fixture
def two_stages(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Make a project whose gate decides after two measuring processes, which are started ahead on any number of cores.

    Nothing else differs, and half a minute is saved.
    """
    monkeypatch.setattr(lanes, "started_ahead", lambda machine, lanes, memory, workloads: 2)
    monkeypatch.setattr(decision, "STAGES", (1, 2))
    monkeypatch.setattr(decision, "RED_PROCESSES", 2)
    monkeypatch.setattr(paired, "MOST_PROCESSES", 2)
    return project


def share_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two processes prepare at the same time, as on a GPU."""
    shared = lambda self, tasks: lanes.for_timing(self.machine, self.workers.folder, 2)  # noqa: E731
    monkeypatch.setattr(paired.Paired, "timing_lanes", shared)


def verdict(project: Project, done: Result, id: str) -> Status:
    """Return the verdict, after checking that the exit code and the output agree with it."""
    assert "Traceback" not in done.output
    report = json.loads((project.path / ".perfsuite/report/report.json").read_text())
    assert list(report["verdicts"]) == [id]
    assert len(report["measurements"][id]) == 2
    status = Status(report["verdicts"][id]["status"])
    assert status in (Status.PASS, Status.IMPROVED, Status.NOISY, Status.REGRESSED, Status.BELOW_FLOOR)
    assert done.exit_code == (GREEN if status.green else CODE_AT_FAULT if status.blames_code else UNDECIDED)
    assert lines_with(done.output, f"1 {status}"), done.output
    return status


def test_the_readmes_example_is_proven(project: Project) -> None:
    project.write("test_dots.py", example())
    project.run("-m", "correctness").assert_outcomes(passed=6, deselected=1)


def test_the_readmes_example_from_times_to_gate(two_stages: Project) -> None:
    """The example works in a plain folder, outside of git.

    Usually only the gate measures, and the accepted figures are simulated. `make test-all` measures everything.
    """
    project = two_stages
    project.write("test_dots.py", example())

    if FULL:  # it times what `accept` times again
        timed = project.run("-m", "perf")
        assert timed.ret == 0
        timed.assert_outcomes(passed=1, deselected=6)
        assert lines_with(timed.stdout.str(), "rows256", "×")

    command = ("accept", "--reason", "first", "--processes", "3")
    refused = project.cli(*command)
    assert refused.exit_code == pytest.ExitCode.USAGE_ERROR
    assert lines_with(refused.output, "not in a git repository", "accept with --allow-dirty")
    with nullcontext() if FULL else project.pretending(times(speedup=90.0, sizes={"n": 256, "d": 64})):
        accepted = project.cli(*command, "--allow-dirty")
    assert accepted.exit_code == 0, accepted.output
    assert lines_with(accepted.output, DOTS, "added at")
    (path,) = (project.path / "baselines").glob("*.json")
    entry = storage.load(path).entries[DOTS]
    assert (entry.reason, entry.revision, entry.promises.speedup) == ("first", None, 5.0)
    assert [len(s.processes) for s in entry.sessions] == [3]

    done = project.cli("gate")
    verdict(project, done, DOTS)
    report = json.loads((project.path / ".perfsuite/report/report.json").read_text())
    assert report["verdicts"][DOTS]["compared"] == "stored figures"
    assert {tuple(m["log_ratios"]) for m in report["measurements"][DOTS]} == {("reference",)}
    assert sorted(p.name for p in project.path.iterdir() if not p.name.startswith((".", "__"))) == [
        "baselines",
        "test_dots.py",
    ]


@FULLY
def test_compare_times_two_revisions_of_a_project_in_git(two_stages: Project) -> None:
    project = two_stages
    project.write("test_scale.py", TWO_LINES)
    first = project.commit()
    project.replace("test_scale.py", "3 * x", "3.0 * x")
    done = project.cli("compare", "HEAD")
    status = verdict(project, done, SMALL)
    assert lines_with(done.output, "the revision", first[:7]) or status is Status.PASS
    assert project.git("status", "--porcelain", "--untracked-files=no") == "M test_scale.py"
    report = json.loads((project.path / ".perfsuite/report/report.json").read_text())
    assert report["verdicts"][SMALL]["compared"] == f"the revision {first[:7]}"
    assert [set(m["log_ratios"]) for m in report["measurements"][SMALL]] == [{"accepted"}] * 2


@FULLY
def test_two_processes_share_a_device(two_stages: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes take the tasks of a round, as on a GPU."""
    project = two_stages
    share_the_device(monkeypatch)
    begun: list[tuple[int, str]] = []
    monkeypatch.setattr(Progress, "begin", lambda self, lane, id: begun.append((lane, id)))
    one = 'Workload("small", n=64, clock="wall")'
    project.write("test_scale.py", TWO_LINES.replace(one, f'{one}, Workload("other", n=65, clock="wall")'))
    project.commit()
    accepted = project.cli("accept", "--reason", "first", "--processes", "3")
    assert accepted.exit_code == 0, accepted.output
    begun.clear()
    done = project.cli("gate", "--report", "out")
    report = json.loads((project.path / "out/report.json").read_text())
    assert {len(m) for m in report["measurements"].values()} <= {1, 2}
    assert len(report["measurements"]) == 2
    assert "UNMEASURED" not in done.output
    timed = begun[2:4]  # the proofs come first
    assert sorted(lane for lane, _ in timed) == [0, 1]


WAITING = """
import os, time
import torch
from perfsuite import Pair, Workload, side, tensor

def optimized(x):
    while not os.path.exists("begun"):
        time.sleep(0.01)
    return 3 * x

scale = Pair(
    reference=side(lambda x: x * 3),
    optimized=optimized,
    inputs=dict(x=tensor("n")),
    workloads=[Workload("small", n=64, clock="wall"), Workload("other", n=65, clock="wall")],
)
"""


@FULLY
def test_processes_prepare_before_their_proofs_have_ended(two_stages: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs end only after the processes have prepared, as on a GPU."""
    project = two_stages
    project.write("test_scale.py", WAITING)
    (project.path / "begun").touch()
    (project.path / ".gitignore").write_text("begun\n")
    project.commit()
    accepted = project.cli("accept", "--reason", "first", "--processes", "3")
    assert accepted.exit_code == 0, accepted.output
    (project.path / "begun").unlink()

    share_the_device(monkeypatch)
    monkeypatch.setattr(lanes, "started_at_once", lambda machine, busy: 2)
    start_ahead = paired.Paired._start_ahead

    def also_here(self: paired.Paired, ids: Sequence[str], busy: Sequence[Lane]) -> None:
        start_ahead(self, ids, busy)
        if ids:
            self._begin_early(ids, busy)

    begun: list[Task] = []
    begin = WorkerProcess.begin

    def noted(self: WorkerProcess, task: Task) -> None:
        begin(self, task)
        begun.append(task)
        if sum(task.awaits_proof for task in begun) == 1:
            (project.path / "begun").touch()

    monkeypatch.setattr(paired.Paired, "_start_ahead", also_here)
    monkeypatch.setattr(WorkerProcess, "begin", noted)
    done = project.cli("gate", "--report", "out")
    report = json.loads((project.path / "out/report.json").read_text())
    assert "UNMEASURED" not in done.output, done.output
    assert [task.kind for task in begun].count(PROVE) == 2
    early = [task.id for task in begun if task.awaits_proof]
    assert early
    for id in early:
        timed = [task for task in begun if task.id == id and task.kind == TIME]
        assert len(timed) == len(report["measurements"][id]), "the first was not given again"
        assert report["measurements"][id][0]["seed"] == timed[0].seed


@FULLY
@pytest.mark.parametrize("name", ["check", "measure"])
def test_the_readmes_example_works_in_a_notebook(project: Project, name: str) -> None:
    import perfsuite

    namespace: dict[str, object] = {"__name__": "notebook"}
    exec(compile(example(), "notebook", "exec"), namespace)
    found, *_ = getattr(perfsuite, name)(namespace["dots"])
    assert found.pair
    if name == "check":
        assert found.worst < 1
        assert found.draws > 0
    else:
        assert set(found.log_ratios) == {"reference"}
        assert found.sides["optimized"].blocks_s
