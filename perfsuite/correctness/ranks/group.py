"""Groups of torch.distributed processes that call sides together, started by torch's elastic launcher.

A group is started when it is first needed, and then serves many calls. If one rank raises alone, hangs or exits, the
whole group is ended. The next call starts a new one.
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

from perfsuite import errors
from perfsuite.correctness.execution import Leaves
from perfsuite.declare.pair import Pair
from perfsuite.errors import MachineError, is_library
from perfsuite.records import Case
from perfsuite.state import process_state
from perfsuite.system.folders import socket_folder

START_S = 120.0
"""Seconds within which all ranks must start. On a busy machine importing torch takes long."""
COLLECTIVE_S = 15.0
"""Seconds after which a collective of torch.distributed raises in the ranks that wait in it."""
GRACE_S = 5.0
"""Seconds to wait for the replies of the other ranks once one has raised."""
CALL_S = 300.0
"""The most seconds that a call of all ranks may take. Kernels may be compiled in it."""
APART_S = 20.0
"""Seconds within which the last rank must return after the first one."""
EXIT_CODE_S, POLL_S = 20.0, 0.05
"""Seconds to wait for the launcher to log the exit code of a rank, which takes about 4 s, and between two reads of its
log."""
STACK_S = 1.0
"""Seconds to wait for the ranks to write their stacks."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request that all ranks call a side once."""

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
    """A fault of a side that perfsuite found in one rank. `text` follows the side's name. If `kind` is not empty, the
    side has left the process changed, so that the group must end."""


@dataclass(frozen=True, slots=True)
class Verdict(Raised):
    """An error that perfsuite raised in one rank: `kind` is the name of its class in perfsuite.errors."""

    def error(self, where: str) -> BaseException:
        """Return the error, with `where` appended to its text."""
        made: BaseException = getattr(errors, self.kind)(f"{self.text}{where}")
        return made


@dataclass(frozen=True, slots=True)
class Phase:
    """Message of rank 0 that it begins a phase: the name of a side, or of other work. It needs no answer."""

    name: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a request in one rank."""

    outcome: Any


WAITING = ("gloo", "timed out", "timeout caused", "socket timeout", "wait timeout", "closed by peer", "reset by peer")
"""Words of errors of collectives that failed because another rank did not reach them."""
Reply: TypeAlias = Any
"""Message of a rank: outputs, Raised, None when it is prepared for the call, or a message to `Group.converse`."""


class RanksFailed(Exception):  # noqa: N818 - reported as a verdict on the side
    """Not all ranks returned outputs. The message follows the side's name."""


