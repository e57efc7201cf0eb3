"""Start processes at the cost of a fork: a server process imports torch once, then forks for each task.

Starting Python and importing torch, Hypothesis and Triton takes seconds. The server itself runs no code of the project,
so every task begins in the same state. A task that crashes or hangs affects only its own process.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import importlib
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from perfsuite.system.orphans import die_with_parent

GONE = -signal.SIGKILL
"""Exit code of a task that was killed together with its server."""
KILLED_S = 10.0
"""Time limit in seconds for the server to report that a task was killed."""
START_S = 120.0
"""Time limit in seconds for the server to start and prepare."""
CHUNK = 1 << 16
READY = b"ready"
NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED, which cuInit returns in a fork of a process that has initialised CUDA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """`python -m module arguments…` in the folder `cwd`, with its output in `log`."""

    module: str
    arguments: Sequence[str]
    cwd: Path
    environment: dict[str, str]
    log: Path


class Fork:
    """One task in its own process, with the parts of `subprocess.Popen`'s interface that are needed."""

    def __init__(self, server: _Server, number: int, module: str) -> None:
        self._server, self.number, self.module = server, number, module
        self.pid: int | None = None
        """None until the server has started the process."""
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        self._server.receive(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends and return the exit code. Raises subprocess.TimeoutExpired after `timeout`
        seconds."""
        self._until(lambda: self.returncode is not None, timeout)
        assert self.returncode is not None
        return self.returncode

    def begin(self, timeout: float) -> None:
        """Wait until the server has started the process. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self._until(lambda: self.pid is not None or self.returncode is not None, timeout)

    def _until(self, condition: Callable[[], bool], timeout: float | None) -> None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.module, timeout or 0.0)
            self._server.receive(None if timeout is None else left)

    def kill(self) -> None:
        """Kill the process with all processes that it has started, and wait for its end."""
        self._server.receive(0.0)
        if self.pid is None:
            self._server.close()  # the server is still preparing
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has no process group yet, or it has ended
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
        try:
            self.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            self._server.close()


def finish(fork: Fork, seconds: float) -> int:
    """Wait until the task ends and return its exit code, negative for a signal.

    Raises subprocess.TimeoutExpired after `seconds`. The task is then killed with all processes that it has started.
    """
    try:
        fork.begin(START_S)
        return fork.wait(seconds)
    except BaseException:
        fork.kill()
        raise


class Forks:
    """Server that forks. It starts with the first task, or by `open`, and ends with this process.

    `prepare` is the function, as "module:name", that the server calls first, to import what the tasks need.
    `environment` has the server's environment variables, which some modules read when they are imported.
    """

    def __init__(self, prepare: str, environment: Mapping[str, str]) -> None:
        self._prepare, self._environment = prepare, dict(environment)
        self._server: _Server | None = None
        self._numbers = 0

    def open(self) -> None:
        """Start the server if it does not run yet."""
        if self._server is not None and not self._server.runs():
            self.close()
        if self._server is None:
            self._server = _Server(self._prepare, self._environment)
            atexit.register(self.close)

    def start(self, command: Command, descriptor: tuple[str, int] | None = None) -> Fork:
        """Run the command in a fork.

        `descriptor` is (name, open file descriptor). The fork inherits the descriptor, and its number is in the
        environment variable `name`.
        """
        self.open()
        assert self._server is not None
        self._numbers += 1
        fork = Fork(self._server, self._numbers, command.module)
        self._server.ask(fork, command, descriptor)
        return fork

    def run(self, command: Command, seconds: float) -> int:
        """Run the command as `start` does, wait for its end, and return the exit code, negative for a signal.

        Raises subprocess.TimeoutExpired after `seconds`. The task is then killed with all processes that it has
        started.
        """
        if not hasattr(os, "fork"):
            line, cwd, env = (
                [sys.executable, "-m", command.module, *command.arguments],
                command.cwd,
                command.environment,
            )
            with command.log.open("wb") as out:
                return subprocess.run(line, cwd=cwd, env=env, stdout=out, stderr=out, timeout=seconds).returncode
        return finish(self.start(command), seconds)

    def is_preparing(self) -> bool:
        """Return whether there is a server that is not ready yet."""
        return self._server is not None and self._server.is_preparing()

    def close(self) -> None:
        """End the server, and all tasks that still run."""
        server, self._server = self._server, None
        atexit.unregister(self.close)
        if server is not None:
            server.close()


