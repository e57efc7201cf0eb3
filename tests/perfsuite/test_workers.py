"""Measuring processes: what the parent makes of one that crashes, hangs, or says nothing."""

from __future__ import annotations

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

import builders
import pytest
from scratch import TWO_LINES, Failure, Project, lines_with

from perfsuite import workers
from perfsuite.records import Measurement, Status
from perfsuite.workers import Job, Journal, Workers, load_job, pytest_arguments

pytest_plugins = ["pytester"]

SCRIPT = """
import hmac, json, os, pathlib, signal, sys, time
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
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
    """Workers whose processes run a few lines in the place of pytest; `ids` are the job's."""

    __slots__ = ("script",)
    script: str

    def _spawn(self, selection: Path, job_file: Path, log: Path) -> subprocess.Popen[bytes]:
        code = f"{SCRIPT}\nids = job['ids']\n{self.script}"
        with log.open("wb") as sink:
            return subprocess.Popen(
                [sys.executable, "-S", "-c", code, str(job_file)],
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def scripted(folder: Path, script: str, limit: float = 60.0) -> Scripted:
    made = Scripted(root=folder, folder=folder / "workers", arguments=[], limits=dict.fromkeys("abc", limit))
    made.script = script
    return made


def outcomes(made: Workers, ids: Sequence[str] = ("a", "b", "c")) -> dict[str, str]:
    """id → message; every id once, in order."""
    found = list(made.run(ids))
    assert [id for id, _ in found] == list(ids)
    assert all(isinstance(o, Failure) and o.status is Status.UNMEASURED for _, o in found)
    return {id: o.message for id, o in found if isinstance(o, Failure)}


def test_outcomes_come_as_they_are_written(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids: begin(id); done(id)")
    told: list[tuple[int, str]] = []
    made.progress = lambda process, id: told.append((process, id))
    assert outcomes(made) == {"a": "done a", "b": "done b", "c": "done c"}
    assert told == [(1, "a"), (1, "b"), (1, "c")]
    outcomes(made)
    assert told[3:] == [(2, "a"), (2, "b"), (2, "c")]
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


def test_no_ids_no_process(tmp_path: Path) -> None:
    made = scripted(tmp_path, "")
    assert list(made.run([])) == []
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


def test_a_process_that_never_starts_is_no_endless_loop(tmp_path: Path) -> None:
    found = outcomes(scripted(tmp_path, "sys.exit('ERROR: not found')"))
    assert all("exit code 1: ERROR: not found" in message for message in found.values())


def test_a_hang_costs_one_workload(tmp_path: Path) -> None:
    script = """
for id in ids:
    begin(id, "optimized")
    if id == "b": time.sleep(60)
    done(id)
"""
    began = time.monotonic()
    found = outcomes(scripted(tmp_path, script, limit=0.3))
    assert time.monotonic() - began < 30
    assert found["a"] == "done a"
    assert found["b"] == "the optimized side hangs: it was stopped after its time limit of 0.3 s"
    assert found["c"] == "done c"


def test_a_hang_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_LIMIT_S", 0.2)
    found = outcomes(scripted(tmp_path, "time.sleep(60)", limit=0.1), ["a"])
    assert found["a"].startswith("the measuring process hangs")


def test_a_hang_after_the_last_workload_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "END_LIMIT_S", 0.2)
    made = scripted(tmp_path, "for id in ids: begin(id); done(id)\ntime.sleep(60)")
    assert outcomes(made) == {"a": "done a", "b": "done b", "c": "done c"}


def test_a_reader_that_stops_takes_the_process_down(tmp_path: Path) -> None:
    script = """
begin("a"); done("a"); begin("b")
pathlib.Path(job["out"] + ".pid").write_text(str(os.getpid()))
time.sleep(60)
"""
    stream = scripted(tmp_path, script).run(["a", "b"])
    assert next(stream)[0] == "a"
    pid_file = next(iter((tmp_path / "workers").glob("*.jsonl"))).with_suffix(".jsonl.pid")
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stream.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


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
    measured = builders.measurement("a")
    job = Job(ids=("a", "b"), out=str(tmp_path / "sample.jsonl"), key="k")
    monkeypatch.setattr(workers.secrets, "token_hex", lambda: "k")
    journal = Journal(job)
    journal.begin("a")
    journal.phase("a", "optimized")
    journal.measurement(measured)
    journal.begin("b")
    journal.failure("b", Failure(status=Status.NOT_EQUIVALENT, message="off by 1"))
    journal.close()
    script = f"out.write(open({job.out!r}).read())"
    found = dict(scripted(tmp_path, script).run(["a", "b"]))
    assert found == {"a": measured, "b": Failure(status=Status.NOT_EQUIVALENT, message="off by 1")}
    assert isinstance(found["a"], Measurement)


def test_a_job_goes_through_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "pathlib.Path(sys.argv[1] + '.kept').write_text(json.dumps(job))\nfor id in ids: begin(id); done(id)"
    made = scripted(tmp_path, script)
    list(made.run(["a", "b"], accepted={"b": ("/tree", "abc"), "z": ("/tree", "abc")}))
    (kept,) = made.folder.glob("*.kept")
    monkeypatch.setenv(workers.JOB, str(kept))
    job = load_job()
    assert job is not None
    assert job.ids == ("a", "b")
    assert job.accepted == {"b": ("/tree", "abc")}
    assert not kept.exists(), "the code under test must not find the key"
    assert workers.JOB not in os.environ
    assert load_job() is None


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


def test_ctrl_c_loses_nothing_that_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pressed while the parent waits for the next look, when the worker has just written a result."""
    made = scripted(tmp_path, "begin('a'); done('a'); begin('b'); time.sleep(60)")

    def sleep(seconds: float) -> None:
        # The parent has looked at the start, before there was anything; this wait ends in Ctrl-C once 'b' has begun.
        deadline = time.monotonic() + 60
        while sum(p.read_bytes().count(b"\n") for p in made.folder.glob("*.jsonl")) < 5 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    results = made.run(["a", "b"])
    id, outcome = next(results)
    assert id == "a"
    assert isinstance(outcome, Failure)
    assert outcome.message == "done a"
    with pytest.raises(KeyboardInterrupt):
        next(results)
