"""Control a worker process from its run: its lane, its task, its results, its time limits and its end.

If a process crashes, hangs or is killed, only its current task fails. The failure names the side that was running.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsuite.codec import to_json
from perfsuite.records import Status, WorkloadProof
from perfsuite.session import preload
from perfsuite.session.cores import ANY, Cores
from perfsuite.session.fork_server import Fork
from perfsuite.session.journal import WAITS, Job, Lines, outcome_of, verified
from perfsuite.session.tasks import START_LIMIT_S, Failure, Outcome, Reported, Task
from perfsuite.system.folders import own_folder

FORGED = (
    "a result that the harness did not write appeared among its own: code under test writes to the results file; "
    "nothing of this process is believed"
)
BEGIN_LIMIT_S = 10.0
"""Time limit in seconds for a worker to begin a task after it got it."""
END_LIMIT_S = 3.0
"""Time limit in seconds for a worker to exit after its last task. Its results are known by then, so it is then killed
without a message. The run waits for the exit, because the next processes need the device for themselves, and some take
7 s or hang at exit."""
LOG_LINES = 3
OF_NO_SIDE = ("start", "timing", "profiler", WAITS)
"""Phases in which the process does not run only one side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Slot for one process at a time, with its own environment variables, e.g. for the GPU that it uses."""

    environment: Mapping[str, str] = field(default_factory=dict)
    lock: str = ""
    """Lock file of a GPU that several lanes share."""
    cores: Cores = ANY
    """Cores on which the lane's processes run."""
    python: str = ""
    """Interpreter of the lane's processes; empty for this process's."""
    forked: bool = False
    """Whether the lane's processes are forks of a server that has imported torch. Not for timing: all forks of a
    process share its memory addresses, which affect the speed of host code, and the rule needs processes that vary
    independently."""

    @property
    def device(self) -> str:
        """The GPU that the lane uses; empty if there is no choice."""
        return self.environment.get("CUDA_VISIBLE_DEVICES", "")


def devices_of(lanes: Sequence[Lane]) -> list[Lane]:
    """Return one lane for each device. Lanes of the same device are equal."""
    return [lane for n, lane in enumerate(lanes) if lane not in lanes[:n]]


