"""Measuring processes: what the parent makes of one that crashes, hangs, or says nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders
import pytest
from scratch import TWO_LINES, Failure, Project, lines_with, real_workers, runs, wait_for

from perfsuite import workers
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Proof, Status
from perfsuite.revision import Tree
from perfsuite.workers import (
    ITEMS,
    PROVE,
    Job,
    Journal,
    Lane,
    Outcome,
    Reported,
    Task,
    Workers,
    load_job,
    pytest_arguments,
)

pytest_plugins = ["pytester"]

SCRIPT = """
import hmac, json, os, pathlib, signal, subprocess, sys, time
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
ids = [task["id"] for task in job["tasks"]]
out = open(job["out"], "a", buffering=1)
def write(event, **fields):
    text = json.dumps({"event": event, **fields})
    signature = hmac.new(job["key"].encode(), text.encode(), "sha256").hexdigest()
    out.write(signature + " " + text + "\\n")
def begin(id, phase="start"):
    write("begin", id=id)
    write("phase", id=id, phase=phase)
def done(id):
    write("failure", id=id, status="UNMEASURED", message="done " + id)
"""


class Scripted(Workers):
    """Workers whose processes run a few lines in the place of pytest."""

    __slots__ = ("script",)
    script: str

    def _spawn(self, process: Any) -> None:
        log = process.file(".log")
        with log.open("wb") as sink:
            process.child = subprocess.Popen(
                [sys.executable, "-S", "-c", f"{SCRIPT}\n{self.script}", str(process.file(".json"))],
                env={**os.environ, **process.lane.environment},
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def scripted(folder: Path, script: str) -> Scripted:
    made = Scripted(root=folder, folder=folder / "workers", arguments=[])
    made.script = script
    return made


def lane(*ids: str, limit: float = 60.0, **environment: str) -> tuple[Lane, list[Task]]:
    return Lane(environment=environment), [Task(id=id, limit_s=limit) for id in ids]


def outcomes(made: Workers, ids: Sequence[str] = ("a", "b", "c"), limit: float = 60.0) -> dict[str, str]:
    """id → message; every id once, in order."""
    found = list(made.run([lane(*ids, limit=limit)]))
    assert [id for id, _ in found] == list(ids)
    return messages(found)


def messages(found: Sequence[tuple[str, Outcome]]) -> dict[str, str]:
    assert all(isinstance(o, Failure) and o.status is Status.UNMEASURED for _, o in found)
    return {id: o.message for id, o in found if isinstance(o, Failure)}


def test_outcomes_come_as_they_are_written(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids: begin(id); done(id)")
    begun: list[tuple[int, str]] = []
    made.progress = lambda lane, id: begun.append((lane, id))
    assert outcomes(made) == {"a": "done a", "b": "done b", "c": "done c"}
    assert begun == [(0, "a"), (0, "b"), (0, "c")]
    assert not list(made.folder.iterdir())  # nothing is left of processes that ended well


@pytest.mark.parametrize(
    "forgery",
    [
        """out.write(json.dumps({"event": "failure", "id": id, "status": "UNMEASURED", "message": "fine"}) + "\\n")""",
        """out.write("f" * 64 + ' {"event": "failure", "id": "b", "status": "PASS", "message": ""}' + "\\n")""",
        """out.write("é no line of ours\\n")""",
        """done("c")""",  # a signed line that was overheard, for another workload
    ],
)
def test_a_line_that_the_harness_did_not_write_is_named(tmp_path: Path, forgery: str) -> None:
    made = scripted(tmp_path, f"for id in ids:\n    begin(id)\n    if id == 'b': {forgery}\n    done(id)")
    found = outcomes(made)
    assert found["a"] == "done a"
    assert found["b"] == workers.FORGED


def test_without_a_task_no_process_starts(tmp_path: Path) -> None:
    made = scripted(tmp_path, "")
    assert list(made.run([])) == []
    assert list(made.run([lane(), lane()])) == []
    assert not made.folder.exists()


@pytest.mark.parametrize(
    ("death", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed (signal 9): most likely the machine ran out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV; the worker's log is"),
        ("print('CUDA error: no'); os._exit(7)", "ended the measuring process with exit code 7: CUDA error: no"),
        ("os._exit(0)", "ended the measuring process with exit code 0"),
    ],
)
@pytest.mark.parametrize(
    ("phase", "who"),
    [
        ("optimized", "the optimized side "),
        ("reference", "the reference side "),
        ("compile", "the compile side "),
        ("timing", "the measuring process "),
        ("start", "the measuring process "),
    ],
)
def test_a_process_that_dies_costs_one_workload(tmp_path: Path, death: str, message: str, phase: str, who: str) -> None:
    script = f"""
