"""Measuring processes: the parent's reaction to one that crashes, hangs or reports nothing."""

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
from typing import Any

import builders
import pytest
from scale import FULLY
from scratch import SMALL, TWO_LINES, Failure, Project, lines_with, real_workers, runs, wait_for

from perfsuite.errors import PerfsuiteError
from perfsuite.records import Measurement, Status, WorkloadProof
from perfsuite.revisions.revision import Tree
from perfsuite.session import preload, worker_pool, worker_process
from perfsuite.session.tasks import ITEMS, PROVE, Reported, Task
from perfsuite.session.worker_pool import Workers, pytest_arguments
from perfsuite.session.worker_process import Lane, start

pytest_plugins = ["pytester"]

SCRIPT = """
import hmac, json, os, pathlib, signal, subprocess, sys, time
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
out = open(job["out"], "a", buffering=1)
pipe = open(job["tasks"])
def line(event, **fields):
    text = json.dumps({"event": event, **fields})
    return hmac.new(job["key"].encode(), text.encode(), "sha256").hexdigest() + " " + text + "\\n"
def write(event, **fields):
    out.write(line(event, **fields))
def begin(id, phase="start"):
    out.write(line("begin", id=id) + line("phase", id=id, phase=phase))  # at once, since a time limit begins
def done(id):
    write("failure", id=id, status="UNMEASURED", message="done " + id)
def tasks():
    write("ready", id="")
    for line in pipe:
        yield json.loads(line)["task"]
def ids():
    return (task["id"] for task in tasks())
"""


class Scripted(Workers):
    """Workers whose processes run a few lines instead of pytest; `ids()` yields the tasks' ids as they arrive."""

    __slots__ = ("_given", "environments", "script")
    _given: bool
    script: str
    environments: list[dict[str, str]]

    def _spawn(self, process: Any, reader: int) -> None:
        self.environments.append(dict(process.lane.environment))
        with process.file(".log").open("wb") as sink:
            process.child = subprocess.Popen(
                [sys.executable, "-S", "-c", f"{SCRIPT}\n{self.script}", str(process.file(".json"))],
                pass_fds=(reader,),
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def scripted(folder: Path, script: str) -> Scripted:
    made = Scripted(root=folder, folder=folder / "workers", arguments=[])
    made.script, made.environments, made._given = script, [], False
    return made


def tasks_of(ids: Sequence[str] = ("a", "b", "c"), **limits: float) -> list[Task]:
    """Return a task for each id. Limits that its test does not give by id are too long to matter on a busy machine."""
    return [Task(id=id, limit_s=limits.get(id, 60.0)) for id in ids]


def outcomes(made: Workers, ids: Sequence[str] = ("a", "b", "c"), **limits: float) -> dict[str, str]:
    """Return id → message, after checking that every id comes once, in order."""
    found = list(made.run(tasks_of(ids, **limits), [Lane()]))
    assert [id for id, _ in found] == list(ids)
    for _, outcome in found:
        assert isinstance(outcome, Failure)
        assert outcome.status is (Status.NOT_TIMED if outcome.message == worker_process.FORGED else Status.UNMEASURED)
    return {id: o.message for id, o in found if isinstance(o, Failure)}


def test_outcomes_are_yielded_as_they_are_written(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)")
    line: list[tuple[int, str]] = []
    made.progress = lambda lane, id: line.append((lane, id))
    assert outcomes(made) == {"a": "done a", "b": "done b", "c": "done c"}
    assert line == [(0, "a"), (0, "b"), (0, "c")]
    assert not list(made.folder.iterdir())  # files of processes that ended well are removed
    assert len(made.environments) == 1


def test_each_task_goes_to_the_lane_that_is_free_first(tmp_path: Path) -> None:
    script = """
for id in ids():
    begin(id)
    while id == "a" and not pathlib.Path(job["out"]).with_name("c").exists(): time.sleep(0.01)
    if id == "c": pathlib.Path(job["out"]).with_name("c").touch()
    done(id)
"""
    made = scripted(tmp_path, script)
    line: list[tuple[int, str]] = []
    made.progress = lambda lane, id: line.append((lane, id))
    lanes = [Lane(environment={"CUDA_VISIBLE_DEVICES": str(n)}) for n in range(5)]
    found = [id for id, _ in made.run(tasks_of("abc"), lanes[:2])]
    assert sorted(found) == ["a", "b", "c"]
    lane = {id: lane for lane, id in line}
    assert lane["b"] == lane["c"] != lane["a"]
    assert made.environments == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]


def test_no_more_lanes_are_used_than_there_are_tasks(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)")
    assert len(list(made.run(tasks_of("a"), [Lane(), Lane(), Lane()]))) == 1
    assert len(made.environments) == 1


def test_the_number_of_busy_processes_is_reported_as_tasks_end(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)")
    seen: list[object] = []
    for id, _ in made.run(tasks_of("abc"), [Lane()], seen.append):
        seen.append(id)
    assert [x for x in seen if x not in ([], [Lane()])] == ["a", "b", "c"]
    assert seen[-1] == []
    seen.clear()
    lanes = [Lane(environment={"CUDA_VISIBLE_DEVICES": str(n)}) for n in range(3)]
    counts: list[int] = []
    for _ in made.run(tasks_of("abc"), lanes, lambda busy: (seen.extend(busy), counts.append(len(busy)))[1]):
        pass
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0
    assert all(lane in lanes for lane in seen)


