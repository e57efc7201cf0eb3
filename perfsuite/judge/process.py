"""The process that runs one module, and the process that it is forked from."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsuite.errors import MOST_CHARACTERS, PerfsuiteError, printable
from perfsuite.judge.memory import Arena, DeviceMemory, HostMemory

HERE = Path(__file__).parent
SANDBOX = HERE / "sandbox.py"
MOST_BYTES = 1 << 20
"""Largest size of a reply, in bytes."""
SEND_LIMIT_S = 10.0
"""Seconds within which a process must read its request."""
ANSWER_LIMIT_S = 30.0
"""Seconds within which a `Nursery` must give each answer after its first."""
DOES_NOT_STOP = 2
"""Answer of a `Nursery` if a process keeps running after SIGSTOP."""
START_LIMIT_S = 120.0
"""Seconds within which Python must have started and imported torch."""
TRACES = ("PYTEST", "HYPOTHESIS", "PERFSUITE", "XDIST")
"""Parts of the names of environment variables that the process does not get."""
SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Environment variables of the process. Inductor then compiles in the process itself, not in a pool of processes."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Fixed thresholds for glibc's allocator. By default they depend on what a process has freed before: one process then
gets fresh pages at every call and another none, and the same module takes five times as long."""
CACHES = ("TMPDIR", "HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
"""Environment variables that name a folder to write to: for all, it is the folder of the process."""


class Ended(Exception):  # noqa: N818 - what it did, in words
    """The process raised an exception, hung or ended. The message says which."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def shortened(text: str) -> str:
    """Return a candidate's text in one line of at most MOST_CHARACTERS, its control characters escaped."""
    shown = printable(text[: 2 * MOST_CHARACTERS])
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]}…"


def _is_reply(found: Any) -> bool:
    """Return whether the object has the form of a reply, since a candidate could also write into the pipe."""

    def is_shape(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int for n in value)

    def is_form(value: Any) -> bool:
        named = isinstance(value, list) and len(value) == 2 and is_shape(value[0]) and isinstance(value[1], str)
        return named or isinstance(value, str)

    def is_operation(value: Any) -> bool:
        named = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
        return named and isinstance(value[1], list) and all(map(is_shape, value[1]))

    parts: dict[str, Callable[[Any], bool]] = {
        "error": lambda v: isinstance(v, str),
        "same_parameters": lambda v: isinstance(v, bool),
        "kept": lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
        "lacking": lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
        "forms": lambda v: isinstance(v, list) and all(map(is_form, v)),
        "paths": lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
        "operations": lambda v: isinstance(v, list) and all(map(is_operation, v)),
    }
    return isinstance(found, dict) and all(name in parts and parts[name](value) for name, value in found.items())


WRITES_REPLIES = "writes into the pipe of its replies"