@contextmanager
def alone(pair: Pair, device: str) -> Iterator[None]:
    """Provide a default process group of this process alone inside the block, for a pair with ranks. An existing group
    is kept."""
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
        """Start the ranks. Raises MachineError if they do not start.

        With `blocking` the host waits for each NCCL collective, and raises if it times out, which is unsuitable for
        timing. Without it, a rank's process is aborted if a collective times out.
        """
        self.ranks, self.device = ranks, device
        self.on_phase: Callable[[str], None] = lambda name: None
        self.folder = socket_folder()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `close`
        self.pids: dict[int, int] = {}
        self.connections: dict[int, connection.Connection] = {}
        address = str(Path(self.folder.name) / "socket")
        if device == "cpu" and hasattr(os, "fork") and not torch.cuda.is_available():
            command = ["perfsuite.correctness.ranks.forked", str(ranks)]
        else:
            standalone = ["--standalone", f"--nproc-per-node={ranks}", "-m", "perfsuite.correctness.ranks.process"]
            command = ["torch.distributed.run", *standalone]
        # Ranks of one machine connect over its loopback interface, whatever the host name resolves to.
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
            with listener:  # closing it removes the socket from the folder
                self._accept(listener)
        except BaseException:
            self.close()
            raise

    def _accept(self, listener: connection.Listener) -> None:
        """Accept the connections of all ranks, and wait until they have formed a process group."""
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
        """Wait until all ranks have formed a process group. Raises MachineError if they do not."""
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
        """Return which rank exited first, and its exit code; "" if the launcher does not log it. The launcher then ends
        the others."""
        found = self._logged(r"exitcode: (-?\d+)\) local_rank: (\d+) ", wait_s)
        return f"rank {found[2]} ends with exit code {found[1]}" if found else ""

    def _logged(self, pattern: str, wait_s: float) -> re.Match[str] | None:
        """Wait for a match in the launcher's log and return it; None after `wait_s` seconds, or if the launcher has
        exited without one."""
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
        except BaseException:  # such as a time limit, while the ranks are still running
            self.close()
            raise

    def _call(self, pair: Pair, side: str, case: Case, module: ModuleType) -> list[Leaves]:
        settings = process_state.sendable_settings()
        place = (module.__name__, str(module.__file__), pair.name)
        request = Request(*place, side, case, pair.equal_parts, sys_path=list(sys.path), settings=settings)
        # The ranks call the side only after all have imported the pair's module and made the inputs, so that no rank
        # waits in a collective while another one prepares.
        for message in (request, None):
            self._send(message)
            replies = self._replies(START_S if message is request else APART_S)
            raised = {rank: reply for rank, reply in replies.items() if isinstance(reply, Raised)}
            if raised:
                self._fail(replies, raised)
        return [leaves for _, leaves in sorted(replies.items()) if isinstance(leaves, dict)]

    def converse(self, request: Any, answer: Callable[[list[Any]], Any], limit_s: float) -> list[Any]:
        """Send the request to all ranks, and answer their messages until each sends Ended. Return the outcomes by rank.

        All ranks send messages at the same points. `answer` gets these messages, by rank, and returns one reply for all
        ranks. Raises RanksFailed if a rank stops replying or raises, and the error of a Verdict that a rank sends.
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
            with contextlib.suppress(BrokenPipeError):  # `_replies` then finds that the rank has exited
                one.send(message)

    def _fail(self, replies: dict[int, Reply], raised: dict[int, Raised]) -> NoReturn:
        """Raise RanksFailed for the errors of the ranks. The group ends, unless all ranks raised the same error or all
        replied and one found a fault."""
        for rank, reply in raised.items():
            if isinstance(reply, Found) and len(replies) == self.ranks:
                if reply.kind:
                    self.close()
                raise RanksFailed(reply.text if len(raised) == self.ranks else f"{reply.text} (on rank {rank})")
        alike = len(raised) == self.ranks and len({(r.kind, r.place) for r in raised.values()}) == 1
        if alike and not _is_of_waiting(raised[0]):
            raise RanksFailed(f"raises {raised[0]}")
        self.close()  # the ranks may be in different states
        raise RanksFailed(_apart(raised, [rank for rank in replies if rank not in raised], self.ranks))

    def _replies(self, apart_s: float, limit_s: float = CALL_S) -> dict[int, Reply]:
        """Return the replies by rank. Raises RanksFailed if a rank exits, or does not reply within `limit_s` seconds or
        within `apart_s` seconds after the first reply.

        If a rank has raised by then, and not because a collective timed out, return the replies so far instead.
        """
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
        """End the group. Return a message that says which ranks have not replied, and at which line each one is."""
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
        """End the group. Return a message that says how the rank's process exited, from the launcher's log."""
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
    """Return a message about ranks that ended differently: which raised, which timed out in a collective, which
    returned."""
    waiting = [rank for rank in sorted(raised) if _is_of_waiting(raised[rank])]
    itself = [rank for rank in sorted(raised) if rank not in waiting]
    if itself:
        others = [rank for rank in range(ranks) if rank not in itself]
        wait = f", while {_named(others)} {'goes' if len(others) == 1 else 'go'} on" if others else ""
        first = raised[itself[0]]
        what = first.text if isinstance(first, Found) else f"raises {first}"
        return f"{what} on {_named(itself)}{wait}"
    where = ", ".join(f"{_named([rank])} at {raised[rank].place or 'a place of torch'}" for rank in waiting)
    end = f", while {_named(returned)} returned" if returned else ": they wait for different ones"
    return f"waits in vain for the other ranks in a collective, {where}{end}"


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _is_of_waiting(raised: Raised) -> bool:
    """Return whether the error looks like a collective that failed because another rank did not reach it."""
    return raised.kind.startswith("Dist") or any(word in raised.text.lower() for word in WAITING)


def _place(stack: Path) -> str:
    """Return " at FILE:LINE" for the innermost line of the user's code in the stack that a rank wrote, or ""."""
    for line in stack.read_text().splitlines():
        found = re.match(r'\s+File "(.+)", line (\d+)', line)
        if found and not found[1].startswith("<") and not is_library(Path(found[1])):
            return f" at {Path(found[1]).name}:{found[2]}"
    return ""


_groups: dict[tuple[int, str], Group] = {}


def group_of(ranks: int, device: str) -> Group:
    """Return this process's group of `ranks` ranks, and start it if there is none."""
    key = (ranks, device)
    if key not in _groups:
        _groups[key] = Group(ranks, device)
    return _groups[key]


@atexit.register
def close_all() -> None:
    """End all groups of this process."""
    for group in list(_groups.values()):
        group.close()