def test_the_last_tasks_are_shared_among_the_gpus(tmp_path: Path) -> None:
    """Three processes of a slow GPU wait for the first to end; one of a fast GPU does all the rest."""
    script = """
folder = pathlib.Path(job["out"]).parent
for id in ids():
    begin(id)
    folder.joinpath(id).touch()
    while job["lock"] == "slow" and sum(folder.joinpath(i).exists() for i in "abcdefgh") < 8: time.sleep(0.01)
    write("failure", id=id, status="UNMEASURED", message=job["lock"])
"""
    made = scripted(tmp_path, script)
    slow = Lane(environment={"CUDA_VISIBLE_DEVICES": "0"}, lock="slow")
    quick = Lane(environment={"CUDA_VISIBLE_DEVICES": "1"}, lock="quick")
    by = {id: o.message for id, o in made.run(tasks_of("abcdefgh"), [slow] * 4 + [quick]) if isinstance(o, Failure)}
    assert len(by) == 8
    assert list(by.values()).count("slow") <= 4
    for running, left, due in (
        (["0", "0"], 1, True),
        (["0", "0", "1"], 1, False),
        (["0", "0", "1"], 2, True),
        (["1"], 1, True),
        ([], 1, True),
    ):
        lanes = {"0": slow, "1": quick}
        others: Any = {n: SimpleNamespace(task="t", lane=lanes[d]) for n, d in enumerate(running)}
        free: Any = SimpleNamespace(task=None, lane=slow)
        idle: Any = SimpleNamespace(task=None, lane=slow)
        assert worker_pool._is_due(free, tasks_of("abc")[:left], {**others, 8: free, 9: idle}) is due


def test_further_tasks_go_to_idle_processes(tmp_path: Path) -> None:
    """No process is started if an idle one has not done the task yet."""
    script = """
for id in ids():
    begin(id)
    path = pathlib.Path(job["out"]).with_name(id)
    while id == "slow" and not path.with_name("free").exists(): time.sleep(0.01)
    path.touch()
    write("failure", id=id, status="UNMEASURED", message=str(os.getpid()))
"""
    made = scripted(tmp_path, script)
    asked: list[str] = []

    def further(id: str) -> list[Task]:
        asked.append(id)
        if asked.count("quick") == 2:
            (made.folder / "free").touch()
        return tasks_of(["quick"]) if asked.count(id) < 2 and id == "quick" else []

    ran = made.run(tasks_of(["slow", "quick"]), [Lane()] * 3, further=further)
    found = [(i, o.message) for i, o in ran if isinstance(o, Failure)]
    assert [i for i, _ in found] == ["quick", "quick", "slow"]
    assert len(set(found)) == 3, "the second is done by another process, while the first one waits"
    assert len(made.environments) == 3
    made.environments.clear()
    asked.clear()

    def once_more(id: str) -> list[Task]:
        asked.append(id)
        return tasks_of([id]) if asked.count(id) < 2 else []

    ran = made.run(tasks_of("ab"), [Lane()] * 2, further=once_more)
    found = [(i, o.message) for i, o in ran if isinstance(o, Failure)]
    assert sorted(i for i, _ in found) == ["a", "a", "b", "b"]
    assert len(set(found)) == 4
    made.close()


def test_further_tasks_precede_the_remaining_tasks(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)")
    made.prepare([Lane()], "abcde", 1, 9)
    follow = {"a": tasks_of("de")}
    ran = made.run(tasks_of("abc"), [Lane()], further=lambda id: follow.pop(id, []))
    assert [id for id, _ in ran] == ["a", "b", "d", "e", "c"], "b was given before the caller knew that a had ended"


def test_a_process_gets_no_task_whose_item_it_has_not_collected(tmp_path: Path) -> None:
    """A real worker collects the items that it is given when it starts."""
    script = """
collected = pathlib.Path(sys.argv[1]).with_suffix(".args").read_text().split()
for id in ids():
    begin(id)
    folder = pathlib.Path(job["out"]).parent
    while id == "b" and not (folder / "free").exists(): time.sleep(0.01)
    write("failure", id=id, status="UNMEASURED", message="collected" if id in collected else "not collected")
"""
    made = scripted(tmp_path, script)
    asked: list[str] = []

    def further(id: str) -> list[Task]:
        asked.append(id)
        if asked.count("a") == 2:  # by a process that has started while b was at work
            (made.folder / "free").touch()
        return tasks_of([id]) if asked.count(id) < 4 else []

    found = [o.message for _, o in made.run(tasks_of("ab"), [Lane()] * 3, further=further) if isinstance(o, Failure)]
    assert found == ["collected"] * 8
    made.prepare([Lane()], ["a"], 1, 9)
    assert outcomes(made, ["a", "b"]) == dict.fromkeys("ab", "collected")
    made.close()


def test_tasks_of_the_same_id_go_to_different_processes(tmp_path: Path) -> None:
    script = "for id in ids(): begin(id); write('failure', id=id, status='UNMEASURED', message=str(os.getpid()))"
    for lanes in ([Lane()], [Lane()] * 2, [Lane(lock=str(tmp_path / "gpu-0.lock"))] * 3):
        made = scripted(tmp_path, script)
        made.prepare(lanes, ["a", "b"], 2, 9)
        found = [(id, o.message) for id, o in made.run(tasks_of("aabaab"), lanes) if isinstance(o, Failure)]
        assert sorted(id for id, _ in found) == ["a", "a", "a", "a", "b", "b"]
        assert len(set(found)) == len(found)
        made.close()


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each wait for the GPU last for 1000 s by the clock of the time limits."""
    waited: list[float] = []
    event = worker_process.WorkerProcess._event

    def noted(process: Any, given: Any) -> Any:
        outcome = event(process, given)
        waited.extend([1000.0] if process.phase == "waits" else [])
        return outcome

    monkeypatch.setattr(worker_process.WorkerProcess, "_event", noted)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(waited))
    monkeypatch.setattr(worker_process, "time", clock)


@pytest.mark.usefixtures("long_waits")
def test_the_time_limit_excludes_waiting_for_the_gpu(tmp_path: Path) -> None:
    script = """
def phase(id, name): write("phase", id=id, phase=name)
for id in ids():
    phase(id, "waits"); time.sleep(0.1)
    begin(id, "waits"); time.sleep(0.1)
    phase(id, "timing"); time.sleep(60 if id == "b" else 0.1)
    done(id)
