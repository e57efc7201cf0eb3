"""Processes of torch.distributed that call sides together, started by torch's elastic launcher.

A group is started when it is first needed and answers many calls. A rank that raises alone, hangs or ends takes the
group with it, which the next call starts again.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from perfsuite import errors, process_state
from perfsuite.errors import MachineError
from perfsuite.execution import Leaves
from perfsuite.folders import socket_folder
from perfsuite.pair import Pair
from perfsuite.records import Case

START_S = 120.0
"""Seconds for all ranks to start: on a busy machine importing torch takes long."""
COLLECTIVE_S = 15.0
"""Seconds for a collective of torch.distributed, after which it raises in the ranks that wait."""
GRACE_S = 5.0
"""Seconds for the other ranks to raise what one has raised."""
CALL_S = 300.0
"""Seconds for a call of all ranks. Kernels may be compiled in it."""
APART_S = 20.0
"""Seconds for the last rank to return after the first has."""
EXIT_CODE_S, POLL_S = 20.0, 0.05
"""Seconds for the launcher to write a rank's exit code, which takes it four, and between two readings of its log."""
STACK_S = 1.0
"""Seconds for the ranks to write where they are."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a side by all ranks."""

    module: str
    path: str
    pair: str
    side: str
    case: Case
    equal_parts: bool
    sys_path: list[str]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Raised:
    """An error that a side raised in one rank."""

    kind: str
    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}{f' at {self.place}' if self.place else ''}: {self.text}"


@dataclass(frozen=True, slots=True)
class Found(Raised):
    """A fault of a side in one rank: words that follow its name. One of a kind has changed the process itself."""


@dataclass(frozen=True, slots=True)
class Verdict(Raised):
    """A finding of perfsuite itself in one rank: the name of an error of its own, with its text."""

    def error(self, where: str) -> BaseException:
        """Return the error, with words on where it was found."""
        made: BaseException = getattr(errors, self.kind)(f"{self.text}{where}")
        return made


@dataclass(frozen=True, slots=True)
class Phase:
    """The next phase of rank 0: the name of a side, or of work that runs no side alone. It awaits no answer."""

    name: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a request in one rank."""

    outcome: Any


Reply: TypeAlias = Any
"""A message of a rank: outputs, Raised, None where it is prepared, or one of a conversation."""


class RanksFailed(Exception):  # noqa: N818 - reported as a verdict on the side
    """The ranks did not all answer: words that follow the side's name."""


@contextmanager
def alone(pair: Pair, device: str) -> Iterator[None]:
    """Provide a default process group of this process alone in the block, for a pair with ranks. An existing group
    stays as it is."""
    if not pair.ranks or dist.is_initialized():
        yield
        return
    process_state.begin_group(device)
    try:
        yield
    finally:
        if dist.is_initialized():  # a side may have ended it
            dist.destroy_process_group()


def lacking(ranks: int, device: str) -> str | None:
    """Return why this many ranks cannot run on this machine; None if they can."""
    if not dist.is_available():
        return "torch is built without torch.distributed"
    have = torch.cuda.device_count()
    if device == "cuda" and have < ranks:
        return f"needs {ranks} CUDA devices; {have} here"
    return None


