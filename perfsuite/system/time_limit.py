"""Stop a call after a time limit."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CutOff(BaseException):
    """Raised inside a call after the time limit. It is not a subclass of Exception, so that error handlers do not catch
    it."""


class Timer:
    """Record of whether the time limit was reached. Code may convert CutOff into another exception, or catch it and
    continue."""

    up = False


@contextmanager
def cut_off(seconds: float) -> Iterator[Timer]:
    """Raise CutOff in the block after this number of seconds, as soon as Python code runs in it.

    Only the main thread on POSIX can be interrupted. Elsewhere the block runs to its end.
    """
    found = Timer()
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield found
        return

    def stop(number: int, frame: object) -> None:
        found.up = True
        raise CutOff

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