"""
    found = outcomes(scripted(tmp_path, script), ["a", "b"], b=0.5)
    assert found["a"] == "done a"
    assert "hangs" in found["b"]
    assert "while it timed" in found["b"]


@pytest.mark.usefixtures("long_waits")
def test_the_start_limit_excludes_waiting_for_the_gpu(tmp_path: Path) -> None:
    script = """
write("phase", id="", phase="waits"); time.sleep(0.1)
write("phase", id="", phase="start"); time.sleep(0.1)
for id in ids(): begin(id); done(id)
"""
    assert outcomes(scripted(tmp_path, script), ["a"]) == {"a": "done a"}


def test_a_process_gets_the_path_of_its_lane_s_lock(tmp_path: Path) -> None:
    made = scripted(
        tmp_path, "for id in ids(): begin(id); write('failure', id=id, status='UNMEASURED', message=job['lock'])"
    )
    found = list(made.run(tasks_of("a"), [Lane(lock="/x/gpu-0.lock")]))
    assert [o.message for _, o in found if isinstance(o, Failure)] == ["/x/gpu-0.lock"]


def test_processes_that_were_started_ahead_are_used_once(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)")
    made.prepare([Lane()], ["a", "b", "c"], 2, 9)
    assert len(made.environments) == 2
    for _ in range(3):
        assert outcomes(made, ["a", "c"]) == {"a": "done a", "c": "done c"}
    assert len(made.environments) == 3
    made.prepare([Lane()], ["a"], 1, 9)
    outcomes(made, ["a", "b"])  # that process has not collected b
    assert len(made.environments) == 5
    outcomes(made, ["a"])
    assert len(made.environments) == 5
    assert not list(made.folder.iterdir())


def wait_until_started(made: Scripted) -> None:
    deadline = time.monotonic() + 60
    while not all(process.has_started() for process in made._waiting):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_waiting_processes_begin_tasks_of_a_later_run(tmp_path: Path) -> None:
    by_whom = "write('failure', id=id, status='UNMEASURED', message=str(os.getpid()))"
    made = scripted(tmp_path, f"for id in ids(): begin(id); {by_whom}")
    begun_by_lane: list[tuple[int, str]] = []
    made.progress = lambda lane, id: begun_by_lane.append((lane, id))
    lanes = [Lane(environment={"CUDA_VISIBLE_DEVICES": str(n)}) for n in range(2)]
    made.prepare(lanes, ["a", "b", "c", "d"], 2, 9)
    made.begin_early(tasks_of("ab"), [Lane(lock="of another")], 9)
    assert not any(process.task for process in made._waiting)
    wait_until_started(made)
    for most, begun in ((1, "a"), (1, "a"), (3, "abc"), (9, "abc")):
        made.begin_early(tasks_of("abc"), lanes * 2, most)
        assert sorted(p.task.id for p in made._waiting if p.task) == list(begun)
    by = {p.task.id: (p.child.pid, p.lane) for p in made._waiting if p.task}
    assert by["a"][1] != by["b"][1], "each GPU gets as many"
    (other,) = (p for p in made._waiting if not p.task)

    found = dict(made.run(tasks_of("dbxca"), [lanes[0], lanes[1], lanes[0], lanes[1]]))
    assert set(found) == set("abcdx")
    pids = {id: int(o.message) for id, o in found.items() if isinstance(o, Failure)}
    assert all(pids[id] == by[id][0] for id in "abc")
    assert len({lane for lane, id in begun_by_lane if id in "abc"}) == 3
    assert len(made.environments) == 5, "x was collected by no process that waited"
    assert pids["x"] not in {other.child.pid, *(pid for pid, _ in by.values())}
    made.close()


def test_each_gpu_gets_processes_in_turn_and_early_tasks_up_to_its_lanes(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)")
    x, y = (Lane(environment={"CUDA_VISIBLE_DEVICES": n}) for n in "xy")
    made.prepare([x, y], ["a", "b", "c", "d"], 2, 3)
    assert [process.lane for process in made._waiting] == [x, y, x]
    wait_until_started(made)
    assert made.is_any_free([y])
    assert not made.is_any_free([Lane()])
    made.begin_early(tasks_of("abcd"), [x, y, y], 9)
    assert {p.task.id: p.lane for p in made._waiting if p.task} == {"a": x, "b": y}
    assert not made.is_any_free([y])
    made.prepare([x, y], ["a", "b", "c", "d"], 3, 9)
    wait_until_started(made)
    made.begin_early(tasks_of("abcd"), [x, y, y], 9)
    assert [p.lane for p in made._waiting if p.task and p.task.id not in "ab"] == [y]
    made.close()


def test_another_process_prepares_after_one_has_prepared(tmp_path: Path) -> None:
    """A process that waits for its turn before it begins has not prepared yet."""
    script = """
def waits(id): write("phase", id=id, phase="waits")
for id in ids():
    waits(id)
    folder = pathlib.Path(job["out"]).parent
    (folder / f"{id} waits").touch()
    while not (folder / "begin").exists(): time.sleep(0.01)
    begin(id)
    waits(id)
    (folder / f"{id} prepared").touch()
    while not (folder / "end").exists(): time.sleep(0.01)
    done(id)