@dataclass(slots=True)
class WorkerProcess:
    """One worker process, with its current task and its state. `ids` are the items that it has collected."""

    lane: Lane
    ids: frozenset[str]
    stem: Path
    progress: Callable[[int, str], None]
    number: int = 0
    task: Task | None = None
    group: str = ""
    """Group of the last task."""
    seen: set[str] = field(default_factory=set)
    """Ids of the tasks that the process has received."""
    failed: bool = False
    """Whether a correctness item failed in the process. It then gets no further task, because a side that raises may
    leave the device in a state in which later work fails, such as in the middle of a CUDA graph capture."""
    imported: bool = False
    """Whether the process has received a task with another revision, which may have replaced functions that the current
    side calls by name."""
    child: subprocess.Popen[bytes] | Fork = field(init=False)
    lines: Lines = field(init=False)
    key: str = field(default_factory=secrets.token_hex)
    phase: str = "start"
    ready: bool = False
    served: bool = False
    """Whether the process has received a task."""
    over: bool = False
    interrupted: bool = False
    case: str = ""
    """Current draw of a proof."""
    fault: str = ""
    """Reason why the process ends itself."""
    deadline: float = 0.0
    _pipe: int | None = None

    def file(self, suffix: str) -> Path:
        return self.stem.with_suffix(suffix)

    def open(self, ids: Sequence[str], *, noted: bool, ahead: bool) -> int:
        """Make the files that the worker reads and the one that it writes. Return the file descriptor from which it
        reads its tasks."""
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
            return True  # the code under test has removed the file, which `poll` reports when the process is used
        return self.child.poll() is not None or words in (written.partition(after)[2] if after else written)

    def poll(self, left: deque[Task]) -> Iterator[tuple[str, Outcome]]:
        """Yield the outcomes since the last poll, including crashes and hangs. A free process gets the next task from
        `left`."""
        ended = self.child.poll() is not None
        for line in self._new_lines():
            event = verified(line, self.key)
            if event is None or event["id"] != (self.task.id if self.task else ""):
                yield from self._reject(left)
                return
            outcome = self._event(event)
            if outcome is not None and self.task is not None:
                yield self._complete(self.task, outcome, left, ended=ended)
        yield from self._proceed(left, ended=ended)

    def _new_lines(self) -> list[bytes]:
        try:
            return self.lines.new()
        except OSError:
            return [b"the file is gone"]  # an invalid line, as if the code under test had changed the file

    def _reject(self, left: deque[Task]) -> Iterator[tuple[str, Outcome]]:
        """End the process, because its file has a line that the harness did not write. Yield the failure of its task,
        or of the next one if it never began one."""
        if self.task or self._may_begin(left):
            yield self._stop(FORGED, left, Status.NOT_TIMED)
        else:
            self.end()  # no line is valid after the last result

    def _complete(self, task: Task, outcome: Outcome, left: deque[Task], *, ended: bool) -> tuple[str, Outcome]:
        """Return (the task's id, outcome). The process gets its next task before the caller handles the outcome."""
        self.task = None
        self.failed |= isinstance(outcome, Reported) and outcome.has_failed
        if not ended and not self.interrupted:
            self._give(left)
        return task.id, outcome

    def _proceed(self, left: deque[Task], *, ended: bool) -> Iterator[tuple[str, Outcome]]:
        """Give the process a task if it is free, or end it. Yield the failure of a task whose process has ended or
        hangs."""
        if self.interrupted:
            self.end()
        elif self.ready and not self.task and not ended and self._pipe is not None:
            self._give(left)
        elif self.task or self._may_begin(left):
            if reason := self._lost(ended=ended):
                yield self._stop(reason, left)
        elif ended:
            self.end()

    def _lost(self, *, ended: bool) -> str:
        """Return why the task cannot have a result any more; empty if it can."""
        if ended:
            return in_phase(self.phase, self._epitaph())
        if time.monotonic() > self.deadline and self.phase != WAITS:
            limit = self.task.limit_s if self.task else START_LIMIT_S
            return in_phase(self.phase, f"hangs: it was stopped after its time limit of {limit:g} s")
        return ""

    def can_take(self, left: Collection[Task]) -> bool:
        """Return whether the process waits for a task and can run one of these."""
        return not self.task and any(self._is_for(task) for task in left)

    def _may_begin(self, left: Collection[Task]) -> bool:
        """Return whether the process has not had a task yet, and can run one of these."""
        return not self.served and any(self._is_for(task) for task in left)

    def _is_for(self, task: Task) -> bool:
        """Return whether the process can run the task: it has collected the item, has not had a task of it before, has
        not failed, and has not imported another revision, unless the task has one too."""
        unused = task.id in self.ids and task.id not in self.seen
        return unused and not self.failed and not (self.imported and task.accepted is None)

    def leave(self) -> None:
        """Let the process exit. `lives` kills it if it has not started yet."""
        self.close_pipe()
        self._wait(END_LIMIT_S if self.ready else 0.0)

    def lives(self) -> bool:
        """Return whether the process is still exiting. Kill it after its deadline."""
        if self.child.poll() is None and time.monotonic() < self.deadline:
            return True
        self.end()
        return False

    def _give(self, left: deque[Task]) -> None:
        """Give the worker the next task that it can run, if there is one."""
        free = [n for n, task in enumerate(left) if self._is_for(task)]
        if not free:
            return
        at = next((n for n in free if left[n].group == self.group), free[0])
        task = left[at]
        del left[at]
        self.begin(task)

    def is_free(self) -> bool:
        """Return whether the process waits for its first task. For processes outside of `Workers.run`."""
        if not self.task and not self.ready and not self.over:
            for _ in self.poll(deque()):
                pass
        return self.ready and not self.task and not self.over and self.child.poll() is None

    def begin(self, task: Task) -> None:
        """Give the process this task."""
        self.task, self.served, self.phase, self.case = task, True, "start", ""
        self.group = self.task.group
        self.seen.add(self.task.id)
        self.imported |= task.accepted is not None
        self._wait(self.task.limit_s + BEGIN_LIMIT_S)
        self._write("task", self.task)

    def deliver(self, proof: WorkloadProof) -> None:
        """Give the process the proof for which its task waits."""
        assert self.task is not None
        self.task = replace(self.task, seed=None, proof=proof, awaits_proof=False)
        self._write("proof", proof)

    def _write(self, what: str, message: Task | WorkloadProof) -> None:
        assert self._pipe is not None
        line = memoryview(f"{json.dumps({what: to_json(message)})}\n".encode())
        with contextlib.suppress(BrokenPipeError):  # the worker has died, which the next poll reports
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
            return outcome_of(event)
        return None

    def _wait(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    def _stop(self, message: str, left: deque[Task], status: Status = Status.UNMEASURED) -> tuple[str, Failure]:
        """End the process, and return the failure of its task, or of the next one if it never began one. Keep the log
        file."""
        self.end(".log")
        if self.task is None:
            self.task = next(filter(self._is_for, left))
            left.remove(self.task)
        failed, self.task = self.task, None
        return failed.id, Failure(status=status, message=message, case=self.case)

    def interrupt(self) -> None:
        """End the process. The results that it has written so far are still used."""
        end(self.child)
        self.interrupted = True

    def end(self, *kept: str) -> None:
        """End the process and remove its files, except those with these suffixes."""
        self.close_pipe()
        end(self.child)
        self.over = True
        for suffix in {".jsonl", ".log", ".json", ".args"}.difference(kept):
            self.file(suffix).unlink(missing_ok=True)

    def close_pipe(self) -> None:
        """Close the pipe, which tells the worker that no further task follows."""
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
    """Start a measuring process in a new process group. Its output goes to `log`, and it inherits `descriptors`."""
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
    """Kill the process and all processes that it has started, which could outlive it, and wait for its end."""
    if isinstance(child, Fork):
        child.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group that contains only zombies
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def in_phase(phase: str, what: str) -> str:
    """Return the message that the side of this phase, or the process, did `what`."""
    side = "the measuring process" if phase in OF_NO_SIDE else f"the {phase} side"
    during = {"timing": " while it timed", "profiler": " while it counted launches"}.get(phase, "")
    return f"{side} {what}{during}"
