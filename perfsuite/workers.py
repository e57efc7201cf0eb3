"""Measuring processes: a pytest on the same node ids, which writes a line of JSON for each workload.

A worker that crashes, hangs or is killed costs one workload: the parent names the side that was running, and starts
a new worker after it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsuite.errors import PerfsuiteError
from perfsuite.records import Measurement, Status, from_json, to_json

if TYPE_CHECKING:
    import pytest

JOB = "PERFSUITE_JOB"
FORGED = (
    "a result that the harness did not write appeared among its own: code under test writes to the results file; "
    "nothing of this process is believed"
)
UNLOADED = "accepted revision not loaded: "
"""How a worker begins the message that it could not load the accepted side, so that the gate falls back."""
POLL_S = 0.02
START_LIMIT_S = 300.0
"""From a worker's start to its first item: importing torch and the test modules."""
END_LIMIT_S = 30.0
"""From a worker's last item to its end. What it measured is known by then; it is stopped without a word."""
LOG_LINES = 3
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when its parent ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a workload has no measurement, in one line."""

    status: Status
    message: str
    skipped: bool = False


Outcome = Measurement | Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a worker is to measure. `accepted` maps a workload to (folder of the accepted tree, revision)."""

    ids: tuple[str, ...]
    out: str
    accepted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    process: int = 0
    rivals: bool = True
    twin: bool = False
    """The accepted side is only there to measure the noise: where it cannot be loaded, go on without it."""
    counts: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """Workload → side → (host syncs, launches), from an earlier process: counted once a run."""
    key: str = ""
    """Signs the worker's lines, so that code under test cannot add lines of its own."""


@dataclass(slots=True)
class Workers:
    """Starts measuring processes for one pytest run and reads what they write.

    `limits` holds the seconds one workload may take; `progress` is told (process, id) as each workload begins.
    """

    root: Path
    folder: Path
    arguments: Sequence[str]
    limits: Mapping[str, float]
    progress: Callable[[int, str], None] = lambda process, id: None
    rival_processes: int = 1
    """In how many of the first processes the rivals are timed too: nothing is gated on them."""
    twin: bool = False
    started: int = 0
    counts: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)

    def run(
        self, ids: Sequence[str], *, accepted: Mapping[str, tuple[str, ...]] | None = None
    ) -> Generator[tuple[str, Outcome], None, None]:
        """One process through all of `ids`: (id, outcome) as each ends, in order."""
        self.started += 1
        process = self.started
        left = list(ids)
        attempt = 0
        while left:
            attempt += 1
            done = 0
            for id, outcome in self._one(left, accepted or {}, process, attempt):
                done += 1
                if isinstance(outcome, Measurement) and id not in self.counts:
                    self._remember(outcome)
                yield id, outcome
            left = left[done:]

    def _remember(self, measurement: Measurement) -> None:
        counted: dict[str, tuple[int, ...]] = {
            name: (side.host_syncs, side.launches)
            for name, side in measurement.sides.items()
            if side.host_syncs is not None and side.launches is not None
        }
        if counted:
            self.counts[measurement.id] = counted

    def _one(
        self, ids: list[str], accepted: Mapping[str, tuple[str, ...]], process: int, attempt: int
    ) -> Iterator[tuple[str, Outcome]]:
        """One worker until it ends or dies; at least one outcome, so that a broken start is no endless loop."""
        stem = self.folder / f"worker-{os.getpid()}-{process}-{attempt}"
        out, log, job_file = stem.with_suffix(".jsonl"), stem.with_suffix(".log"), stem.with_suffix(".json")
        job = Job(
            ids=tuple(ids),
            out=str(out),
            accepted={i: accepted[i] for i in ids if i in accepted},
            process=process,
            rivals=process <= self.rival_processes,
            twin=self.twin,
            counts={i: self.counts[i] for i in ids if i in self.counts},
            key=secrets.token_hex(),
        )
        selection = stem.with_suffix(".args")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            job_file.write_text(json.dumps(to_json(job)))
            selection.write_text("\n".join(ids))
            out.touch()
        except OSError as error:
            raise PerfsuiteError(
                f"{self.folder}: cannot be written ({error.strerror or error}); make the project's folder writable, "
                "with space on it"
            ) from None
        child = self._spawn(selection, job_file, log)
        current, phase = ids[0], "start"
        told, produced = Lines(out), 0
        deadline = time.monotonic() + START_LIMIT_S + self.limits.get(current, START_LIMIT_S)
        interrupt: KeyboardInterrupt | None = None
        try:
            while True:
                ended = child.poll() is not None
                for line in told.new():
                    if produced == len(ids):
                        break  # whatever comes after the last result is none
                    event = _verified(line, job.key)
                    if event is None or event["id"] != ids[produced]:
                        end(child)
                        yield ids[produced], Failure(status=Status.UNMEASURED, message=FORGED)
                        return
                    if event["event"] == "begin":
                        current, phase = event["id"], "start"
                        deadline = time.monotonic() + self.limits.get(current, START_LIMIT_S)
                        self.progress(process, current)
                    elif event["event"] == "phase":
                        phase = event["phase"]
                    else:
                        produced += 1
                        yield event["id"], _outcome(event)
                        current, phase = ids[produced] if produced < len(ids) else "", "start"
                        if not current:
                            deadline = time.monotonic() + END_LIMIT_S
                if interrupt is not None:
                    raise interrupt
                if ended or (not current and time.monotonic() > deadline):
                    break
                if time.monotonic() > deadline:
                    end(child)
                    limit = self.limits.get(current, START_LIMIT_S)
                    yield current, _died(current, phase, f"hangs: it was stopped after its time limit of {limit:g} s")
                    return
                try:
                    time.sleep(POLL_S)
                except KeyboardInterrupt as error:
                    interrupt = error  # what the worker has told by now is not lost
                    end(child)
        finally:
            end(child)
            if produced == len(ids):
                for path in (out, log, job_file, selection):
                    path.unlink(missing_ok=True)
        if produced < len(ids):
            yield ids[produced], _died(ids[produced], phase, self._epitaph(child.returncode, log))

    def _spawn(self, selection: Path, job_file: Path, log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pytest", *self.arguments, f"@{selection}"]
        return start(command, log, cwd=self.root, environment={JOB: str(job_file)})

    @staticmethod
    def _epitaph(code: int, log: Path) -> str:
        if code == -signal.SIGKILL:
            return "was killed (signal 9): most likely the machine ran out of memory"
        tail = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-LOG_LINES:]
        if code < 0:
            return f"crashed with {signal.Signals(-code).name}; the worker's log is {log}"
        return f"ended the measuring process with exit code {code}: {' | '.join(tail)[:400]}; its log is {log}"