"""
    made, lanes = scripted(tmp_path, script), [Lane()] * 3
    made.prepare([Lane()], ["a", "b", "c", "d"], 4, 9)
    wait_until_started(made)

    def begun(*awaited: str) -> str:
        wait_for(lambda: all((made.folder / name).exists() for name in awaited))
        made.begin_early(tasks_of("abcd"), lanes, 1)
        return "".join(sorted(p.task.id for p in made._waiting if p.task))

    assert begun() == "a"
    assert begun("a waits") == "a"
    (made.folder / "begin").touch()
    assert begun("a prepared") == "ab"
    assert begun("b prepared") == "abc"
    assert begun("c prepared") == "abc", "there is no lane for d"
    (made.folder / "end").touch()
    assert {id for id, _ in made.run(tasks_of("abcd"), lanes)} == set("abcd")
    made.close()


def test_several_early_tasks_of_a_workload_go_to_different_processes(tmp_path: Path) -> None:
    by_whom = "write('failure', id=id, status='UNMEASURED', message=str(os.getpid()))"
    made, lanes = scripted(tmp_path, f"for id in ids(): begin(id); {by_whom}"), [Lane()] * 3
    made.prepare([Lane()], ["a", "b"], 3, 9)
    wait_until_started(made)
    for tasks, begun in (("a", "a"), ("aa", "aa"), ("aab", "aab"), ("aab", "aab")):
        made.begin_early(tasks_of(tasks), lanes, 9)
        assert sorted(p.task.id for p in made._waiting if p.task) == list(begun)
    found = [(id, outcome.message) for id, outcome in made.run(tasks_of("aab"), lanes) if isinstance(outcome, Failure)]
    assert len(set(found)) == 3
    assert len(made.environments) == 3
    made.close()


def test_early_tasks_of_workloads_that_will_not_be_timed_are_ended(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids(): begin(id); time.sleep(60)")
    made.prepare([Lane()], ["a", "b"], 3, 9)
    wait_until_started(made)
    made.begin_early(tasks_of("ab"), [Lane()] * 2, 9)
    (ended,) = (p for p in made._waiting if p.task and p.task.id == "b")
    made.end_early(["b", "c"])
    assert ended.child.poll() is not None
    assert [p.task and p.task.id for p in made._waiting].count("a") == 1
    assert len(made._waiting) == 2, "one waits still"
    made.close()


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_process_whose_early_task_or_lane_is_not_in_the_run_is_ended(tmp_path: Path, lanes: int) -> None:
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)")
    made.prepare([Lane()], ["a", "b"], 2, 9)
    wait_until_started(made)
    made.begin_early(tasks_of("ab"), [Lane()] * 2, 9)
    children = [process.child for process in made._waiting]
    if lanes == 1:
        assert [id for id, _ in made.run(tasks_of("ab"), [Lane()])] == ["a", "b"]
        assert len(made.environments) == 2, "the process that has begun a does b, too"
    else:
        assert [id for id, _ in made.run(tasks_of("a"), [Lane()] * 2)] == ["a"]
    assert all(child.poll() is not None for child in children)
    assert not list(made.folder.iterdir())


def test_an_early_task_is_used_only_for_an_identical_task(tmp_path: Path) -> None:
    thorough = "write('failure', id=t['id'], status='UNMEASURED', message=str(t['thorough']))"
    made = scripted(tmp_path, f"for t in tasks(): begin(t['id']); {thorough}")
    made.prepare([Lane()], ["a"], 1, 9)
    wait_until_started(made)
    made.begin_early([Task(id="a", thorough=False)], [Lane()], 9)
    ((_, outcome),) = made.run([Task(id="a", thorough=True)], [Lane()])
    assert isinstance(outcome, Failure)
    assert outcome.message == "True"


@pytest.mark.parametrize("early", [False, True])
def test_a_process_that_has_imported_a_revision_gets_no_task_without_one(tmp_path: Path, early: bool) -> None:
    """Importing a revision may replace an operator that the current side calls by name."""
    script = """
imported = False
for task in tasks():
    imported |= task["accepted"] is not None
    begin(task["id"])
    write("failure", id=task["id"], status="UNMEASURED", message=str(imported))
"""
    made = scripted(tmp_path, script)
    tree = Tree(revision="1", folder="", package="", top="")
    x, y, z = Task(id="x"), Task(id="y", accepted=tree), Task(id="z", accepted=tree)
    if early:
        made.prepare([Lane()], "xyz", 1, 9)
        wait_until_started(made)
        made.begin_early([y], [Lane()], 9)
    follow = {"z": [Task(id="x")]}
    ran = made.run([x, y, z], [Lane()], further=lambda id: follow.pop(id, []))
    found = sorted((id, o.message) for id, o in ran if isinstance(o, Failure))
    assert found == [("x", "False"), ("x", "False"), ("y", "True"), ("z", "True")]


@FULLY
def test_all_tasks_end_although_a_process_dies_at_its_start(tmp_path: Path) -> None:
    script = """
folder = pathlib.Path(job["out"]).parent
if job["lock"] == "0" and (folder / "begun").exists(): sys.exit(3)
end = time.monotonic() + 5
for id in ids():
    (folder / "begun").touch()
    begin(id)
    while len(list(folder.glob("*.log"))) < 4 and time.monotonic() < end: time.sleep(0.01)
    done(id)
