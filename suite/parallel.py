"""Runs tasks in several processes, none of which outlives the process that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from perfsuite.system import orphans
from suite.building import StoppedError

MOST = 256
"""Maximum number of processes."""
PATIENCE_S = 5.0
"""Seconds that a process has to end after the request."""


def each(work: Callable[[int], None], tasks: Sequence[int], workers: int) -> Generator[int, None, None]:
    """Call `work(task)` for every task, and yield each task when it is done, in any order.

    With one worker, the tasks run in this process. With more, they run in up to `workers` spawned processes; `work`
    must be picklable, and its results must not depend on the process. If `work` raises an exception, it is raised here
    and the other processes are ended. StoppedError if a process was killed.
    """
    if min(workers, len(tasks)) <= 1:
        for task in tasks:
            work(task)
            yield task
        return
    context = multiprocessing.get_context("spawn")  # not fork, since a thread of this process may hold a lock
    processes: dict[Connection, Any] = {}
    left = iter(tasks)
    try:
        for _ in range(min(workers, len(tasks))):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, work, os.getpid()), daemon=True)
            with _interrupts_ignored():
                process.start()
            there.close()  # otherwise the process's end would go unnoticed here
            processes[here] = process
            with contextlib.suppress(OSError):  # the process has ended, which `wait` reports
                here.send(next(left))
        for _ in tasks:
            ready = connection.wait(list(processes))[0]
            assert isinstance(ready, Connection)
            yield _received(ready, processes[ready])
            with contextlib.suppress(StopIteration, OSError):
                ready.send(next(left))
    finally:
        for end in processes:
            end.close()
        for process in processes.values():
            process.terminate()
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Make processes started in the block ignore Ctrl-C, which reaches all processes. This one ends them instead."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _received(end: Connection, process: Any) -> int:
    try:
        task, error = end.recv()
    except (EOFError, OSError):
        process.join(PATIENCE_S)
        raise StoppedError(
            f"a worker process ended unexpectedly ({_ended(process.exitcode)}); lower --workers if memory is short, "
            "and run the same command again: it goes on from here"
        ) from None
    if error is not None:
        raise error
    return int(task)


def _ended(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _serve(end: Connection, work: Callable[[int], None], parent: int) -> None:
    """Serve as a worker: run each task that arrives until there are no more."""
    os.environ[orphans.PARENT] = str(parent)
    orphans.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a parent thread other than the main thread could not set this
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = end.recv()
            try:
                work(task)
            except Exception as error:
                end.send((task, error))
                return
            end.send((task, None))