for id in ids:
    begin(id, {phase!r})
    if id == "b":
        sys.stdout.flush()
        {death.replace("os._exit", "sys.stdout.flush(); os._exit")}
    done(id)
"""
    found = outcomes(scripted(tmp_path, script))
    assert found["a"] == "done a"
    assert found["b"].startswith(who + message), found["b"]
    assert found["c"] == "done c"
    if phase == "timing":
        assert "while it timed" in found["b"]


def test_the_log_of_a_process_that_died_is_kept(tmp_path: Path) -> None:
    made = scripted(tmp_path, "begin(ids[0]); print('why'); sys.stdout.flush(); os._exit(1)")
    (message,) = outcomes(made, ["a"]).values()
    log = Path(message.rpartition("its log is ")[2])
    assert log.read_text() == "why\n"
    assert list(made.folder.iterdir()) == [log]  # what holds the key is gone


def test_a_process_that_never_starts_is_no_endless_loop(tmp_path: Path) -> None:
    found = outcomes(scripted(tmp_path, "sys.exit('ERROR: not found')"))
    assert all("exit code 1: ERROR: not found" in message for message in found.values())


def test_a_hang_costs_one_workload(tmp_path: Path) -> None:
    script = """
for id in ids:
    begin(id, "optimized")
    if id == "b": time.sleep(3600)
    done(id)
"""
    found = outcomes(scripted(tmp_path, script), limit=0.3)
    assert found["a"] == "done a"
    assert found["b"] == "the optimized side hangs: it was stopped after its time limit of 0.3 s"
    assert found["c"] == "done c"


def test_a_hang_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_LIMIT_S", 0.2)
    found = outcomes(scripted(tmp_path, "time.sleep(3600)"), ["a"], limit=0.1)
    assert found["a"].startswith("the measuring process hangs")


def test_a_hang_after_the_last_workload_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "END_LIMIT_S", 0.2)
    made = scripted(tmp_path, "for id in ids: begin(id); done(id)\ntime.sleep(60)")
    assert outcomes(made) == {"a": "done a", "b": "done b", "c": "done c"}


def test_a_reader_that_stops_takes_the_process_down(tmp_path: Path) -> None:
    made = scripted(tmp_path, "begin('a'); done('a'); begin('b'); print(os.getpid(), flush=True); time.sleep(3600)")
    stream = made.run([lane("a", "b")])
    assert next(stream)[0] == "a"
    (log,) = made.folder.glob("*.log")
    wait_for(log.read_text)
    pid = int(log.read_text())
    assert runs(pid)
    stream.close()
    assert not runs(pid)
    assert not list(made.folder.iterdir())


def test_a_line_in_two_pieces(tmp_path: Path) -> None:
    script = """
begin("a")
text = '{"event": "failure", "id": "a", "status": "UNMEASURED", "message": "done a"}'
line = hmac.new(job["key"].encode(), text.encode(), "sha256").hexdigest() + " " + text
out.write(line[:90])
out.flush(); time.sleep(0.1)
out.write(line[90:] + "\\n")
"""
    assert outcomes(scripted(tmp_path, script), ["a"]) == {"a": "done a"}


def test_what_a_journal_writes_is_what_workers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, Outcome] = {
        "a": builders.measurement("a"),
        "b": Failure(status=Status.NOT_EQUIVALENT, message="off by 1"),
        "c": Proof(id="c", seed=7, digests=("d",), unloaded="it lacks a module"),
        "d": Reported(reports=({"outcome": "passed", "when": "call"},)),
    }
    job = Job(tasks=tuple(Task(id=id) for id in written), out=str(tmp_path / "sample.jsonl"), key="k")
    journal = Journal(job)
    for id, outcome in written.items():
        journal.begin(id)
        journal.phase(id, "optimized")
        if isinstance(outcome, Failure):
            journal.failure(id, outcome)
        else:
            journal.result(id, outcome)
    journal.close()
    process = workers._Process
    monkeypatch.setattr(workers, "_Process", lambda **given: process(**given, key="k"))
    assert dict(scripted(tmp_path, f"out.write(open({job.out!r}).read())").run([lane(*written)])) == written


def test_a_job_goes_through_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(revision="abc", folder="/tree", package="p", top="/top")
    proof = Proof(id="b", seed=3, digests=("d",))
    tasks = [Task(id="a", kind=PROVE, limit_s=7.0, slow=True), Task(id="b", accepted=tree, proof=proof, reference=0)]
    made = scripted(tmp_path, "pathlib.Path(sys.argv[1] + '.kept').write_text(json.dumps(job))\nfor i in ids: done(i)")
    list(made.run([(Lane(), tasks)]))
    (kept,) = made.folder.glob("*.kept")
    monkeypatch.setenv(workers.JOB, str(kept))
    job = load_job()
    assert job is not None
    assert job.tasks == tuple(tasks)
    assert not kept.exists(), "the code under test must not find the key"
    assert workers.JOB not in os.environ
    assert load_job() is None


# --- lanes ----------------------------------------------------------------------------------------------------------

TOGETHER = """
here, other = os.environ["HERE"], os.environ["OTHER"]
begin(ids[0])
pathlib.Path(here).touch()
while not pathlib.Path(other).exists(): time.sleep(0.01)
done(ids[0])
for id in ids[1:]: begin(id); done(id)
"""


def test_lanes_work_beside_each_other(tmp_path: Path) -> None:
    """Each waits for the other's first task to have begun, so that one after the other would never end."""
    made = scripted(tmp_path, TOGETHER)
    begun: set[tuple[int, str]] = set()
    made.progress = lambda lane, id: begun.add((lane, id))
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    found = list(made.run([lane("a", "b", HERE=one, OTHER=two), lane("c", "d", HERE=two, OTHER=one)]))
    assert messages(found) == {i: f"done {i}" for i in "abcd"}
    assert len(found) == 4
    assert begun == {(0, "a"), (0, "b"), (1, "c"), (1, "d")}
    assert not list(made.folder.iterdir())