"""
    made = scripted(tmp_path, script)
    on = [Lane(environment={"CUDA_VISIBLE_DEVICES": n}, lock=n) for n in "01"]
    found = list(made.run(tasks_of("abcd"), [on[0], on[1], on[0], on[0]]))
    assert sorted(id for id, _ in found) == list("abcd")
    lost = [o.message for id, o in found if isinstance(o, Failure) and o.message != f"done {id}"]
    assert all("the measuring process ended with exit code 3" in message for message in lost), lost
    assert len(lost) <= 2, "lane 1 and the first process of lane 0 do their tasks"
    assert len(made.environments) <= 8


def test_a_dead_process_gets_no_early_task(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)")
    made.prepare([Lane()], ["a"], 1, 9)
    wait_until_started(made)
    made._waiting[0].child.kill()
    made._waiting[0].child.wait()
    made.begin_early(tasks_of("a"), [Lane()], 9)
    assert made._waiting[0].task is None
    assert outcomes(made, ["a"]) == {"a": "done a"}


def test_prepare_starts_only_the_missing_processes(tmp_path: Path) -> None:
    made = scripted(tmp_path, "time.sleep(60)")
    lanes = [Lane(environment={"CUDA_VISIBLE_DEVICES": str(n)}) for n in range(2)]
    for each, started in ((1, 2), (3, 6), (2, 6)):
        made.prepare(lanes, ["a"], each, 9)
        assert len(made.environments) == started
    made.close()


def test_a_waiting_process_whose_file_was_removed_is_reported_when_used(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)")
    made.prepare([Lane()], ["a"], 1, 9)
    (process,) = made._waiting
    process.file(".jsonl").unlink()
    assert process.has_started()
    assert outcomes(made, ["a"]) == {"a": worker_process.FORGED}


def test_at_once_limits_the_processes_that_start_at_the_same_time(tmp_path: Path) -> None:
    made = scripted(tmp_path, "for id in ids(): pass")
    deadline = time.monotonic() + 60
    for started in (2, 4, 5, 5):
        made.prepare([Lane()], ["a"], 5, at_once=2)
        made.prepare([Lane()], ["a"], 5, at_once=0)
        assert len(made.environments) == started
        while not all(process.has_started() for process in made._waiting):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    made.close()


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({"HOME": "/h"}, "/h/.triton/cache"),
        ({"HOME": "/h", "TRITON_HOME": "/t"}, "/t/.triton/cache"),
        ({"HOME": "/h", "TRITON_HOME": "/t", "TRITON_CACHE_DIR": "/c"}, "/c"),
    ],
)
def test_workers_share_the_triton_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], folder: str
) -> None:
    """If no folder is set, Inductor moves Triton's in a process that compiles with it."""
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    start(["sh", "-c", 'echo "$TRITON_CACHE_DIR"'], tmp_path / "log").wait()
    assert (tmp_path / "log").read_text().strip() == folder


def test_a_process_that_dies_while_it_waits_is_replaced(tmp_path: Path) -> None:
    script = "if job['ahead']: sys.exit(1)\nfor id in ids(): begin(id); done(id)"
    made = scripted(tmp_path, script)
    made.prepare([Lane()], ["a"], 1, 9)
    made._waiting[0].child.wait()
    assert outcomes(made, ["a"]) == {"a": "done a"}


def test_close_ends_waiting_processes(tmp_path: Path) -> None:
    made = scripted(tmp_path, "time.sleep(60)")
    lanes = [Lane(environment={"CUDA_VISIBLE_DEVICES": str(n)}) for n in range(2)]
    made.prepare(lanes, ["a"], 1, 9)
    children = [process.child for process in made._waiting]
    made.close()
    assert [child.returncode for child in children] == [-signal.SIGKILL] * 2
    assert not list(made.folder.iterdir())
    made.close()


@pytest.mark.parametrize(
    "forgery",
    [
        """out.write(json.dumps({"event": "failure", "id": id, "status": "UNMEASURED", "message": "fine"}) + "\\n")""",
        """out.write("f" * 64 + ' {"event": "failure", "id": "b", "status": "PASS", "message": ""}' + "\\n")""",
        """out.write("é no line of ours\\n")""",
        """done("c")""",  # a line with a valid signature, for another workload
    ],
)
def test_a_line_that_the_harness_did_not_write_is_reported_as_forged(tmp_path: Path, forgery: str) -> None:
    made = scripted(tmp_path, f"for id in ids():\n    begin(id)\n    if id == 'b': {forgery}\n    done(id)")
    found = outcomes(made)
    assert found["a"] == "done a"
    assert found["b"] == worker_process.FORGED


def test_no_process_is_started_without_tasks(tmp_path: Path) -> None:
    made = scripted(tmp_path, "")
    assert list(made.run([], [Lane()])) == []
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
def test_a_process_that_dies_fails_only_its_workload(
    tmp_path: Path, death: str, message: str, phase: str, who: str
) -> None:
    script = f"""
for id in ids():
    begin(id, {phase!r})
    if id == "b":
        sys.stdout.flush()
        {death.replace("os._exit", "sys.stdout.flush(); os._exit")}
    done(id)
"""
    found = outcomes(scripted(tmp_path, script))
    assert found["a"] == "done a"
    if who == "the measuring process ":
        message = message.replace("ended the measuring process", "ended")
    assert found["b"].startswith(who + message), found["b"]
    assert found["c"] == "done c"
    if phase == "timing":
        assert "while it timed" in found["b"]


def test_the_log_of_a_process_that_died_is_kept(tmp_path: Path) -> None:
    made = scripted(tmp_path, "begin(next(ids())); print('why'); sys.stdout.flush(); os._exit(1)")
    (message,) = outcomes(made, ["a"]).values()
    log = Path(message.rpartition("its log is ")[2])
    assert log.read_text() == "why\n"


def test_processes_that_never_start_fail_every_workload(tmp_path: Path) -> None:
    found = outcomes(scripted(tmp_path, "sys.exit('ERROR: not found')"))
    assert all("exit code 1: ERROR: not found" in message for message in found.values())


def test_a_hang_fails_only_its_workload(tmp_path: Path) -> None:
    script = """
for id in ids():
    begin(id, "optimized")
    if id == "b": time.sleep(60)
    done(id)
"""
    began = time.monotonic()
    found = outcomes(scripted(tmp_path, script), b=0.3)
    assert time.monotonic() - began < 30
    assert found["a"] == "done a"
    assert found["b"] == "the optimized side hangs: it was stopped after its time limit of 0.3 s"
    assert found["c"] == "done c"


def test_a_hang_at_the_start_is_stopped_after_the_start_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "START_LIMIT_S", 0.2)
    found = outcomes(scripted(tmp_path, "time.sleep(60)"), ["a"], a=0.1)
    assert found["a"] == "the measuring process hangs: it was stopped after its time limit of 0.2 s"


def test_a_hang_after_the_last_workload_fails_no_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "END_LIMIT_S", 0.2)
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)\ntime.sleep(60)")
    assert outcomes(made) == {"a": "done a", "b": "done b", "c": "done c"}


