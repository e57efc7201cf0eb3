"""Handling of Ctrl-C and SIGTERM: the first signal ends the run after its window, a second one ends it immediately.

If `perfsuite train --ranks` has started the ranks, that process ends them at the second signal.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Stopping:
    """Context that handles signals. `signal` is the signal that requested the end of the run, or None.

    Python handles signals only in the main thread; in other threads the context does nothing.

    once  whether the same signal may arrive twice for a single request, since a launcher may forward a signal that the
          terminal or the system has already sent. The second signal is then ignored.
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
            if signal.getsignal(number) != signal.SIG_IGN:  # if ignored, a second signal may still come
                signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        # The kernel handles the next signal, which works even while Python waits inside the driver.
        signal.signal(number, self._next)
        again = "Ctrl-C again" if number == signal.SIGINT else f"a second {signal.Signals(number).name}"
        if self.signal is None:
            self.signal = signal.Signals(number)
        self._tell(f"finishing the {self._noun}, then saving; {again} leaves at once")