class Nursery:
    """A process that has imported torch and runs nothing else. The processes that run modules are forked from it."""

    def __init__(self) -> None:
        self.own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {n: v for n, v in os.environ.items() if not any(t in n.upper() for t in TRACES)}
        self.process = subprocess.Popen(
            # -P: nothing is imported from its current folder, which is for temporary files: anybody may write there.
            [sys.executable, "-P", "-c", (HERE / "child.py").read_text(), str(theirs.fileno()), SANDBOX.read_text()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment | {"OMP_WAIT_POLICY": "passive"} | ALLOCATOR,
            pass_fds=(theirs.fileno(),),
            cwd=tempfile.gettempdir(),
        )
        theirs.close()
        self.own.settimeout(START_LIMIT_S)
        self.lock = threading.Lock()

    def ask(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> int:
        """Return the answer to the request: the id of the forked process, the exit code of the one that was ended, or
        the result of stopping one. Raises PerfsuiteError if there is no answer."""
        with self.lock:
            try:
                socket.send_fds(self.own, [json.dumps(request).encode()], files)
                answer = self.own.recv(64)
            except OSError:  # it does not answer in time, or has ended
                answer = b""
            self.own.settimeout(ANSWER_LIMIT_S)
        if not answer:
            raise PerfsuiteError("the process that starts others has ended; run perfsuite judge again")
        return int(answer)

    def close(self) -> None:
        """End the process."""
        self.own.close()
        self.process.wait()


_LIVING: weakref.WeakSet[Process] = weakref.WeakSet()


def abandon() -> None:
    """Kill all judged processes at once and remove their folders, because this process is about to end."""
    for process in list(_LIVING):
        if process.number:
            with contextlib.suppress(OSError):
                os.killpg(process.number, signal.SIGKILL)
        remove(process.folder)


def remove(folder: Path) -> None:
    """Remove the folder of a process that has ended. Its subfolders may be nested too deeply for shutil.rmtree alone,
    so they are moved up first."""
    with contextlib.suppress(OSError):
        while inner := _folders(folder):
            for each in inner:
                for deeper in _folders(each):
                    deeper.rename(folder / secrets.token_hex(16))
                shutil.rmtree(each)
    shutil.rmtree(folder, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    """Return the folders in this folder, and let this process change them, whatever mode they were created with."""
    with os.scandir(folder) as entries:
        found = [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    for each in found:
        each.chmod(0o700)
    return found


@contextlib.contextmanager
def _blaming_the_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PerfsuiteError(
            f"the folder of a candidate cannot be written in {tempfile.gettempdir()}: {error.strerror}; make space "
            f"there, or set TMPDIR to another folder"
        ) from None


class Process:
    """A process that runs the class `name` of the file `source`, confined to a folder of its own.

    It cannot read the files of `hidden`; those of `shown` are in `lacking` if it can read them.
    """

    def __init__(
        self,
        nursery: Nursery,
        source: Path,
        name: str,
        device: str,
        *,
        cpu_s: int,
        hidden: Sequence[str] = (),
        shown: Sequence[str] = (),
    ) -> None:
        self.nursery, self.source, self.name, self.memory = nursery, source, name, HostMemory()
        self.device_memory: Arena = self.memory if device == "cpu" else DeviceMemory()
        self.number, self._rest, self._requests, self._replies = 0, b"", -1, -1
        self.ended = self.closed = False
        with _blaming_the_disk():
            self.folder = Path(tempfile.mkdtemp(prefix="perfsuite-judge-"))
        _LIVING.add(self)
        self.path = self.folder / "candidate.py"
        own = {
            "scratch": str(self.folder),
            "environment": dict.fromkeys(CACHES, str(self.folder)) | SETTINGS,
            "hidden": list(hidden),
            "shown": list(shown),
            "cpu_s": cpu_s,
            "device": device,
        }
        try:
            text = source.read_bytes()
            with _blaming_the_disk():
                self.path.write_bytes(text)
            self._start(own)
            self.lacking: list[str] = self._reply(START_LIMIT_S).get("lacking", [])
        except BaseException:
            self.close()
            raise

    def _start(self, own: Mapping[str, Any]) -> None:
        asked, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        try:
            self.number = self.nursery.ask(own, (asked, replies, self.memory.file))
        finally:
            os.close(asked)
            os.close(replies)

    def clear(self) -> None:
        """Clear the shared memory, to use it from its start again."""
        self.memory.clear()
        self.device_memory.clear()

    def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request and return the reply. Then the process is stopped until the next request.

        Raises Ended if the process raises an exception, hangs or ends.
        """
        self._continue()
        self._send(json.dumps(request).encode())
        return self._checked(self._reply(limit_s))

    def timed(
        self,
        request: Mapping[str, Any],
        limit_s: float,
        fill: Callable[[], None] = lambda: None,
        read: Callable[[], None] = lambda: None,
    ) -> tuple[float, dict[str, Any]]:
        """Return (seconds from the word "go" to the reply, the reply).

        `fill` writes the inputs while the process is stopped, so that it cannot work on them before its time begins.
        `read` is called as soon as the reply arrives, before the process is stopped.
        """
        self.ask(request, limit_s)
        fill()
        begin = time.perf_counter()
        self._continue()
        self._send(b"go")
        line = self._line(limit_s)
        seconds = time.perf_counter() - begin
        read()
        return seconds, self._checked(self._read(line))

    def _continue(self) -> None:
        if self.ended:
            raise Ended("has ended its process")
        with contextlib.suppress(ProcessLookupError):  # it has ended, which the request shows
            os.killpg(self.number, signal.SIGCONT)

    def _reply(self, limit_s: float) -> dict[str, Any]:
        return self._read(self._line(limit_s))

    def _read(self, line: bytes) -> dict[str, Any]:
        """Stop the process until the next request, and return the reply that the line contains."""
        stopped = self.nursery.ask({"stop": self.number})
        if stopped:
            how = self._end()
            raise Ended("keeps running when it is stopped" if stopped == DOES_NOT_STOP else how)
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not _is_reply(found):
            self._end()
            raise Ended(WRITES_REPLIES)
        replied: dict[str, Any] = found
        return replied

    def _checked(self, found: dict[str, Any]) -> dict[str, Any]:
        if "error" in found:
            raise Ended(f"raises {found['error']}")
        return found

    def _send(self, line: bytes) -> None:
        left = line + b"\n"
        until = time.monotonic() + SEND_LIMIT_S
        try:
            while left:
                # A process that fills its own pipe must not block this one.
                _, ready, _ = select.select([], [self._requests], [], max(0.0, until - time.monotonic()))
                if not ready:
                    self._end()
                    raise Ended("takes no request: it fills the pipe through which they come")
                left = left[os.write(self._requests, left[: select.PIPE_BUF]) :]
        except BrokenPipeError:
            raise Ended(self._end()) from None

    def _line(self, limit_s: float) -> bytes:
        until = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            ready, _, _ = select.select([self._replies], [], [], max(0.0, left))
            if not ready or left <= 0:
                self._end()
                raise Ended(f"hangs: it was stopped after {limit_s:g} s (--limit allows more)")
            part = os.read(self._replies, 1 << 16)
            if not part:
                raise Ended(self._end())
            self._rest += part
            if len(self._rest) > MOST_BYTES:
                self._end()
                raise Ended(WRITES_REPLIES)
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _end(self) -> str:
        self.ended = True
        code = self.nursery.ask({"end": self.number})
        return f"ends its process with {'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}"

    def close(self) -> None:
        """End the process and all that it started, and remove its folder. Further calls do nothing."""
        if self.closed:
            return
        self.closed = True
        _LIVING.discard(self)
        try:
            if self.number and not self.ended:
                self._end()
        finally:
            for file in {self._requests, self._replies} - {-1}:
                os.close(file)
            for held in {self.memory, self.device_memory}:
                held.close()
            remove(self.folder)


def refuse_where_unsupported() -> None:
    """Raise PerfsuiteError if this system cannot confine a process."""
    if not sys.platform.startswith("linux"):
        raise PerfsuiteError("perfsuite judge needs Linux: elsewhere it cannot confine what it runs")