def test_closing_the_stream_of_outcomes_ends_the_process(tmp_path: Path) -> None:
    script = """
given = ids()
next(given); begin("a"); done("a"); next(given); begin("b")
pathlib.Path(job["out"] + ".pid").write_text(str(os.getpid()))
time.sleep(60)
"""
    stream = scripted(tmp_path, script).run(tasks_of("ab"), [Lane()])
    assert next(stream)[0] == "a"
    pid_file = next(iter((tmp_path / "workers").glob("*.jsonl"))).with_suffix(".jsonl.pid")
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stream.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_line_written_in_two_pieces_is_read_as_one(tmp_path: Path) -> None:
    script = """
begin(next(ids()))
text = '{"event": "failure", "id": "a", "status": "UNMEASURED", "message": "done a"}'
line = hmac.new(job["key"].encode(), text.encode(), "sha256").hexdigest() + " " + text
out.write(line[:90])
out.flush(); time.sleep(0.1)
out.write(line[90:] + "\\n")
"""
    assert outcomes(scripted(tmp_path, script), ["a"]) == {"a": "done a"}


JOURNAL = """
sys.path[:0] = {path}
from perfsuite.session.journal import Journal, load_job
from perfsuite.records import Status
from perfsuite.session.tasks import Failure
import builders
os.environ["PERFSUITE_JOB"] = sys.argv[1]
journal = Journal(load_job())
assert not os.path.exists(sys.argv[1]), "the code under test must not find the key"
assert "PERFSUITE_JOB" not in os.environ and load_job() is None
for task in journal.tasks():
    journal.begin(task.id)
    journal.phase(task.id, "optimized")
    if task.id == "a":
        journal.result("a", builders.measurement("a"))
    else:
        journal.failure(task.id, Failure(status=Status.NOT_EQUIVALENT, message=str(task.accepted.revision)))
journal.close()
"""


AWAITING = """
sys.path[:0] = {path}
from perfsuite.errors import PerfsuiteError
from perfsuite.session.journal import Journal, load_job
from perfsuite.records import Status
from perfsuite.session.tasks import Failure
os.environ["PERFSUITE_JOB"] = sys.argv[1]
journal = Journal(load_job())
for task in journal.tasks():
    journal.begin(task.id)
    try:
        proof = journal.proof() if task.awaits_proof and task.id != "fails early" else task.proof
    except PerfsuiteError as error:
        (pathlib.Path(journal.job.out).parent / "said").write_text(str(error))
        raise SystemExit(0)
    journal.failure(task.id, Failure(status=Status.NOISY, message=str(proof and proof.seed)))
"""


def awaiting(tmp_path: Path) -> Scripted:
    """Return workers with two waiting processes, each of which reports the seed of the proof that it gets."""
    made = scripted(tmp_path, AWAITING.replace("{path}", repr(sys.path)))
    made.prepare([Lane()], ["a", "b", "c", "fails early"], 2, 9)
    wait_until_started(made)
    return made


def seeds(found: Any) -> dict[str, str]:
    return {id: outcome.message for id, outcome in found}


def test_a_process_that_has_begun_early_gets_its_proof_later(tmp_path: Path) -> None:
    made, lanes = awaiting(tmp_path), [Lane()] * 2
    early = [Task(id=i, seed=7, awaits_proof=True) for i in "ab"]
    made.begin_early(early, lanes, 9)
    children = [process.child for process in made._waiting]
    proofs = {i: WorkloadProof(id=i, seed=7) for i in "abc"}
    for id in "cab":
        made.deliver(proofs[id])
        made.deliver(proofs[id])  # a second call has no effect
    tasks = [Task(id=i, proof=proofs[i]) for i in "abc"]
    assert seeds(made.run(tasks, lanes)) == dict.fromkeys("abc", "7")
    assert len(made.environments) == 2, "c went to one of the two"
    assert all(child.poll() is not None for child in children)


def test_a_process_whose_proof_is_not_delivered_is_ended(tmp_path: Path) -> None:
    made, lanes = awaiting(tmp_path), [Lane()] * 2
    made.begin_early([Task(id="a", seed=7, awaits_proof=True)], lanes, 9)
    assert seeds(made.run([Task(id="a", proof=WorkloadProof(id="a", seed=8))], lanes)) == {"a": "8"}
    made.close()
    assert not list(made.folder.glob("worker-*")), "it may still have said that its proof never came"


def test_a_proof_that_arrives_after_a_failure_is_not_used_for_the_next_task(tmp_path: Path) -> None:
    made, lanes = awaiting(tmp_path), [Lane()]
    made.begin_early([Task(id="fails early", seed=7, awaits_proof=True)], lanes, 9)
    proof = WorkloadProof(id="fails early", seed=7)
    made.deliver(proof)
    tasks = [Task(id="fails early", proof=proof), Task(id="b", proof=WorkloadProof(id="b", seed=9))]
    assert seeds(made.run(tasks, lanes)) == {"fails early": "None", "b": "9"}
    assert len(made.environments) == 2
    made.close()


def test_a_worker_whose_proof_never_arrives_reports_it(tmp_path: Path) -> None:
    made = awaiting(tmp_path)
    made.begin_early([Task(id="a", seed=7, awaits_proof=True)], [Lane()], 9)
    (process,) = [p for p in made._waiting if p.task]
    process.close_pipe()
    assert process.child.wait(60) == 0
    assert (made.folder / "said").read_text() == "its proof never came"
    made.close()


def test_workers_read_what_a_journal_writes(tmp_path: Path) -> None:
    tree = Tree(folder=str(tmp_path), package="perfsuite_revision_abc", top=str(tmp_path), revision="abc")
    tasks = [Task(id="a", limit_s=60), Task(id="b", limit_s=60, accepted=tree)]
    found = dict(scripted(tmp_path, JOURNAL.replace("{path}", repr(sys.path))).run(tasks, [Lane()]))
    assert found == {
        "a": builders.measurement("a"),
        "b": Failure(status=Status.NOT_EQUIVALENT, message="abc"),
    }
    assert isinstance(found["a"], Measurement)