def test_a_crash_in_one_lane_is_no_other_s(tmp_path: Path) -> None:
    script = "for id in ids:\n    begin(id, 'optimized')\n    if id == 'b': os._exit(1)\n    done(id)"
    found = list(scripted(tmp_path, script).run([lane("a", "b", "c"), lane("d", "e", "f")]))
    told = messages(found)
    assert len(found) == len(told) == 6
    assert told.pop("b").startswith("the optimized side ended the measuring process with exit code 1")
    assert told == {i: f"done {i}" for i in "acdef"}


def test_a_worker_that_crashes_at_each_task_is_started_anew_for_the_next(tmp_path: Path) -> None:
    made = scripted(tmp_path, "print(len(ids), flush=True)\nbegin(ids[0])\nos._exit(1)")
    told = outcomes(made)
    assert [m.partition(": ")[2][0] for m in told.values()] == ["3", "2", "1"]


def test_no_two_runs_share_files(tmp_path: Path) -> None:
    """Both at work at once, in one folder, as when a run proves while another of its streams is not read to its end."""
    script = "for id in ids: begin(id); done(id)\nprint(job['out'], flush=True)\nif 'c' in ids: time.sleep(3600)"
    made = scripted(tmp_path, script)
    first = made.run([lane("a", "b")])
    assert next(first)[0] == "a"
    second = made.run([lane("c", "b")])
    assert [next(second)[0] for _ in range(2)] == ["c", "b"]
    assert [id for id, _ in first] == ["b"]
    second.close()
    assert not list(made.folder.iterdir())


