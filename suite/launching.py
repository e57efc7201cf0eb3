"""Starts the ranks of a training on this machine, and ends all of them if one fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from perfsuite.errors import PerfsuiteError
from perfsuite.system import orphans

LOST = 75
"""Exit code of a rank that cannot continue because another rank has ended (EX_TEMPFAIL). Rank 0 then prints nothing."""
GO_ON = "go on with --resume latest where a checkpoint was written"
"""Remedy in every message about ranks that were ended."""
LAUNCHED = "PERFSUITE_LAUNCHED"
"""Environment variable of the ranks that this module starts."""
GRACE_S = 3.0
"""Seconds that the other ranks have to end by themselves after a rank has ended with an error."""
SAVING_S = 60.0
"""Seconds that all ranks have to end after a signal. Rank 0 writes a checkpoint in this time."""
TWICE_S = 0.3
"""Seconds within which a repeated signal counts as one request that was sent to the process and its process group."""
PASSED_ON_S = 2.0
"""Seconds after which Ctrl-C is forwarded to rank 0, if it has not received it from the terminal."""
POLL_S = 0.05
PREFIX = re.compile(r"^\[rank\d+\]: ")
"""Prefix that torch adds to each line of a rank's traceback."""
MESSAGE = "Error: "
"""Prefix of perfsuite's messages to the user."""
EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)?(Error|Exception|Interrupt|Exit)(: |$)")
"""Beginning of a traceback's exception line, or of a perfsuite message."""
ASKED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
"""Exit codes of ranks that ended on request and have saved."""


class RankFailedError(PerfsuiteError):
    """A rank has failed and ended the training. `code` is the exit code of the command."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class _Asked:
    """Signals that requested the end of the ranks."""

    moments: dict[int, float] = field(default_factory=dict)
    """Signal → time of its first arrival."""
    passed_on: bool = False
    """True after SIGINT was forwarded to rank 0, or did not need to be."""
    at_once: int | None = None
    """A signal that arrived a second time, after which all ranks are ended immediately."""

    def add(self, number: int) -> None:
        first = self.moments.setdefault(number, time.monotonic())
        if time.monotonic() - first > TWICE_S:
            self.at_once = number


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: IO[bytes] | None
    """File with the rank's output; None for rank 0, whose output goes to the user."""
    code: int | None = field(default=None)

    @property
    def text(self) -> str:
        if self.log is None:
            return ""
        self.log.seek(0)
        return self.log.read().decode(errors="replace").strip()

    @property
    def error(self) -> str:
        """Exception that ended the rank, without the prefixes of torch and perfsuite, or its last line of output."""
        return self._last_line.removeprefix(MESSAGE)

    @property
    def error_by_name(self) -> str:
        """`error` preceded by the rank's name, unless it is a perfsuite message."""
        line = self._last_line
        return line.removeprefix(MESSAGE) if line.startswith(MESSAGE) or not line else f"rank {self.number}: {line}"

    @property
    def _last_line(self) -> str:
        lines = [PREFIX.sub("", line) for line in self.text.splitlines()]
        return ([line for line in lines if EXCEPTION.match(line)] or lines or [""])[-1]


def launch(command: Sequence[str], ranks: int) -> int:
    """Run a command in `ranks` processes with torchrun's environment variables, and return its exit code.

    Rank 0 writes to this process's standard streams. A first SIGINT or SIGTERM requests all ranks to end; a second one
    ends them immediately. If a rank ends with an error, all others are ended, and RankFailedError names that rank.
    """
    port = _free_port()
    with contextlib.ExitStack() as stack:
        try:
            running = [stack.enter_context(_rank(command, number, ranks, port)) for number in range(ranks)]
        except OSError as error:
            raise PerfsuiteError(f"cannot start {ranks} ranks: {error.strerror or error}; start fewer") from None
        asked = stack.enter_context(_forwarded(running[0].process))
        return _watch(running, asked)


