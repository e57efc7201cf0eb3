"""Fresh processes at the cost of a fork: a server process imports torch once, then forks for each task.

Starting Python and importing torch, Hypothesis and Triton takes seconds. The server runs no code of the project itself,
so that every task begins in the same state. A task that crashes or hangs takes nothing down but its own process.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsuite.orphans import die_with_parent

GONE = -signal.SIGKILL
"""The exit code of a task whose server was killed with it."""
KILLED_S = 10.0
"""Seconds that the server may take to report a task that was killed."""
START_S = 120.0
"""Seconds that the server may take to prepare itself."""


class Forks:
    """A server that starts with the first task and ends with this process.

    `prepare` is the function, "module:name", that the server calls first, to import what the tasks need. Some modules
    read the environment when they are imported: the server's is `environment`.
    """

    def __init__(self, prepare: str, environment: Mapping[str, str]) -> None:
        self._prepare, self._environment = prepare, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        log: Path,
        seconds: float,
    ) -> int:
        """Run `python -m module arguments…` in a fork, with its output in `log`; the exit code, negative for a signal.

        Raises subprocess.TimeoutExpired after `seconds`; the task is then killed with all processes it has started.
        """
        if not hasattr(os, "fork"):
            with log.open("wb") as out:
                command = [sys.executable, "-m", module, *arguments]
                done = subprocess.run(command, cwd=cwd, env=environment, stdout=out, stderr=out, timeout=seconds)
            return done.returncode
        task = {"module": module, "arguments": [*arguments], "cwd": str(cwd), "environment": dict(environment)}
        begun = self._ask({**task, "log": str(log)}, START_S)
        if begun is None:
            return GONE
        try:
            ended = self._answer(seconds)
        except TimeoutError:
            self._kill(begun)
            raise subprocess.TimeoutExpired(module, seconds) from None
        except BaseException:
            self._kill(begun)
            self.close()
            raise
        if ended is None:
            self._kill(begun)
            self.close()
        return GONE if ended is None else ended

    def _kill(self, fork: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(fork, signal.SIGKILL)
        try:
            self._answer(KILLED_S)
        except TimeoutError:
            self.close()

    def _ask(self, task: Mapping[str, Any], seconds: float) -> int | None:
        """Hand a task to the server; the process id of the fork, or None where the server has died."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
            return self._answer(seconds)
        except (OSError, TimeoutError):
            self.close()
            return None

    def _start(self) -> None:
        self.close()
        code = f"from perfsuite import forks; forks.serve({self._prepare!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one
        )
        self._read = b""
        atexit.register(self.close)

    def _answer(self, seconds: float) -> int | None:
        """The next number that the server writes; None where it has died."""
        assert self._process is not None
        assert self._process.stdout is not None
        stream, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._read:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            chunk = os.read(stream, 1 << 12)
            if not chunk:
                return None
            self._read += chunk
        line, _, self._read = self._read.partition(b"\n")
        return int(line)

    def close(self) -> None:
        """End the server."""
        process, self._process = self._process, None
        atexit.unregister(self.close)
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def serve(prepare: str) -> None:
    """The server: one task a line on stdin; for each it writes the process id of the fork, then the exit code."""
    die_with_parent()
    module, _, name = prepare.partition(":")
    getattr(importlib.import_module(module), name)()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answers.close()
            _become(json.loads(line))
        answers.write(f"{child}\n")
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")


def _become(task: Mapping[str, Any]) -> None:
    """In the fork: run the module as `python -m` does, then exit."""
    os.setsid()
    die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environment"])
    paths = [task["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = dict.fromkeys([*paths, *sys.path[1:]])
    sys.argv = [task["module"], *task["arguments"]]
    runpy.run_module(task["module"], run_name="__main__", alter_sys=True)
    raise SystemExit(0)