class _Server:
    """Client of the server, in this process."""

    def __init__(self, prepare: str, environment: Mapping[str, str]) -> None:
        self._forks: dict[int, Fork] = {}
        """Forks that have not ended."""
        self._channel, far = socket.socketpair()
        self._received = b""
        self._ready = False
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from perfsuite.session import fork_server; fork_server.serve({prepare!r})"],
                env=dict(environment),
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the server
            )

    def runs(self) -> bool:
        return self._process.poll() is None and self._channel.fileno() >= 0

    def is_preparing(self) -> bool:
        self.receive(0.0)
        return not self._ready and self.runs()

    def ask(self, fork: Fork, command: Command, descriptor: tuple[str, int] | None) -> None:
        """Request a fork that runs the command. If the server has died, mark the fork as ended."""
        self._forks[fork.number] = fork
        name, *sent = descriptor or ("",)
        task = {**asdict(command), "number": fork.number, "descriptor": name}
        line = memoryview(json.dumps(task, default=str).encode() + b"\n")
        try:
            begun = socket.send_fds(self._channel, [line], sent) if sent else 0
            self._channel.sendall(line[begun:])
        except OSError:
            self.close()

    def receive(self, seconds: float | None) -> None:
        """Read the server's answers. Wait for the first one up to `seconds`, or without a limit if that is None."""
        if self._channel.fileno() < 0:
            return
        ready, _, _ = select.select([self._channel], [], [], seconds)
        if not ready:
            return
        try:
            chunk = self._channel.recv(CHUNK)
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            if line == READY:
                self._ready = True
                continue
            number, what, value = line.split()
            fork = self._forks[int(number)]
            if what == b"pid":
                fork.pid = int(value)
            else:
                fork.returncode = int(value)
                del self._forks[int(number)]

    def close(self) -> None:
        """End the server. Its tasks end with it."""
        self._process.kill()
        self._process.wait()
        self._channel.close()
        while self._forks:
            self._forks.popitem()[1].returncode = GONE


# --- in the server --------------------------------------------------------------------------------------------------


def serve(prepare: str) -> None:
    """Run the server. It reads one task per line from the socket that is its stdin, and answers with process ids and
    exit codes."""
    die_with_parent()
    module, _, name = prepare.partition(":")
    getattr(importlib.import_module(module), name)()
    with socket.socket(fileno=os.dup(0)) as channel:
        _Serving(channel).serve()


class _Serving:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._running: dict[int, int] = {}
        """Process id → the task's number."""
        self._ended, self._note = os.pipe()
        """Ends of a pipe. The first becomes readable when a fork has ended."""
        for end in (self._ended, self._note):
            os.set_blocking(end, False)
        self._forkable = _can_fork()

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._note, warn_on_full_buffer=False)
        tasks, asked = self._tasks(), self._channel.fileno()
        self._say(READY.decode())
        while True:
            ready, _, _ = select.select([asked, self._ended], [], [])
            if self._ended in ready:
                os.read(self._ended, CHUNK)
                self._report()
            if asked in ready:
                arrived = next(tasks, None)
                if arrived is None:
                    return
                for task, descriptor in arrived:
                    self._start(task, descriptor)

    def _tasks(self) -> Iterator[list[tuple[Any, int | None]]]:
        """Yield the tasks that one read of the channel completes, each with its file descriptor or None.

        Advance this iterator when the channel is readable. It ends when the other end closes the channel.
        """
        begun, descriptors = b"", collections.deque[int]()
        while True:
            chunk, sent, _, _ = socket.recv_fds(self._channel, CHUNK, 1)
            if not chunk:
                return
            descriptors += sent
            *lines, begun = (begun + chunk).split(b"\n")
            tasks = [json.loads(line) for line in lines]
            yield [(task, descriptors.popleft() if task["descriptor"] else None) for task in tasks]

    def _start(self, task: Mapping[str, Any], descriptor: int | None) -> None:
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._ended)
            os.close(self._note)
            self._channel.close()
            _become(task, descriptor, forkable=self._forkable)
        if descriptor is not None:
            os.close(descriptor)
        self._running[child] = task["number"]
        self._say(f"{task['number']} pid {child}")

    def _report(self) -> None:
        """Report the forks that have ended."""
        while self._running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            number = self._running.pop(child, None)
            if number is not None:
                self._say(f"{number} code {os.waitstatus_to_exitcode(status)}")

    def _say(self, text: str) -> None:
        self._channel.sendall(f"{text}\n".encode())


def _can_fork() -> bool:
    """Return whether CUDA works in a fork of this process, by trying it in one. It does not work if this process has
    initialised CUDA."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(ctypes.CDLL("libcuda.so.1").cuInit(0) == NOT_INITIALIZED)
        except OSError:
            os._exit(0)  # without a driver there is nothing to initialise
    return os.waitpid(child, 0)[1] == 0


def _become(task: Mapping[str, Any], descriptor: int | None, *, forkable: bool) -> NoReturn:
    """Run the module in the fork as `python -m` does, then exit. If not `forkable`, exec a new Python interpreter."""
    os.setsid()
    die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environment"])
    if descriptor is not None:
        os.environ[task["descriptor"]] = str(descriptor)
        os.set_inheritable(descriptor, True)
    if not forkable:
        os.execv(sys.executable, [sys.executable, "-m", task["module"], *task["arguments"]])
    paths = [task["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = dict.fromkeys([*paths, *sys.path[1:]])
    sys.argv = [task["module"], *task["arguments"]]
    runpy.run_module(task["module"], run_name="__main__", alter_sys=True)
    raise SystemExit(0)
