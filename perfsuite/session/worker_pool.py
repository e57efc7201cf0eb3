"""Run measuring processes. Each is a pytest on the same node ids, which gets tasks one by one and writes JSON lines.

Several lanes may work at the same time, with one process each: a lane for each GPU while timing, one for each core
while proving. If a process crashes, hangs or is killed, only its current task fails. The parent reports the side that
was running, and starts a new process in the lane.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from perfsuite.errors import PerfsuiteError
from perfsuite.records import WorkloadProof
from perfsuite.session import preload, project_options
from perfsuite.session.cores import confined
from perfsuite.session.fork_server import Command
from perfsuite.session.journal import JOB, TASKS
from perfsuite.session.tasks import Outcome, Task
from perfsuite.session.worker_process import Lane, WorkerProcess, devices_of, start
from perfsuite.system.orphans import PARENT

if TYPE_CHECKING:
    import pytest

IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"
"""Filter of pytest's warning that it cannot rewrite assertions in modules that the server has imported."""
POLL_S, MEANWHILE_S = 0.02, 0.5


@dataclass(slots=True)
class Workers:
    """Pool of the processes of one pytest run: starts them, gives them tasks, and reads their results.

    `progress` is called with (lane, id) when a task begins.
    """

    root: Path
    folder: Path
    arguments: Sequence[str]
    progress: Callable[[int, str], None] = lambda lane, id: None
    _waiting: list[WorkerProcess] = field(default_factory=list)

    def prepare(self, lanes: Sequence[Lane], ids: Sequence[str], each: int, at_once: int) -> None:
        """Start processes until there are `each` for each device. They import what they need and wait for a later
        `run`.

        At most `at_once` start at the same time, and none while the server of the forked lanes imports torch, because
        the run waits for that server. Call this again to start the others.
        """
        if preload.is_preparing():
            return
        starting = sum(not process.has_started() for process in self._waiting)
        for wanted in range(1, each + 1):
            for lane in devices_of(lanes):  # by turns, so that each GPU has some processes early
                if starting < at_once and sum(process.lane == lane for process in self._waiting) < wanted:
                    self._waiting.append(self._process(lane, ids, ahead=True))
                    starting += 1

    def is_any_free(self, lanes: Sequence[Lane]) -> bool:
        """Return whether a process waits for a task on one of the lanes."""
        return any(process.lane in lanes and process.is_free() for process in self._waiting)

    def begin_early(self, tasks: Sequence[Task], lanes: Sequence[Lane], most: int) -> None:
        """Give these tasks, in this order, to processes that wait for the lanes, until `most` prepare at the same time.

        Several tasks may have the same id. Each then goes to another process. A GPU gets no more tasks than it has
        lanes. A later `run` on these lanes takes over the processes, and ends those whose task is not among its tasks.
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
        """End the processes to which `begin_early` gave tasks of these workloads."""
        for process in [p for p in self._waiting if p.task and p.task.id in ids]:
            self._waiting.remove(process)
            process.end()

    def deliver(self, proof: WorkloadProof) -> None:
        """Give the proof to the process that began early and waits for it, if there is one."""
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
        """Run the tasks in order, each in the first lane that is free. Yield (id, outcome) when a task ends.

        Several tasks may have the same id. Each then goes to another process. After the caller has handled an outcome,
        `further` is called with the task's id and returns tasks that precede the remaining ones, so that no lane waits
        for them at the end.

        Every MEANWHILE_S seconds, and when tasks and processes end, `meanwhile` is called with the lane of each process
        that has not ended.
        """
        left, running, leaving = deque(tasks), dict[int, WorkerProcess](), list[WorkerProcess]()
        interrupt: KeyboardInterrupt | None = None
        called = time.monotonic()
        try:
            self._take_over(lanes, left, running)
            while left or running or leaving:
                due = time.monotonic() > called + MEANWHILE_S
                if interrupt is None:
                    self._fill(lanes, left, running)
                if (yield from _polled(left, running, further)):
                    due = True
                exiting = [*leaving, *_without_tasks(left, running, more=further is not None)]
                leaving = [process for process in exiting if process.lives()]
                if due or len(leaving) < len(exiting):
                    meanwhile([process.lane for process in (*running.values(), *leaving)])
                    called = time.monotonic()
                if interrupt is not None:
                    raise interrupt
                interrupt = _pause(running.values())
        finally:
            for process in (*running.values(), *leaving):
                process.end()

    def _fill(self, lanes: Sequence[Lane], left: Collection[Task], running: dict[int, WorkerProcess]) -> None:
        """Get a process for each lane that has none, as long as there are tasks for it."""
        for number, lane in enumerate(lanes):
            if number not in running and sum(p.can_take(left) for p in running.values()) < len(left):
                working = [p.task for p in running.values() if p.task]
                running[number] = self._next(number, lane, left, working)

    def close(self) -> None:
        """End the processes that wait for tasks."""
        while self._waiting:
            self._waiting.pop().end()

    def _take_over(self, lanes: Sequence[Lane], left: deque[Task], running: dict[int, WorkerProcess]) -> None:
        """Assign each process that began a task of `left` early to a lane. End those whose task is not in `left`."""
        for process in [p for p in self._waiting if p.task and p.lane in lanes]:
            self._waiting.remove(process)
            number = next((n for n, lane in enumerate(lanes) if lane == process.lane and n not in running), None)
            if process.task is None or number is None or process.task not in left:
                process.end()
                continue
            left.remove(process.task)
            process.number, running[number] = number, process

    def _started_ahead(self, lane: Lane, ids: Collection[str]) -> list[WorkerProcess]:
        """Return the processes that were started ahead for this lane, have collected these items and wait for a
        task."""
        return [p for p in self._waiting if p.lane == lane and not p.task and p.ids.issuperset(ids)]

    def _next(self, number: int, lane: Lane, left: Collection[Task], working: Collection[Task]) -> WorkerProcess:
        """Return a process for the lane that has collected, or will collect, the items of the remaining tasks and of
        those that others are working on.

        Each of these items may be that of a further task.
        """
        ids = list(dict.fromkeys(t.id for t in [*left, *working]))
        noted = any(t.note_ran for t in left)
        process = (None if noted else self._prepared(lane, ids)) or self._process(lane, ids, noted=noted)
        process.number = number
        return process

    def _prepared(self, lane: Lane, ids: Sequence[str]) -> WorkerProcess | None:
        for process in self._started_ahead(lane, ids):
            self._waiting.remove(process)
            if process.child.poll() is None:
                return process
            process.end()
        return None

    def _process(self, lane: Lane, ids: Sequence[str], *, noted: bool = False, ahead: bool = False) -> WorkerProcess:
        stem = self.folder / f"worker-{os.getpid()}-{next(_numbers)}"
        process = WorkerProcess(lane=lane, ids=frozenset(ids), stem=stem, progress=self.progress)
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

    def _spawn(self, process: WorkerProcess, reader: int) -> None:
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


def _polled(
    left: deque[Task], running: dict[int, WorkerProcess], further: Callable[[str], Sequence[Task]] | None
) -> Generator[tuple[str, Outcome], None, bool]:
    """Yield the new outcomes of each process, and remove processes that are over. Return whether there was an
    outcome."""
    has_outcome = False
    for number, process in list(running.items()):
        gets = process.child.poll() is not None or _is_due(process, left, running)
        for id, outcome in process.poll(left if gets else deque()):
            has_outcome = True
            yield id, outcome
            left.extendleft(reversed(further(id) if further else ()))
        if process.over:
            del running[number]
    return has_outcome


def _pause(running: Collection[WorkerProcess]) -> KeyboardInterrupt | None:
    """Wait until the next poll. Return a KeyboardInterrupt during the wait. The caller raises it after one more poll,
    so that results that are already written are not lost."""
    try:
        time.sleep(POLL_S)
    except KeyboardInterrupt as error:
        for process in running:
            process.interrupt()
        return error
    return None


def _is_due(process: WorkerProcess, left: Collection[Task], running: Mapping[int, WorkerProcess]) -> bool:
    """Return whether the process's GPU may get another task: at most its share of the tasks that have not ended.

    Otherwise one GPU might run the last tasks one after another while another GPU is idle.
    """
    others = [p.lane.device for p in running.values() if p.task and p is not process]
    devices = {p.lane.device for p in running.values()}
    return others.count(process.lane.device) * len(devices) < len(left) + len(others)


def _without_tasks(left: Collection[Task], running: dict[int, WorkerProcess], *, more: bool) -> Iterator[WorkerProcess]:
    """Remove from `running` and yield the processes without a task, which exit. If `more` tasks may follow, these
    processes wait while others work."""
    wait = more and not left and any(process.task for process in running.values())
    for number, process in list(running.items()):
        if not wait and not process.task and not process.can_take(left):
            process.leave()
            yield running.pop(number)


_numbers = itertools.count(1)
"""Counter for the whole run, so that a process never uses the files of another that is still running."""


def pytest_arguments(config: pytest.Config) -> list[str]:
    """Return the arguments with which another pytest process collects the same node ids as this one, regardless of
    addopts."""
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
    return [*project_options.worker_arguments(config), *arguments, "-o", "addopts="]
