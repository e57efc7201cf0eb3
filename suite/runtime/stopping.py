"""Ctrl-C and SIGTERM: the first asks the run to end after its window, a second of the same kind ends it at once.

If `perfsuite train --ranks` has started the ranks, that process ends them at the second one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Stopping:
    """Context in which `signal` is the signal that asked the run to end, or None. Only the main thread can listen.

    once  whether the same signal may arrive twice for a single request: a launcher may pass on a signal that the
          terminal or the system has already sent. The second one is then ignored.
    """

    def __init__(self, tell: Callable[[str], None], noun: str = "window", *, once: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self._tell = tell
        self._noun = noun
        self._next = signal.SIG_IGN if once else signal.SIG_DFL
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # otherwise the second one may still come
                signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        # The kernel acts on the next one, which works even while Python waits inside the driver.
        signal.signal(number, self._next)
        again = "Ctrl-C again" if number == signal.SIGINT else f"a second {signal.Signals(number).name}"
        if self.signal is None:
            self.signal = signal.Signals(number)
        self._tell(f"finishing the {self._noun}, then saving; {again} leaves at once")