class Group:
    """A group of ranks on one kind of device."""

    def __init__(self, ranks: int, device: str, collective_s: float = COLLECTIVE_S, *, blocking: bool = True) -> None:
        """With `blocking` the host waits for each NCCL collective, and raises where it times out: not for timing.
        Without it, the process of a rank that waits in vain is aborted."""
        self.ranks, self.device = ranks, device
        self.on_phase: Callable[[str], None] = lambda name: None
        self.folder = socket_folder()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `close`
        self.pids: dict[int, int] = {}
        self.connections: dict[int, connection.Connection] = {}
        address = str(Path(self.folder.name) / "socket")
        if device == "cpu" and hasattr(os, "fork") and not torch.cuda.is_available():
            command = ["perfsuite.ranks.forked", str(ranks)]
        else:
            standalone = ["--standalone", f"--nproc-per-node={ranks}", "-m", "perfsuite.ranks.process"]
            command = ["torch.distributed.run", *standalone]
        # Ranks of one machine find each other over its loopback interface, whatever its name resolves to.
        usual = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment = {**usual, **os.environ, "TORCH_NCCL_BLOCKING_WAIT": str(int(blocking))}
        listener = connection.Listener(address, "AF_UNIX", backlog=ranks)
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", *command, address, self.folder.name, device, f"{collective_s}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        try:
            with listener:  # it removes its socket, which lies in the folder
                self._accept(listener)
        except BaseException:
            self.close()
            raise

    def _accept(self, listener: connection.Listener) -> None:
        """Take the connections of all ranks, and have them form a process group together."""
        socket: Any = listener._listener._socket  # type: ignore[attr-defined]  # a Listener has no time limit
        until = time.monotonic() + START_S
        while len(self.connections) < self.ranks:
            socket.settimeout(1.0)
            if self.launcher.poll() is not None or time.monotonic() > until:
                raise self._not_started(self._first_end(0.0) or self._last_line())
            with contextlib.suppress(TimeoutError):
                accepted = listener.accept()
                rank, pid = accepted.recv()
                self.connections[rank], self.pids[rank] = accepted, pid
        self._send(None)
        self._form_group()

    def _form_group(self) -> None:
        """Wait until all ranks have formed a process group. Raises MachineError where one does not."""
        waiting, until = {one: rank for rank, one in self.connections.items()}, time.monotonic() + START_S
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                raise self._not_started(f"{_named(sorted(waiting.values()))} form no process group in {START_S:.0f} s")
            for one in ready:
                rank = waiting.pop(one)  # type: ignore[call-overload]  # wait gives back what it was given
                try:
                    reason = self.connections[rank].recv()
                except (EOFError, ConnectionResetError):
                    raise self._not_started(
                        self._first_end(EXIT_CODE_S) or f"the process of rank {rank} ends"
                    ) from None
                if reason is not None:
                    raise self._not_started(f"rank {rank}: {reason}")

    def _first_end(self, wait_s: float) -> str:
        """Return which process ended first, and how: it ends the others. "" where the launcher does not write it."""
        found = self._logged(r"exitcode: (-?\d+)\) local_rank: (\d+) ", wait_s)
        return f"rank {found[2]} ends with exit code {found[1]}" if found else ""

    def _logged(self, pattern: str, wait_s: float) -> re.Match[str] | None:
        """Return the match in the launcher's log, once it is there; None after these seconds, or when it has ended."""
        until = time.monotonic() + wait_s
        while True:
            last = self.launcher.poll() is not None or time.monotonic() >= until
            found = re.search(pattern, self._text())
            if found or last:
                return found
            time.sleep(POLL_S)

    def _not_started(self, reason: str) -> MachineError:
        return MachineError(f"{self.ranks} processes of torch.distributed do not start: {reason}")

    def call(self, pair: Pair, side: str, case: Case, module: ModuleType) -> list[Leaves]:
        """Call the side in all ranks and return the outputs by rank. Raises RanksFailed if a rank does not return."""
        try:
            return self._call(pair, side, case, module)
        except RanksFailed:
            raise
        except BaseException:  # as of a time limit: the ranks are still at it
            self.close()
            raise

    def _call(self, pair: Pair, side: str, case: Case, module: ModuleType) -> list[Leaves]:
        settings = process_state.sendable_settings()
        place = (module.__name__, str(module.__file__), pair.name)
        request = Request(*place, side, case, pair.equal_parts, sys_path=list(sys.path), settings=settings)
        # Once all have imported the pair's module and made the inputs they call the side together: no rank waits in a
        # collective for the preparations of another.
        for message in (request, None):
            self._send(message)
            replies = self._replies(START_S if message is request else APART_S)
            raised = {rank: reply for rank, reply in replies.items() if isinstance(reply, Raised)}
            if raised:
                self._fail(replies, raised)
        return [leaves for _, leaves in sorted(replies.items()) if isinstance(leaves, dict)]

    def converse(self, request: Any, answer: Callable[[list[Any]], Any], limit_s: float) -> list[Any]:
        """Send the request to all ranks, and answer what they send until all have Ended; return the outcomes by rank.

        All ranks send at the same points. `answer` gets what they sent, by rank, and returns the reply to each. Raises
        RanksFailed if a rank does not go on; a Verdict of a rank is raised.
        """
        message = request
        try:
            while True:
                self._send(message)
                replies = self._replies(APART_S, limit_s)
                raised = {rank: reply for rank, reply in replies.items() if isinstance(reply, Raised)}
                for rank, reply in raised.items():
                    if isinstance(reply, Verdict):
                        raise reply.error(f" (on rank {rank} of {self.ranks})" if len(raised) == 1 else "")
                if raised:
                    self._fail(replies, raised)
                found = [reply for _, reply in sorted(replies.items())]
                if all(isinstance(reply, Ended) for reply in found):
                    return [reply.outcome for reply in found]
                message = answer(found)
        except RanksFailed:
            raise
        except BaseException:
            self.close()
            raise

    def _send(self, message: Any) -> None:
        for one in self.connections.values():
            with contextlib.suppress(BrokenPipeError):  # its end shows where its reply is awaited
                one.send(message)

    def _fail(self, replies: dict[int, Reply], raised: dict[int, Raised]) -> NoReturn:
        """Raise RanksFailed for what the ranks raised. The group ends unless all of them raised the same, or all
        answered."""
        for rank, reply in raised.items():
            if isinstance(reply, Found) and len(replies) == self.ranks:
                if reply.kind:
                    self.close()
                raise RanksFailed(reply.text if len(raised) == self.ranks else f"{reply.text} (on rank {rank})")
        alike = len(raised) == self.ranks and len({(r.kind, r.place) for r in raised.values()}) == 1
        if alike and not _is_of_waiting(raised[0]):
            raise RanksFailed(f"raises {raised[0]}")
        self.close()  # the ranks may have gone different ways
        raise RanksFailed(_apart(raised, [rank for rank in replies if rank not in raised], self.ranks))

    def _replies(self, apart_s: float, limit_s: float = CALL_S) -> dict[int, Reply]:
        """Return the replies by rank. Raises RanksFailed where a rank ends, or does not reply within `apart_s` after
        the first."""
        replies: dict[int, Reply] = {}
        until = time.monotonic() + limit_s
        while len(replies) < self.ranks:
            open_ = {one: rank for rank, one in self.connections.items() if rank not in replies}
            ready = connection.wait(list(open_), max(0.0, until - time.monotonic()))
            if not ready:
                raised = [reply for reply in replies.values() if isinstance(reply, Raised)]
                if any(not _is_of_waiting(reply) for reply in raised):
                    return replies
                raise RanksFailed(self._hanging(replies))
            for one in ready:
                rank = open_[one]  # type: ignore[index]  # wait gives back what it was given
                try:
                    content = self.connections[rank].recv_bytes()
                except (EOFError, ConnectionResetError):
                    raise RanksFailed(self._ended(rank)) from None
                reply = torch.load(io.BytesIO(content), weights_only=False)
                if isinstance(reply, Phase):
                    self.on_phase(reply.name)
                    continue
                replies[rank] = reply
                most = min(GRACE_S, apart_s) if isinstance(replies[rank], Raised) else apart_s
                until = min(until, time.monotonic() + most)
        return replies

    def _hanging(self, replies: dict[int, Reply]) -> str:
        """Return which ranks have not returned, and where they are. Ends the group."""
        missing = [rank for rank in range(self.ranks) if rank not in replies]
        for rank in missing:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(STACK_S)
        where = [f"rank {rank}{_place(Path(self.folder.name) / str(rank))}" for rank in missing]
        waiting = sorted(rank for rank, reply in replies.items() if isinstance(reply, Raised))
        verb = "returned" if not waiting else "waits" if len(replies) == 1 else "wait"
        others = f" while {_named(sorted(replies))} {verb}" if replies else ""
        self.close()
        return f"hangs: {', '.join(where)} did not return{others}"

    def _ended(self, rank: int) -> str:
        """Return how the rank's process ended, which the launcher writes. Ends the group."""
        found = self._logged(rf"exitcode: (-?\d+)\) local_rank: {rank} ", EXIT_CODE_S)
        if re.search(r"\[Rank \d+\] Watchdog caught collective operation timeout", self._text()):
            waits = Raised(kind="", text="timed out", place="")
            return self._hanging({rank: waits})
        self.close()
        code = int(found[1]) if found else None
        if code is None:
            return f"ends the process of rank {rank}"
        if code < 0:
            return f"ends the process of rank {rank} by {signal.Signals(-code).name}"
        return f"ends the process of rank {rank} with exit code {code}"

    def _text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def _last_line(self) -> str:
        lines = [line for line in self._text().splitlines() if line.strip()]
        return lines[-1].strip() if lines else "its launcher says nothing"

    def close(self) -> None:
        """End all ranks."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pids.clear()
        self.launcher.kill()
        self.launcher.wait()
        for one in self.connections.values():
            one.close()
        self.log.close()
        self.folder.cleanup()
        for key in [key for key, group in _groups.items() if group is self]:
            del _groups[key]


def _apart(raised: dict[int, Raised], returned: list[int], ranks: int) -> str:
    """Return a message for ranks that ended differently: which raised, which waited in vain, which returned."""
    waiting = [rank for rank in sorted(raised) if _is_of_waiting(raised[rank])]
    itself = [rank for rank in sorted(raised) if rank not in waiting]
    if itself:
        others = [rank for rank in range(ranks) if rank not in itself]
        wait = f", while {_named(others)} {'goes' if len(others) == 1 else 'go'} on" if others else ""
        return f"raises {raised[itself[0]]} on {_named(itself)}{wait}"
    where = ", ".join(f"{_named([rank])} at {raised[rank].place or 'a place of torch'}" for rank in waiting)
    end = f", while {_named(returned)} returned" if returned else ": they wait for different ones"
    return f"waits in vain for the other ranks in a collective, {where}{end}"


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _is_of_waiting(raised: Raised) -> bool:
    """Return whether a collective timed out because another rank did not come to it."""
    words = ("timed out", "timeout", "connection closed", "connection reset", "peer")
    return any(word in raised.text.lower() for word in words)


def _place(stack: Path) -> str:
    """Return where a rank is: the innermost line of the user's code in what it wrote."""
    for line in stack.read_text().splitlines():
        found = re.match(r'\s+File "(.+)", line (\d+)', line)
        if found and "site-packages" not in found[1] and str(Path(__file__).parents[1]) not in found[1]:
            return f" at {Path(found[1]).name}:{found[2]}"
    return ""


_groups: dict[tuple[int, str], Group] = {}


def group_of(ranks: int, device: str) -> Group:
    """Return this process's group of `ranks` ranks, started when it is first needed."""
    key = (ranks, device)
    if key not in _groups:
        _groups[key] = Group(ranks, device)
    return _groups[key]


@atexit.register
def close_all() -> None:
    """End all groups of this process."""
    for group in list(_groups.values()):
        group.close()