def _watch(running: list[_Rank], asked: _Asked) -> int:
    """Wait until all ranks have ended, and return the exit code. RankFailedError if a rank failed."""
    until: float | None = None
    while any(rank.code is None for rank in running):
        for rank in running:
            rank.code = rank.process.poll()
        ended = [rank for rank in running if rank.code is not None]
        if any(rank.code != 0 for rank in ended) and until is None:
            saved = all(rank.code in {0, *ASKED} for rank in ended)
            until = time.monotonic() + (SAVING_S if saved else GRACE_S if not _killed(ended) else 0.0)
        if asked.at_once is not None:
            name = signal.Signals(asked.at_once).name
            raise RankFailedError(f"all ranks were ended at once by a second {name}", 128 + asked.at_once)
        if until is not None and time.monotonic() >= until:
            break
        _pass_on(running[0], asked)
        time.sleep(POLL_S)
    failed = [rank for rank in running if rank.code not in (None, 0, LOST, *ASKED)]
    if failed:
        culprit = min(failed, key=lambda rank: (rank.code is not None and rank.code >= 0, rank.number))
        raise _failure(culprit, interrupted=bool(asked.moments))
    return _without_failure(running)


def _without_failure(running: Sequence[_Rank]) -> int:
    """Return the exit code if no rank has failed by itself. RankFailedError if ranks lost each other or did not end."""
    for rank in running:
        if rank.code is None:
            message = f"rank {rank.number} did not end when others had, and was ended: {GO_ON}"
            raise RankFailedError(message, LOST)
    if running[0].code == LOST:
        lines = [line for rank in running if rank.code == LOST and (line := rank.error)]
        message = lines[0] if lines else f"the ranks have lost one another; {GO_ON}"
        raise RankFailedError(message, LOST)
    return max(rank.code for rank in running if rank.code is not None and rank.code != LOST)


def _pass_on(first: _Rank, asked: _Asked) -> None:
    """Forward SIGINT to rank 0 if only this process received it. Ctrl-C in a terminal reaches all processes."""
    moment = asked.moments.get(signal.SIGINT)
    if moment is None or asked.passed_on or time.monotonic() - moment < PASSED_ON_S:
        return
    asked.passed_on = True
    if first.process.poll() is None and not _ignores(first.process.pid, signal.SIGINT):
        first.process.send_signal(signal.SIGINT)


def _ignores(pid: int, number: int) -> bool:
    """Return True if a process ignores a signal, as a rank does after receiving it, or if this is unknown."""
    try:
        with open(f"/proc/{pid}/status") as file:
            mask = next(line.split()[1] for line in file if line.startswith("SigIgn:"))
    except (OSError, StopIteration):
        return True
    return bool(int(mask, 16) >> (number - 1) & 1)


def _killed(ended: Sequence[_Rank]) -> bool:
    return any(rank.code is not None and rank.code < 0 for rank in ended)


def _failure(rank: _Rank, *, interrupted: bool) -> RankFailedError:
    """Describe which rank failed and how. The message is empty if rank 0 has already printed its error."""
    assert rank.code is not None
    if rank.code < 0:
        name = signal.Signals(-rank.code).name
        remedy = "" if interrupted else f"; all others were ended: {GO_ON}"
        said = f" ({rank.error})" if rank.error and rank.code != -signal.SIGKILL else ""
        return RankFailedError(f"rank {rank.number} was ended by {name}{said}{remedy}", 128 - rank.code)
    message = rank.error_by_name or f"rank {rank.number} ended with exit code {rank.code}"
    return RankFailedError("" if rank.log is None else message, rank.code)


@contextlib.contextmanager
def _rank(command: Sequence[str], number: int, ranks: int, port: int) -> Iterator[_Rank]:
    usual = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), "GLOO_SOCKET_IFNAME": "lo"}
    usual["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # suppresses torch's warning that no parameter was unused so far
    own = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        LAUNCHED: 1,
        orphans.PARENT: os.getpid(),
    }
    environment = {**usual, **os.environ, **{name: str(value) for name, value in own.items()}}
    log: Any = tempfile.TemporaryFile() if number else None  # noqa: SIM115 - closed below
    process = subprocess.Popen(list(command), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield _Rank(number, process, log)
    finally:
        process.kill()
        process.wait()
        if log is not None:
            log.close()


@contextlib.contextmanager
def _forwarded(first: subprocess.Popen[bytes]) -> Iterator[_Asked]:
    """Forward SIGTERM to rank 0, which all other ranks follow, and yield the signals seen so far.

    A rank that has already received the signal ignores it.
    """
    seen = _Asked()

    def forward(number: int, frame: FrameType | None) -> None:
        seen.add(number)
        if number == signal.SIGTERM and first.poll() is None:
            first.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def command_of(*arguments: str) -> list[str]:
    """Return the command that runs `perfsuite` with these arguments in this interpreter."""
    return [sys.executable, "-m", "perfsuite", *arguments]
