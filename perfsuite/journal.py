"""The lines of JSON between a run and its worker processes: tasks in a pipe, signed events in a file."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfsuite.errors import PerfsuiteError
from perfsuite.records import Alone, Measurement, Proof, Status, from_json, to_json
from perfsuite.tasks import Failure, Outcome, Reported, Task

JOB = "PERFSUITE_JOB"
TASKS = "PERFSUITE_TASKS"
"""Environment variable of a fork: the file descriptor from which it reads its tasks."""
WAITS = "waits"
"""The phase of a process that waits until others let it have their GPU; its time limit does not count meanwhile."""
RESULTS: Mapping[str, Any] = {"measurement": Measurement, "proof": Proof, "reported": Reported, "alone": Alone}
"""Event of a worker → the class of its result."""


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


def verified(line: bytes, key: str) -> Mapping[str, Any] | None:
    """Return the event of a line that the worker's harness wrote, else None."""
    signature, _, text = line.decode(errors="replace").partition(" ")
    if not hmac.compare_digest(signature.encode(), _signature(text, key).encode()):
        return None
    event: Mapping[str, Any] = json.loads(text)
    return event


def outcome_of(event: Mapping[str, Any]) -> Outcome:
    """Return the outcome that an event with a result or a failure states."""
    if event["event"] in RESULTS:
        outcome: Outcome = from_json(RESULTS[event["event"]], event["result"])
        return outcome
    return Failure(
        status=Status(event["status"]),
        message=event["message"],
        skipped=event.get("skipped", False),
        crowded=event.get("crowded", False),
    )


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