def start(
    command: Sequence[str], log: Path, *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A measuring process in a process group of its own, whose output goes to `log`."""
    known = {**os.environ, **(environment or {}), "PYTHONUNBUFFERED": "1"}
    # A side that needs most of the memory must find room for it in one piece at every call.
    known.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with log.open("wb") as sink:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=known,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill it with all that it has started, and wait for it, unless it has ended."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


class Lines:
    """Reads a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._begun = path, 0, b""

    def new(self) -> list[bytes]:
        """The lines that were completed since the last time."""
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            chunk = stream.read()
        self._position += len(chunk)
        *lines, self._begun = (self._begun + chunk).split(b"\n")
        return lines


def _signature(text: str, key: str) -> str:
    return hmac.new(key.encode(), text.encode(), "sha256").hexdigest()


def _verified(line: bytes, key: str) -> Mapping[str, Any] | None:
    """The event of a line that the worker's harness wrote, else None."""
    signature, _, text = line.decode(errors="replace").partition(" ")
    if not hmac.compare_digest(signature.encode(), _signature(text, key).encode()):
        return None
    event: Mapping[str, Any] = json.loads(text)
    return event


def _outcome(event: Mapping[str, Any]) -> Outcome:
    if event["event"] == "measurement":
        return from_json(Measurement, event["measurement"])
    return Failure(status=Status(event["status"]), message=event["message"], skipped=event.get("skipped", False))


def _died(id: str, phase: str, what: str) -> Failure:
    side = "the measuring process" if phase in ("start", "timing", "profiler") else f"the {phase} side"
    during = {"timing": " while it timed", "profiler": " while it counted launches"}.get(phase, "")
    return Failure(status=Status.UNMEASURED, message=f"{side} {what}{during}")


def die_with_parent() -> None:
    """End this worker when its parent ends, however that happens: an orphan would disturb the next measurement.

    Linux only; elsewhere a worker whose parent was killed runs on to its end.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Journal:
    """The worker's end: where it writes its lines."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._stream = open(job.out, "a", buffering=1)  # noqa: SIM115 - until `close`

    def close(self) -> None:
        self._stream.close()

    def begin(self, id: str) -> None:
        self._write({"event": "begin", "id": id})

    def phase(self, id: str, phase: str) -> None:
        self._write({"event": "phase", "id": id, "phase": phase})

    def measurement(self, measurement: Measurement) -> None:
        self._write({"event": "measurement", "id": measurement.id, "measurement": to_json(measurement)})

    def failure(self, id: str, failure: Failure) -> None:
        self._write({"event": "failure", "id": id, **to_json(failure)})

    def _write(self, event: Mapping[str, Any]) -> None:
        text = json.dumps(event)
        self._stream.write(f"{_signature(text, self.job.key)} {text}\n")
        self._stream.flush()


def pytest_arguments(config: pytest.Config) -> list[str]:
    """What makes another pytest process collect the same node ids as this one, whatever its addopts select."""
    option = config.option
    arguments = ["-q", "-m", "", "-p", "no:cacheprovider", f"--rootdir={config.rootpath}"]
    arguments += [f"--import-mode={option.importmode}"]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    for flag, values in (("-p", option.plugins), ("-o", option.override_ini), ("-W", option.pythonwarnings)):
        for value in values or []:
            arguments += [flag, value]
    return [*arguments, "-o", "addopts="]


def load_job() -> Job | None:
    """The job of this process, if it is a worker."""
    path = os.environ.pop(JOB, None)  # neither the file nor the key in it is for the code under test
    if not path:
        return None
    try:
        text = Path(path).read_text()
        Path(path).unlink()
        return from_json(Job, json.loads(text))
    except (OSError, ValueError, PerfsuiteError) as error:
        raise PerfsuiteError(
            f"{JOB}={path} is not a job file ({error}); unset {JOB}, which perfsuite sets for its own processes"
        ) from None
