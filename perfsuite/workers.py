"""Measuring processes: a pytest on the same node ids, which gets one task after the other and writes lines of JSON.

Several lanes may work beside each other, one process each: a lane for each GPU while timing, one for each core while
proving. A process that crashes, hangs or is killed costs one task: the parent names the side that was running, and
starts a new process in its lane.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from perfsuite import preload
from perfsuite.cores import ANY, Cores, confined
from perfsuite.errors import PerfsuiteError
from perfsuite.folders import own_folder
from perfsuite.forks import Command, Fork
from perfsuite.orphans import PARENT
from perfsuite.records import Alone, Measurement, Proof, Status, from_json, to_json
from perfsuite.revision import Tree

if TYPE_CHECKING:
    import pytest

JOB = "PERFSUITE_JOB"
TASKS = "PERFSUITE_TASKS"
"""Environment variable of a fork: the file descriptor from which it reads its tasks."""
IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"
"""pytest would warn that it cannot rewrite assertions in what the server has imported."""
FORGED = (
    "a result that the harness did not write appeared among its own: code under test writes to the results file; "
    "nothing of this process is believed"
)
POLL_S, MEANWHILE_S = 0.02, 0.5
START_LIMIT_S = 300.0
"""Seconds from a worker's start to its first task: importing torch and the test modules."""
BEGIN_LIMIT_S = 10.0
"""Seconds from when a worker gets a task to when it begins it."""
END_LIMIT_S = 3.0
"""Seconds from a worker's last task to its end. Its results are known by then, so it is stopped without a message. The
run waits for it, because the next processes must have the device for themselves; some take 7 s, or hang at exit."""
LOG_LINES = 3
PROVE, TIME, ITEMS, ALONE = "prove", "time", "items", "alone"
OUTSIDE = "outside"
"""The name of the items that need a child process, which takes seconds to start."""
OUTSIDE_CHILDREN = 3
"""Groups of the `outside` items. For 46 pairs on an H200, one lane does these items in 185 s, and twelve lanes do all
other items together in 90 s."""
WAITS = "waits"
"""The phase of a process that waits until others let it have their GPU; its time limit does not count meanwhile."""
OF_NO_SIDE = ("start", "timing", "profiler", WAITS)
"""Phases in which the process runs no side alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a task has no result, in one line."""

    status: Status
    message: str
    skipped: bool = False
    case: str = ""
    """The draw that a proof was at when its process ended."""
    crowded: bool = False
    """Whether the task lacked memory while other processes held much of it: it is to be done again once none of them
    runs."""


NEVER_REACHED = Failure(status=Status.UNMEASURED, message="its measuring process never reached it")
"""The failure of a task that has no outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """Outcome of a correctness item: pytest's own reports of its phases, as JSON."""

    reports: tuple[Any, ...]

    @property
    def seconds(self) -> float:
        """Seconds that its phases took."""
        return sum(float(report["duration"]) for report in self.reports)

    @property
    def has_failed(self) -> bool:
        """Whether a phase of it failed."""
        return any(report["outcome"] == "failed" for report in self.reports)