def test_a_lane_finishes_a_pair_before_the_next(tmp_path: Path) -> None:
    given = [Task(id=id, kind=ITEMS, limit_s=60.0) for id in ("p::a", "q::a", "p::b", "p::c", "q::b")]
    made = scripted(tmp_path, "for id in ids(): begin(id); done(id)")
    assert [id for id, _ in made.run(given, [Lane()])] == ["p::a", "p::b", "p::c", "q::a", "q::b"]


def test_a_crash_in_one_lane_does_not_affect_the_others(tmp_path: Path) -> None:
    script = "for id in ids():\n    begin(id, 'optimized')\n    if id == 'b': os._exit(1)\n    done(id)"
    found = dict(scripted(tmp_path, script).run(tasks_of("abcdef"), [Lane(), Lane()]))
    line = {id: o.message for id, o in found.items() if isinstance(o, Failure)}
    assert line.pop("b").startswith("the optimized side ended the measuring process with exit code 1")
    assert line == {i: f"done {i}" for i in "acdef"}


def test_a_worker_that_crashes_at_each_task_is_restarted(tmp_path: Path) -> None:
    made = scripted(tmp_path, "begin(next(ids()))\nos._exit(1)")
    assert all("exit code 1" in message for message in outcomes(made).values())
    assert len(made.environments) == 3


def test_a_process_in_which_an_item_failed_gets_no_other_task(tmp_path: Path) -> None:
    """After the capture of a CUDA graph has failed, later captures in the same process fail, too."""
    script = """
for id in ids():
    begin(id)
    outcome = "failed" if id in "bd" else "passed"
    reports = [{"outcome": "passed"}, {"outcome": outcome, "process": os.getpid()}]
    write("reported", id=id, result={"reports": reports})
"""
    made, process = scripted(tmp_path, script), {}
    for id, outcome in made.run([Task(id=id, kind=ITEMS, limit_s=60.0) for id in "abcde"], [Lane()]):
        assert isinstance(outcome, Reported)
        process[id] = outcome.reports[1]["process"]
    assert len(made.environments) == len(set(process.values())) == 3
    assert process["a"] == process["b"]
    assert process["c"] == process["d"]


def test_no_two_runs_share_files(tmp_path: Path) -> None:
    """Both run at once in one folder, as when a run proves while another of its streams is not read to its end."""
    made = scripted(tmp_path, "for id in ids():\n    begin(id)\n    done(id)\n    if id == 'd': time.sleep(3600)")
    first = made.run(tasks_of("ab"), [Lane()])
    assert next(first)[0] == "a"
    second = made.run(tasks_of("cdb"), [Lane()])
    assert [next(second)[0] for _ in range(2)] == ["c", "d"]
    assert [id for id, _ in first] == ["b"]
    second.close()
    assert not list(made.folder.iterdir())


def test_a_lane_that_cannot_start_stops_the_others(tmp_path: Path) -> None:
    spawned: list[Any] = []

    class Second(Scripted):
        def _spawn(self, process: Any, reader: int) -> None:
            if spawned:
                raise OSError(12, "Cannot allocate memory")
            super()._spawn(process, reader)
            spawned.append(process)

    second = Second(root=tmp_path, folder=tmp_path / "workers", arguments=[])
    second.script, second.environments, second._given = "time.sleep(3600)", [], False
    with pytest.raises(PerfsuiteError, match=r"no process can be started .* \(Cannot allocate memory\); make the"):
        next(second.run(tasks_of("ab"), [Lane(), Lane()]))
    assert spawned[0].child.returncode == -signal.SIGKILL


LEAVES_A_CHILD = """
begin(next(ids()))
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
pathlib.Path(job["out"]).with_suffix(".child").write_text(str(child.pid))
{ending}
"""


