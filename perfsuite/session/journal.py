"""Exchange lines of JSON between a run and its worker processes: tasks in a pipe, signed events in a file."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfsuite.codec import from_json, to_json
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Alone, Measurement, Status, WorkloadProof
from perfsuite.session.tasks import Failure, Outcome, Reported, Task

JOB = "PERFSUITE_JOB"
TASKS = "PERFSUITE_TASKS"
"""Environment variable of a fork: the file descriptor from which it reads its tasks."""
WAITS = "waits"
"""Phase in which a process waits until others release its GPU. The wait does not count toward its time limit."""
RESULTS: Mapping[str, Any] = {"measurement": Measurement, "proof": WorkloadProof, "reported": Reported, "alone": Alone}
"""Event of a worker → class of its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Instructions for one worker at its start. Its tasks arrive later, one by one."""

    out: str
    """File to which the worker writes a line for each event."""
    tasks: int = 0
    """File descriptor from which the worker reads a line for each task."""
    key: str = ""
    """Key that signs the worker's lines, so that code under test cannot add lines."""
    note_ran: bool = False
    """Whether a task may request a record of all code and data that a side uses. Data files are then recorded when they
    are opened."""
    ahead: bool = False
    """Whether the worker starts some time before its first task."""
    lock: str = ""
    """Lock file of a GPU that the worker shares with other processes of this run (gpu_sharing.py)."""


def load_job() -> Job | None:
    """Return the job of this process; None if it is not a worker."""
    path = os.environ.pop(JOB, None)  # the code under test must not see the file and the key in it
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
    """Reader of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._begun = path, 0, b""

    def new(self) -> list[bytes]:
        """Return the lines that were completed since the last call."""
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            chunk = stream.read()
        self._position += len(chunk)
        *lines, self._begun = (self._begun + chunk).split(b"\n")
        return lines


def _signature(text: str, key: str) -> str:
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


def verified(line: bytes, key: str) -> Mapping[str, Any] | None:
    """Return the event of a line with a valid signature; None for any other line."""
    signature, _, text = line.decode(errors="replace").partition(" ")
    if not hmac.compare_digest(signature.encode(), _signature(text, key).encode()):
        return None
    event: Mapping[str, Any] = json.loads(text)
    return event


def outcome_of(event: Mapping[str, Any]) -> Outcome:
    """Return the outcome in an event that has a result or a failure."""
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
    """Worker's side of the exchange: reads tasks and writes events."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._stream = open(job.out, "a", buffering=1)  # noqa: SIM115 - until `close`
        self._given = open(job.tasks, "rb")  # noqa: SIM115

    def close(self) -> None:
        self._stream.close()
        self._given.close()

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks that the parent sends, the next one after each result."""
        self._write({"event": "ready", "id": ""})
        for line in self._given:
            given = json.loads(line)
            if "task" in given:  # otherwise it is a proof for a task that has failed in the meantime
                yield from_json(Task, given["task"])

    def proof(self) -> WorkloadProof:
        """Wait for the proof that a task awaits."""
        line = self._given.readline()
        if not line:
            raise PerfsuiteError("its proof never came")
        return from_json(WorkloadProof, json.loads(line)["proof"])

    def begin(self, id: str) -> None:
        self._write({"event": "begin", "id": id})

    def phase(self, id: str, phase: str) -> None:
        self._write({"event": "phase", "id": id, "phase": phase})

    def draw(self, id: str, case: str) -> None:
        """Report that a proof begins with this draw."""
        self._write({"event": "draw", "id": id, "case": case})

    def fault(self, id: str, message: str) -> None:
        """Report that the process cannot continue and will exit."""
        self._write({"event": "fault", "id": id, "message": message})

    def result(self, id: str, outcome: Measurement | WorkloadProof | Reported | Alone) -> None:
        kind = next(name for name, result in RESULTS.items() if type(outcome) is result)
        self._write({"event": kind, "id": id, "result": to_json(outcome)})

    def failure(self, id: str, failure: Failure) -> None:
        self._write({"event": "failure", "id": id, **to_json(failure)})

    def _write(self, event: Mapping[str, Any]) -> None:
        text = json.dumps(event)
        self._stream.write(f"{_signature(text, self.job.key)} {text}\n")
        self._stream.flush()