Outcome: TypeAlias = Measurement | Proof | Reported | Alone | Failure
RESULTS: Mapping[str, Any] = {"measurement": Measurement, "proof": Proof, "reported": Reported, "alone": Alone}
"""Event of a worker → the class of its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One thing that a worker is to do with one item: prove a workload, time it or its reference alone, or run a
    correctness item."""

    id: str
    kind: str = TIME
    limit_s: float = START_LIMIT_S
    accepted: Tree | None = None
    """The tree of the revision whose optimized side joins."""
    seed: int | None = None
    """The seed of the inputs. None: the proof has it, or the worker draws one."""
    proof: Proof | None = None
    awaits_proof: bool = False
    """The process prepares on inputs of `seed`. It gets its proof later, as another line."""
    reference: int | None = None
    """Number of blocks in which the reference joins one round; None for all rounds."""
    blocks: int | None = None
    """Most blocks; None for as many as usual."""
    note_ran: bool = False
    """While proving, note everything that the optimized side runs."""
    launched: str = ""
    """Digest of what the optimized side launched when it was accepted. With one, the worker traces the side first, and
    proves nothing if it launches the same."""
    changed: tuple[str, ...] = ()
    """The sources that differ from the accepted ones. Each must be one that only the optimized side runs, or the
    workload is proven whatever it launches."""
    same_code: tuple[str, ...] = ()
    """The sources of a workload whose current code is the accepted one. If the process that proves has loaded these
    files, it leaves the accepted side out."""
    enough_s: float = 0.0
    """While proving, call the reference once, until it has taken this many seconds; 0 if it is not called for that."""
    thorough: bool = True
    """Prove or time rivals, too, and time on the other clock."""
    new_values: bool = True
    """Between the blocks, time calls on new values."""
    slow: bool = False
    """The reference is slow: outputs that are the accepted side's, bit for bit, are proven by that."""
    case: str = ""
    """Prove this draw alone."""
    side: str = ""
    """Only call this side, "reference" or "optimized", on the draw."""
    left_out: tuple[str, ...] = ()
    """Draws on which the reference faults."""
    crowded: bool = True
    """Other processes of this run may hold much of the memory."""
    clock: str = ""
    """The clock that the reference is timed on alone: that of its measurements."""
    alternates: str = ""
    """Time block by block, in turns with a process of another environment, over a socket at this path."""
    second: bool = False
    """Then that process times the first block first."""
    outside: bool = False
    """Then also time the optimized side where no test is running."""

    @property
    def group(self) -> str:
        """Tasks of one group share what is made once a process: the correctness items of a pair, their truths; a part
        of the items that call a side where no test is running, the child that does it."""
        if self.kind != ITEMS:
            return self.id
        pair = self.id.rpartition("::")[0]
        return f"{OUTSIDE} {zlib.crc32(pair.encode()) % OUTSIDE_CHILDREN}" if self.needs_child else pair

    @property
    def needs_child(self) -> bool:
        """Whether the task calls a side where no test is running."""
        return self.kind == ITEMS and self.id.endswith(f"::{OUTSIDE}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Instructions that one worker gets when it starts. Its tasks come one by one."""

    out: str
    """The file that it writes a line for each event to."""
    tasks: int = 0
    """The file descriptor from which it reads a line for each task."""
    key: str = ""
    """Signs the worker's lines, so that code under test cannot add lines of its own."""
    note_ran: bool = False
    """Whether a task may ask for all that a side runs: data files are then noted as they are opened."""
    ahead: bool = False
    """Whether there is time until the first task."""
    lock: str = ""
    """The lock file of a GPU that it shares with other processes of this run (sharing.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One process at a time, with environment variables of its own, e.g. the GPU that it uses."""

    environment: Mapping[str, str] = field(default_factory=dict)
    lock: str = ""
    """The lock file of a GPU that several lanes share."""
    cores: Cores = ANY
    """The cores that its processes run on."""
    python: str = ""
    """The interpreter of its processes; empty for this one's."""
    forked: bool = False
    """Its processes are forks of a server that has imported torch. Not for timing: all forks of a process share its
    memory addresses, which change the speed of host code, and the rule needs processes that vary independently."""

    @property
    def device(self) -> str:
        """The GPU that it uses; empty where there is no choice."""
        return self.environment.get("CUDA_VISIBLE_DEVICES", "")


def devices_of(lanes: Sequence[Lane]) -> list[Lane]:
    """Return a lane for each device: those that prepare beside each other are equal."""
    return [lane for n, lane in enumerate(lanes) if lane not in lanes[:n]]


@dataclass(slots=True)
class Workers:
    """Starts processes for one pytest run, gives them tasks, and reads what they write.

    `progress` is called with (lane, id) as each task begins.
    """

    root: Path
    folder: Path
    arguments: Sequence[str]
    progress: Callable[[int, str], None] = lambda lane, id: None
    _waiting: list[_Process] = field(default_factory=list)

    def prepare(self, lanes: Sequence[Lane], ids: Sequence[str], each: int, at_once: int) -> None:
        """Start processes until there are `each` for each lane. They import what they need and wait for a later `run`.

        No more than `at_once` start at the same time, and none while the server of the forked lanes imports torch,
        which is waited for: call it again for the others.
        """
        if preload.is_preparing():
            return
        starting = sum(not process.has_started() for process in self._waiting)
        for wanted in range(1, each + 1):
            for lane in devices_of(lanes):  # in turn, so that each GPU has some early
                if starting < at_once and sum(process.lane == lane for process in self._waiting) < wanted:
                    self._waiting.append(self._process(lane, ids, ahead=True))
                    starting += 1

    def is_any_free(self, lanes: Sequence[Lane]) -> bool:
        """Return whether a process waits for a task on one of the lanes."""
        return any(process.lane in lanes and process.is_free() for process in self._waiting)

    def begin_early(self, tasks: Sequence[Task], lanes: Sequence[Lane], most: int) -> None:
        """Give these tasks, in this order, to processes that wait for the lanes, until `most` prepare at the same time.

        Several tasks may have the same id: each goes to another process. A GPU gets no more than it has lanes. A later
        `run` on these lanes takes the processes over. Those whose very task it does not have are ended then.
        """
        begun = Counter(process.task.id for process in self._waiting if process.task)
        busy = [process.lane for process in self._waiting if process.task]
        preparing = sum(not process.has_prepared() for process in self._waiting if process.task)
        for task in tasks:
            if begun[task.id]:
                begun[task.id] -= 1
                continue
            free = [
                p
                for p in self._waiting
                if task.id in p.ids and busy.count(p.lane) < lanes.count(p.lane) and p.is_free()
            ]
            if preparing >= most or not free:
                return
            process = min(free, key=lambda process: busy.count(process.lane))
            process.begin(task)
            busy.append(process.lane)
            preparing += 1

    def end_early(self, ids: Collection[str]) -> None:
        """End the processes that have begun tasks of these workloads early."""
        for process in [p for p in self._waiting if p.task and p.task.id in ids]:
            self._waiting.remove(process)
            process.end()

    def deliver(self, proof: Proof) -> None:
        """Give the proof to the process that has begun early and awaits it, if there is one."""
        for process in self._waiting:
            if process.task and process.task.id == proof.id and process.task.awaits_proof:
                process.deliver(proof)

    def run(
        self,
        tasks: Sequence[Task],
        lanes: Sequence[Lane],
        meanwhile: Callable[[Sequence[Lane]], None] = lambda busy: None,
        further: Callable[[str], Sequence[Task]] | None = None,
    ) -> Generator[tuple[str, Outcome]]:
        """Do the tasks in order, each in the lane that is free first. Yield (id, outcome) as each task ends.

        Several tasks may have the same id: each goes to another process. Once the caller has handled an outcome,
        `further` is called with the task's id and returns tasks that come before those that are left, so that no
        lane waits for them at the end.

        Every MEANWHILE_S, and as tasks and processes end, `meanwhile` is called with the lane of each process that has
        not ended.
        """
        left, running, leaving = deque(tasks), dict[int, _Process](), list[_Process]()
        interrupt: KeyboardInterrupt | None = None
        called = time.monotonic()
        try:
            self._take_over(lanes, left, running)
            while left or running or leaving:
                due = time.monotonic() > called + MEANWHILE_S
                if interrupt is None:
                    self._fill(lanes, left, running)
                for number, process in list(running.items()):
                    gets = process.child.poll() is not None or _is_due(process, left, running)
                    for id, outcome in process.poll(left if gets else deque()):
                        due = True
                        yield id, outcome
                        left.extendleft(reversed(further(id) if further else ()))
                    if process.over:
                        del running[number]
                exiting = [*leaving, *_without_tasks(left, running, more=further is not None)]
                leaving = [process for process in exiting if process.lives()]
                if due or len(leaving) < len(exiting):
                    meanwhile([process.lane for process in (*running.values(), *leaving)])
                    called = time.monotonic()
                if interrupt is not None:
                    raise interrupt
                try:
                    time.sleep(POLL_S)
                except KeyboardInterrupt as error:
                    interrupt = error  # results that are already written are not lost
                    for process in running.values():
                        process.interrupt()
        finally:
            for process in (*running.values(), *leaving):
                process.end()

    def _fill(self, lanes: Sequence[Lane], left: Collection[Task], running: dict[int, _Process]) -> None:
        """Get a process for each lane that has none, as far as there are tasks for it."""
        for number, lane in enumerate(lanes):
            if number not in running and sum(p.can_take(left) for p in running.values()) < len(left):
                working = [p.task for p in running.values() if p.task]
                running[number] = self._next(number, lane, left, working)

    def close(self) -> None:
        """End the processes that wait for tasks."""
        while self._waiting:
            self._waiting.pop().end()

    def _take_over(self, lanes: Sequence[Lane], left: deque[Task], running: dict[int, _Process]) -> None:
        """Assign each process that has begun tasks of `left` early to a lane of its own."""
        for process in [p for p in self._waiting if p.task and p.lane in lanes]:
            self._waiting.remove(process)
            number = next((n for n, lane in enumerate(lanes) if lane == process.lane and n not in running), None)
            if process.task is None or number is None or process.task not in left:
                process.end()
                continue
            left.remove(process.task)
            process.number, running[number] = number, process

    def _started_ahead(self, lane: Lane, ids: Collection[str]) -> list[_Process]:
        """Return the processes that were started ahead for this lane, have collected these items and wait for a
        task."""
        return [p for p in self._waiting if p.lane == lane and not p.task and p.ids.issuperset(ids)]

    def _next(self, number: int, lane: Lane, left: Collection[Task], working: Collection[Task]) -> _Process:
        """Return a process for the lane that has collected, or will collect, the items of these tasks and of those that
        others work at.

        Any of them may be the item of a further task.
        """
        ids = list(dict.fromkeys(t.id for t in [*left, *working]))
        noted = any(t.note_ran for t in left)
        process = (None if noted else self._prepared(lane, ids)) or self._process(lane, ids, noted=noted)
        process.number = number
        return process

    def _prepared(self, lane: Lane, ids: Sequence[str]) -> _Process | None:
        for process in self._started_ahead(lane, ids):
            self._waiting.remove(process)
            if process.child.poll() is None:
                return process
            process.end()
        return None

    def _process(self, lane: Lane, ids: Sequence[str], *, noted: bool = False, ahead: bool = False) -> _Process:
        stem = self.folder / f"worker-{os.getpid()}-{next(_numbers)}"
        process = _Process(lane=lane, ids=frozenset(ids), stem=stem, progress=self.progress)
        try:
            reader = process.open(ids, noted=noted, ahead=ahead)
            try:
                self._spawn(process, reader)
            finally:
                os.close(reader)
        except OSError as error:
            process.close_pipe()
            raise PerfsuiteError(
                f"no process can be started in {self.folder}, which cannot be used ({error.strerror or error}); make "
                "the project's folder writable, with space on it"
            ) from None
        return process

    def _spawn(self, process: _Process, reader: int) -> None:
        log, variables = process.file(".log"), {**process.lane.environment, JOB: str(process.file(".json"))}
        items = f"@{process.file('.args')}"
        if not process.lane.forked:
            command = [process.lane.python or sys.executable, "-m", "pytest", *self.arguments, items]
            variables[PARENT] = str(os.getpid())
            with confined(process.lane.cores):
                process.child = start(command, log, cwd=self.root, environment=variables, descriptors=(reader,))
            return
        arguments, environment = [*self.arguments, "-W", IMPORTED_BEFORE, items], preload.environment_of(variables)
        forked = Command(module="pytest", arguments=arguments, cwd=self.root, environment=environment, log=log)
        process.child = preload.server().start(forked, (TASKS, reader))


def _is_due(process: _Process, left: Collection[Task], running: Mapping[int, _Process]) -> bool:
    """Return whether the process's GPU may get another task: at most its share of those that have not ended.

    Otherwise one GPU might do the last tasks one after the other while another has nothing left to do.
    """
    others = [p.lane.device for p in running.values() if p.task and p is not process]
    devices = {p.lane.device for p in running.values()}
    return others.count(process.lane.device) * len(devices) < len(left) + len(others)


def _without_tasks(left: Collection[Task], running: dict[int, _Process], *, more: bool) -> Iterator[_Process]:
    """Remove from `running` the processes without a task. If `more` tasks may follow, these processes wait while others
    work."""
    wait = more and not left and any(process.task for process in running.values())
    for number, process in list(running.items()):
        if not wait and not process.task and not process.can_take(left):
            process.leave()
            yield running.pop(number)


_numbers = itertools.count(1)
"""One count for the whole run: a process must never meet the files of another that is still at work."""


@dataclass(slots=True)
class _Process:
    """One worker: the task that it is at, and what it has written so far. `ids` are the items that it has collected."""

    lane: Lane
    ids: frozenset[str]
    stem: Path
    progress: Callable[[int, str], None]
    number: int = 0
    task: Task | None = None
    group: str = ""
    """The last task's group."""
    seen: set[str] = field(default_factory=set)
    """Ids of the tasks that the process has got."""
    failed: bool = False
    """Whether a correctness item failed in the process. It gets no other task: a side that raises may leave the device
    in a state that fails what comes after it, as in the middle of capturing a CUDA graph."""
    imported: bool = False
    """Whether the process has got a task with another revision, which may have replaced what the current side calls by
    name."""
    child: subprocess.Popen[bytes] | Fork = field(init=False)
    lines: Lines = field(init=False)
    key: str = field(default_factory=secrets.token_hex)
    phase: str = "start"
    ready: bool = False
    served: bool = False
    """Whether the process has got a task."""
    over: bool = False
    interrupted: bool = False
    case: str = ""
    """The draw that a proof is at."""
    fault: str = ""
    """Why the process ends itself."""
    deadline: float = 0.0
    _pipe: int | None = None

    def file(self, suffix: str) -> Path:
        return self.stem.with_suffix(suffix)

    def open(self, ids: Sequence[str], *, noted: bool, ahead: bool) -> int:
        """Make the files that the worker reads and the one that it writes. Return the descriptor that its tasks come
        from."""
        out = self.file(".jsonl")
        own_folder(out.parent)
        reader, self._pipe = os.pipe()
        job = Job(out=str(out), tasks=reader, key=self.key, note_ran=noted, ahead=ahead, lock=self.lane.lock)
        self.file(".json").write_text(json.dumps(to_json(job)))
        self.file(".args").write_text("\n".join(ids))
        out.touch()
        self.lines = Lines(out)
        self._wait(START_LIMIT_S)
        return reader

    def has_started(self) -> bool:
        """Return whether the process waits for tasks, or has ended."""
        return self._has_written_or_ended(b'"event": "ready"')

    def has_prepared(self) -> bool:
        """Return whether the process waits with its task for its proof or for its GPU, or has ended."""
        return self._has_written_or_ended(f'"phase": "{WAITS}"'.encode(), after=b'"event": "begin"')

    def _has_written_or_ended(self, words: bytes, *, after: bytes = b"") -> bool:
        try:
            written = self.file(".jsonl").read_bytes()
        except OSError:
            return True  # the code under test has removed the file, which `poll` reports once the process is used
        return self.child.poll() is not None or words in (written.partition(after)[2] if after else written)

    def poll(self, left: deque[Task]) -> Iterator[tuple[str, Outcome]]:
        """Yield the outcomes since the last time; a crash or a hang is one. Takes the next task from `left` when
        free."""
        ended = self.child.poll() is not None
        try:
            lines = self.lines.new()
        except OSError:
            lines = [b"the file is gone"]  # no line of the harness, as any other that the code under test changes
        for line in lines:
            event = _verified(line, self.key)
            if event is None or event["id"] != (self.task.id if self.task else ""):
                if self.task or self._may_begin(left):
                    yield self._stop(FORGED, left, Status.NOT_TIMED)
                else:
                    self.end()  # no line is valid after the last result
                return
            outcome = self._event(event)
            if outcome is not None and self.task is not None:
                done, self.task = self.task, None
                self.failed |= isinstance(outcome, Reported) and outcome.has_failed
                if not ended and not self.interrupted:
                    self._give(left)  # before the caller deals with the outcome
                yield done.id, outcome
        if self.interrupted:
            self.end()
        elif self.ready and not self.task and not ended and self._pipe is not None:
            self._give(left)
        elif self.task or self._may_begin(left):
            if ended:
                yield self._stop(_died(self.phase, self._epitaph()), left)
            elif time.monotonic() > self.deadline and self.phase != WAITS:
                limit = self.task.limit_s if self.task else START_LIMIT_S
                text = f"hangs: it was stopped after its time limit of {limit:g} s"
                yield self._stop(_died(self.phase, text), left)
        elif ended:
            self.end()

    def can_take(self, left: Collection[Task]) -> bool:
        """Return whether the process waits for a task and one of these is for it."""
        return not self.task and any(self._is_for(task) for task in left)

    def _may_begin(self, left: Collection[Task]) -> bool:
        """Return whether the process has had no task yet, and one of these is for it."""
        return not self.served and any(self._is_for(task) for task in left)

    def _is_for(self, task: Task) -> bool:
        """Return whether the process has collected the task's item, has not had a task of it before, and has neither
        failed nor imported anything since that the task does not import."""
        unused = task.id in self.ids and task.id not in self.seen
        return unused and not self.failed and not (self.imported and task.accepted is None)

    def leave(self) -> None:
        """Tell the process to exit. `lives` kills one that has not started yet."""
        self.close_pipe()
        self._wait(END_LIMIT_S if self.ready else 0.0)

    def lives(self) -> bool:
        """Return whether the process is still exiting. After its deadline it is killed."""
        if self.child.poll() is None and time.monotonic() < self.deadline:
            return True
        self.end()
        return False

    def _give(self, left: deque[Task]) -> None:
        """Give the worker the next task, if there is one for it."""
        free = [n for n, task in enumerate(left) if self._is_for(task)]
        if not free:
            return
        at = next((n for n in free if left[n].group == self.group), free[0])
        task = left[at]
        del left[at]
        self.begin(task)

    def is_free(self) -> bool:
        """Return whether the process waits for its first task, outside a `run`."""
        if not self.task and not self.ready and not self.over:
            for _ in self.poll(deque()):
                pass
        return self.ready and not self.task and not self.over and self.child.poll() is None

    def begin(self, task: Task) -> None:
        """Give it the task."""
        self.task, self.served, self.phase, self.case = task, True, "start", ""
        self.group = self.task.group
        self.seen.add(self.task.id)
        self.imported |= task.accepted is not None
        self._wait(self.task.limit_s + BEGIN_LIMIT_S)
        self._write("task", self.task)

    def deliver(self, proof: Proof) -> None:
        """Give it the proof that its task awaits."""
        assert self.task is not None
        self.task = replace(self.task, seed=None, proof=proof, awaits_proof=False)
        self._write("proof", proof)

    def _write(self, what: str, given: Task | Proof) -> None:
        assert self._pipe is not None
        line = memoryview(f"{json.dumps({what: to_json(given)})}\n".encode())
        with contextlib.suppress(BrokenPipeError):  # the worker has died, as the next poll sees
            while line:
                line = line[os.write(self._pipe, line) :]

    def _event(self, event: Mapping[str, Any]) -> Outcome | None:
        if event["event"] == "ready":
            self.ready = True
        elif event["event"] == "begin" and self.task is not None:
            self.phase = "start"
            self._wait(self.task.limit_s)
            self.progress(self.number, event["id"])
        elif event["event"] == "phase":
            if self.phase == WAITS:
                self._wait(self.task.limit_s if self.task else START_LIMIT_S)
            self.phase = event["phase"]
        elif event["event"] == "draw":
            self.case = event["case"]
        elif event["event"] == "fault":
            self.fault = event["message"]
        else:
            return _outcome(event)
        return None

    def _wait(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    def _stop(self, message: str, left: deque[Task], status: Status = Status.UNMEASURED) -> tuple[str, Failure]:
        """Fail the task that the process is at, or the next one where it never began any. The log is the evidence."""
        self.end(".log")
        if self.task is None:
            self.task = next(filter(self._is_for, left))
            left.remove(self.task)
        failed, self.task = self.task, None
        return failed.id, Failure(status=status, message=message, case=self.case)

    def interrupt(self) -> None:
        """End the process; what it has written so far still counts."""
        end(self.child)
        self.interrupted = True

    def end(self, *kept: str) -> None:
        """End the process; its files go, except those with these suffixes."""
        self.close_pipe()
        end(self.child)
        self.over = True
        for suffix in {".jsonl", ".log", ".json", ".args"}.difference(kept):
            self.file(suffix).unlink(missing_ok=True)

    def close_pipe(self) -> None:
        """Tell the worker that no task comes any more."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _epitaph(self) -> str:
        code, log = self.child.wait(), self.file(".log")
        if self.fault:
            return f"faults: {self.fault}"
        if code == -signal.SIGKILL:
            return "was killed (signal 9): most likely the machine ran out of memory"
        tail = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-LOG_LINES:]
        if code < 0:
            return f"crashed with {signal.Signals(-code).name}; the worker's log is {log}"
        which = "" if self.phase in OF_NO_SIDE else "the measuring process "
        return f"ended {which}with exit code {code}: {' | '.join(tail)[:400]}; its log is {log}"


def start(
    command: Sequence[str],
    log: Path,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a measuring process in a process group of its own. Its output goes to `log`, and it inherits
    `descriptors`."""
    with log.open("wb") as sink:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=preload.environment_of(environment or {}),
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(child: subprocess.Popen[bytes] | Fork) -> None:
    """Kill the process with all that it has started, which may outlive it, and wait for it."""
    if isinstance(child, Fork):
        child.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # on macOS a group of zombies alone refuses
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class Lines:
    """Reads a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._begun = path, 0, b""

    def new(self) -> list[bytes]:
        """Return the lines that were completed since the last time."""
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            chunk = stream.read()
        self._position += len(chunk)
        *lines, self._begun = (self._begun + chunk).split(b"\n")
        return lines


def _signature(text: str, key: str) -> str:
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


def _verified(line: bytes, key: str) -> Mapping[str, Any] | None:
    """Return the event of a line that the worker's harness wrote, else None."""
    signature, _, text = line.decode(errors="replace").partition(" ")
    if not hmac.compare_digest(signature.encode(), _signature(text, key).encode()):
        return None
    event: Mapping[str, Any] = json.loads(text)
    return event


def _outcome(event: Mapping[str, Any]) -> Outcome:
    if event["event"] in RESULTS:
        outcome: Outcome = from_json(RESULTS[event["event"]], event["result"])
        return outcome
    return Failure(
        status=Status(event["status"]),
        message=event["message"],
        skipped=event.get("skipped", False),
        crowded=event.get("crowded", False),
    )


def _died(phase: str, what: str) -> str:
    side = "the measuring process" if phase in OF_NO_SIDE else f"the {phase} side"
    during = {"timing": " while it timed", "profiler": " while it counted launches"}.get(phase, "")
    return f"{side} {what}{during}"


class Journal:
    """The worker's end: where it reads its tasks and writes its lines."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._stream = open(job.out, "a", buffering=1)  # noqa: SIM115 - until `close`
        self._given = open(job.tasks, "rb")  # noqa: SIM115

    def close(self) -> None:
        self._stream.close()
        self._given.close()

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks as the parent gives them, the next after each result."""
        self._write({"event": "ready", "id": ""})
        for line in self._given:
            given = json.loads(line)
            if "task" in given:  # and no proof that a task awaited which has failed since
                yield from_json(Task, given["task"])

    def proof(self) -> Proof:
        """Wait for the proof that a task awaits."""
        line = self._given.readline()
        if not line:
            raise PerfsuiteError("its proof never came")
        return from_json(Proof, json.loads(line)["proof"])

    def begin(self, id: str) -> None:
        self._write({"event": "begin", "id": id})

    def phase(self, id: str, phase: str) -> None:
        self._write({"event": "phase", "id": id, "phase": phase})

    def draw(self, id: str, case: str) -> None:
        """Report that a proof begins with this draw."""
        self._write({"event": "draw", "id": id, "case": case})

    def fault(self, id: str, message: str) -> None:
        """Report that the process cannot go on and ends itself."""
        self._write({"event": "fault", "id": id, "message": message})

    def result(self, id: str, outcome: Measurement | Proof | Reported | Alone) -> None:
        kind = next(name for name, result in RESULTS.items() if type(outcome) is result)
        self._write({"event": kind, "id": id, "result": to_json(outcome)})

    def failure(self, id: str, failure: Failure) -> None:
        self._write({"event": "failure", "id": id, **to_json(failure)})

    def _write(self, event: Mapping[str, Any]) -> None:
        text = json.dumps(event)
        self._stream.write(f"{_signature(text, self.job.key)} {text}\n")
        self._stream.flush()


def pytest_arguments(config: pytest.Config) -> list[str]:
    """Return the arguments with which another pytest process collects the same node ids as this one, whatever its
    addopts select."""
    option = config.option
    arguments = ["-q", "-m", "", "-p", "no:cacheprovider", f"--rootdir={config.rootpath}"]
    arguments += [f"--import-mode={option.importmode}"]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    for flag, values in (("-p", option.plugins), ("-o", option.override_ini), ("-W", option.pythonwarnings)):
        for value in values or []:
            arguments += [flag, value]
    for flag, value in (
        ("--perfsuite-profile", option.perfsuite_profile),
        ("--hypothesis-seed", config.getoption("hypothesis_seed", None)),
    ):
        if value is not None:
            arguments.append(f"{flag}={value}")
    return [*arguments, "-o", "addopts="]


def load_job() -> Job | None:
    """Return the job of this process, if it is a worker."""
    path = os.environ.pop(JOB, None)  # neither the file nor the key in it is for the code under test
    if not path:
        return None
    try:
        text = Path(path).read_text()
        Path(path).unlink()
        job = from_json(Job, json.loads(text))
        if tasks := os.environ.pop(TASKS, ""):
            job = replace(job, tasks=int(tasks))
        os.set_inheritable(job.tasks, False)
        return job
    except (OSError, ValueError, PerfsuiteError) as error:
        raise PerfsuiteError(
            f"{JOB}={path} is not a job file ({error}); unset {JOB}, which perfsuite sets for its own processes"
        ) from None