@pytest.mark.parametrize("ending", ["done('a')", "os._exit(1)", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_child_processes_of_a_worker_end_with_it(tmp_path: Path, ending: str) -> None:
    """They end even if the worker itself has ended: a surviving process would disturb the next measurement."""
    made = scripted(tmp_path, LEAVES_A_CHILD.format(ending=ending))
    outcomes(made, ["a"])
    (child,) = made.folder.glob("*.child")
    wait_for(lambda: not runs(int(child.read_text())))


def test_results_that_the_code_under_test_deletes_are_reported_as_forged(tmp_path: Path) -> None:
    script = "for id in ids():\n    begin(id)\n    if id == 'b': os.unlink(job['out']); time.sleep(3600)\n    done(id)"
    found = outcomes(scripted(tmp_path, script))
    assert (found["b"], found["c"]) == (worker_process.FORGED, "done c")


def test_workers_get_the_pytest_options_of_the_run(project: Project) -> None:
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


def test_workers_get_the_options_that_a_conftest_adds(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\naddopts = --fast --sizes 1 2 -q")
    project.write(
        "conftest.py",
        """
        def pytest_addoption(parser):
            parser.addoption("--fast", action="store_true")
            parser.addoption("--slow", action="store_false")
            parser.addoption("--device", action="append")
            parser.addoption("--sizes", nargs=2, type=int)
            parser.addoption("--rest", nargs="*")
            parser.getgroup("more").addoption("--shift", type=float, default=0.5)
        """,
    )
    config = project.pytester.parseconfig(
        "--device", "cpu", "--device=cuda", "--shift", "-2.5", "--rest", "a", "b", "-v"
    )
    arguments = pytest_arguments(config)
    option = project.pytester.parseconfig(*arguments).option
    assert (option.fast, option.slow, option.device) == (True, True, ["cpu", "cuda"])
    assert (option.sizes, option.shift, option.rest) == ([1, 2], -2.5, ["a", "b"])
    assert not option.maxfail
    project.write("pytest.ini", "[pytest]")
    project.write("conftest.py", "def pytest_addoption(parser): parser.addoption('--shift')")
    option = project.pytester.parseconfig(*arguments).option  # of files beside which another conftest lies
    assert option.shift == "-2.5"


def test_workers_get_the_options_that_a_plugin_of_the_project_adds(project: Project) -> None:
    """Options of pytest itself, of perfsuite and of installed plugins are not among them."""
    project.write("nested.py", "def pytest_addoption(parser): parser.addoption('--nested')")
    project.write(
        "helper.py",
        """
        pytest_plugins = ["nested"]

        def pytest_addoption(pluginmanager, parser):
            parser.addoption("--by", type=int, default=3)
        """,
    )
    project.pytester.syspathinsert()
    project.monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # then an installed plugin, too, is named by -p
    config = project.pytester.parseconfig(
        "-p", "perfsuite.plugin", "-p", "helper", "-p", "pytester", "-p", "pytest_benchmark.plugin",
        "--by", "2", "--nested=x", "--lsof", "--perfsuite-report=out", "--benchmark-quiet",
    )  # fmt: skip
    arguments = pytest_arguments(config)
    assert [a for a in arguments if "-project-argument" in a] == [
        f"--perfsuite-project-argument={a}" for a in ("--by", "2", "--nested=x")
    ]
    option = project.pytester.parseconfig(*arguments).option
    assert (option.by, option.nested) == (2, "x")


@FULLY
def test_a_worker_proves_the_side_that_an_option_of_the_project_selects(project: Project) -> None:
    project.write(
        "conftest.py",
        """
        import os

        def pytest_addoption(parser):
            parser.addoption("--by", type=int, default=3)

        def pytest_configure(config):
            import by
            by.BY = config.getoption("--by")
        """,
    )
    project.write("by.py", "BY = 3")
    project.pytester.syspathinsert()
    project.write("x.txt", TWO_LINES.replace("return 3 * x", "return by.BY * x"))
    project.write("test_scale.py", "import by\n" + (project.pytester.path / "x.txt").read_text())
    result = project.run("-k", "equivalence", "--perfsuite-isolate=always", "--by", "2")
    assert result.ret == 1
    assert "output of the optimized side is wrong" in result.stdout.str()


@FULLY
def test_a_workload_whose_real_process_is_killed_is_unmeasured(project: Project) -> None:
    """The options that a project may have must reach the measuring processes, too."""
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


def test_ctrl_c_keeps_the_results_that_were_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is pressed between two polls of the parent, when the worker has just written a result."""
    script = "given = ids(); next(given); begin('a'); done('a'); next(given); begin('b'); time.sleep(60)"
    made = scripted(tmp_path, script)

    def sleep(seconds: float) -> None:
        # The first wait ends once the worker is ready. The wait after the first task was given ends in Ctrl-C, once
        # the result is written.
        deadline = time.monotonic() + 60
        wanted = 4 if made._given else 1
        while sum(p.read_bytes().count(b"\n") for p in made.folder.glob("*.jsonl")) < wanted:
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        if wanted == 4:
            raise KeyboardInterrupt
        made._given = True

    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    results = made.run(tasks_of("ab"), [Lane()])
    id, outcome = next(results)
    assert id == "a"
    assert isinstance(outcome, Failure)
    assert outcome.message == "done a"
    with pytest.raises(KeyboardInterrupt):
        next(results)


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
    """The project's warning filters apply; the caller's PYTEST_ADDOPTS do not select items."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing_of_the_name --no-such-option")
    project.write("pytest.ini", "[pytest]\nfilterwarnings = error\naddopts = -x --strict-markers")
    project.write("test_items.py", PROOFS)
    made = real_workers(project.path)
    made.arguments = [*made.arguments, "-c", str(project.path / "pytest.ini"), "-o", "addopts="]
    names = ["test_passes", "test_is_skipped", "test_fails", "test_warns"]  # one more process, after the first failure
    found = dict(made.run([Task(id=f"test_items.py::{n}", kind=ITEMS) for n in names], [Lane()]))
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


@pytest.mark.parametrize(
    ("others", "collected"), [([], False), pytest.param(["equivalence[float32]"], True, marks=FULLY)]
)
def test_a_worker_collects_other_items_only_if_it_needs_them(
    project: Project, others: list[str], collected: bool
) -> None:
    text = (
        TWO_LINES
        + """
    from pathlib import Path

    import pytest


    @pytest.mark.parametrize("value", [1], ids=lambda value: Path("collected").touch())
    def test_other(value):
        pass
"""
    )
    project.write("test_scale.py", text)
    tasks = [Task(id=SMALL, kind=PROVE), *(Task(id=SMALL.replace("speed[small]", o), kind=ITEMS) for o in others)]
    found = dict(real_workers(project.path).run(tasks, [Lane()]))
    assert isinstance(found[SMALL], WorkloadProof), found
    assert all(isinstance(found[task.id], Reported) for task in tasks[1:]), found
    assert (project.path / "collected").exists() is collected


@pytest.mark.parametrize("forked", [False, pytest.param(True, marks=FULLY)])
def test_a_worker_exits_when_pytest_has_ended(project: Project, forked: bool) -> None:
    """Fixtures are torn down and child processes ended; handlers of the interpreter's own end do not run."""
    text = """
        import atexit
        import pathlib
        import subprocess
        import sys

        import pytest

        atexit.register(lambda: pathlib.Path("at-exit").touch())
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path("child").write_text(str(child.pid))


        @pytest.fixture(scope="session")
        def opened():
            yield
            pathlib.Path("torn-down").touch()


        @pytest.mark.correctness
        def test_passes(opened):
            pass
    """
    project.write("test_items.py", text)
    made = real_workers(project.path)
    ((_, outcome),) = made.run([Task(id="test_items.py::test_passes", kind=ITEMS)], [Lane(forked=forked)])
    made.close()
    preload.close()
    assert isinstance(outcome, Reported), outcome
    assert (project.path / "torn-down").exists()
    assert not (project.path / "at-exit").exists()
    wait_for(lambda: not runs(int((project.path / "child").read_text())))