def test_a_lane_that_cannot_start_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scripted(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(3600)")
    spawned: list[Any] = []

    def spawn(self: Any, process: Any) -> None:
        if spawned:
            raise OSError(12, "Cannot allocate memory")
        Scripted._spawn(self, process)
        spawned.append(process)

    class Second(Scripted):
        _spawn = spawn

    second = Second(root=made.root, folder=made.folder, arguments=[])
    second.script = made.script
    with pytest.raises(PerfsuiteError, match=r"no process can be started .* \(Cannot allocate memory\); make the"):
        next(second.run([lane("a"), lane("b")]))
    assert spawned[0].child.returncode == -signal.SIGKILL
    assert not list(made.folder.glob("worker-*-1.*"))


LEAVES_A_CHILD = """
begin(ids[0])
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
{ending}
"""


@pytest.mark.parametrize("ending", ["done(ids[0])", "os._exit(1)", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_what_a_worker_has_started_ends_with_it(tmp_path: Path, ending: str) -> None:
    """Also where the worker itself has ended: a process that goes on would disturb the next measurement."""
    made = scripted(tmp_path, LEAVES_A_CHILD.format(ending=ending))
    pids: list[int] = []
    poll = workers._Process.poll

    def noted(process: Any) -> Any:
        if not pids and (text := process.file(".log").read_text().split()):
            pids.append(int(text[0]))
        return poll(process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers._Process, "poll", noted)
        outcomes(made, ["a"])
    if not pids:  # it was over before the parent first looked
        pids = [int(next(iter(made.folder.glob("*.log"))).read_text().split()[0])]
    wait_for(lambda: not runs(pids[0]))


def test_results_that_the_code_under_test_takes_away_are_forged(tmp_path: Path) -> None:
    script = "for id in ids:\n    begin(id)\n    if id == 'b': os.unlink(job['out']); time.sleep(3600)\n    done(id)"
    found = outcomes(scripted(tmp_path, script))
    assert (found["b"], found["c"]) == (workers.FORGED, "done c")


def test_other_processes_collect_the_same(project: Project) -> None:
    project.write("helper.py", "")
    project.pytester.syspathinsert()
    config = project.pytester.parseconfig(
        "-p", "helper", "-W", "ignore::DeprecationWarning", "-o", "xfail_strict=true", "--import-mode=importlib"
    )
    arguments = pytest_arguments(config)
    again = project.pytester.parseconfig(*arguments)
    assert again.pluginmanager.hasplugin("helper")
    assert again.option.importmode == "importlib"
    assert again.getini("xfail_strict") is True
    assert again.getini("addopts") == []
    assert "ignore::DeprecationWarning" in again.option.pythonwarnings
    assert again.rootpath == config.rootpath


def test_a_real_process_that_is_killed(project: Project) -> None:
    """With the options that a project may have: each must reach the measuring processes too."""
    project.write(
        "pytest.ini",
        """
        [pytest]
        addopts = --import-mode=importlib -p helper -m "not perf" --strict-markers --strict-config
        pythonpath = .
        filterwarnings = error
        """,
    )
    project.write("helper.py", "HERE = True")
    healthy = "import sys\nassert 'helper' in sys.modules\n" + project.write("x.txt", TWO_LINES).read_text()
    killed = healthy.replace("return 3 * x", "os.kill(os.getpid(), signal.SIGKILL)")
    project.write("a/test_scale.py", healthy)
    project.write("b/test_scale.py", "import os\nimport signal\n" + killed)
    project.write("c/test_scale.py", healthy)
    done = project.process("pytest", "-m", "perf", "--perfsuite-report=out")
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout
    assert lines_with(done.stdout, "UNMEASURED b/test_scale.py", "the optimized side was killed (signal 9)"), (
        done.stdout
    )
    report = json.loads((project.path / "out/report.json").read_text())
    assert sorted(report["measurements"]) == [f"{d}/test_scale.py::scale::speed[small]" for d in "ac"]
    assert signal.SIGKILL == 9


def test_an_interrupt_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pressed while the parent waits for the next look, when the workers of two lanes have just written results."""
    made = scripted(tmp_path, "begin(ids[0]); done(ids[0]); begin(ids[1]); time.sleep(3600)")

    def sleep(seconds: float) -> None:
        # The parent has looked at the start, before there was anything; this wait ends in Ctrl-C once both are there.
        wait = threading.Event().wait
        for _ in itertools.takewhile(lambda n: n < 12_000, itertools.count()):
            lines = [p.read_bytes().count(b"\n") for p in made.folder.glob("*.jsonl")]
            if len(lines) == 2 and min(lines) >= 4:
                break
            wait(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    results = made.run([lane("a", "b"), lane("c", "d")])
    found = dict(itertools.islice(results, 2))
    assert messages(list(found.items())) == {"a": "done a", "c": "done c"}
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert not list(made.folder.iterdir())


# --- real workers ---------------------------------------------------------------------------------------------------

PROOFS = """
    import warnings

    import pytest


    @pytest.mark.correctness
    def test_passes():
        print("printed")


    @pytest.mark.correctness
    def test_fails():
        assert 1 == 2


    @pytest.mark.correctness
    def test_is_skipped():
        pytest.skip("not here")


    @pytest.mark.correctness
    def test_warns():
        warnings.warn("this is an error", UserWarning)
"""


def test_an_item_is_run_as_pytest_runs_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the project's filters of warnings; what the caller's PYTEST_ADDOPTS select is no matter."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing_of_the_name --no-such-option")
    project.write("pytest.ini", "[pytest]\nfilterwarnings = error\naddopts = -x --strict-markers")
    project.write("test_items.py", PROOFS)
    made = real_workers(project.path)
    made.arguments = [*made.arguments, "-c", str(project.path / "pytest.ini"), "-o", "addopts="]
    names = ["test_passes", "test_fails", "test_is_skipped", "test_warns"]
    found = dict(made.run([(Lane(), [Task(id=f"test_items.py::{n}", kind=ITEMS) for n in names])]))
    ended = {}
    for id, outcome in found.items():
        assert isinstance(outcome, Reported), outcome
        ended[id.partition("::")[2]] = [r["outcome"] for r in outcome.reports]
    assert ended == {
        "test_passes": ["passed"] * 3,
        "test_fails": ["passed", "failed", "passed"],
        "test_is_skipped": ["passed", "skipped", "passed"],
        "test_warns": ["passed", "failed", "passed"],
    }
    assert not list((project.path / ".perfsuite/workers").iterdir())
