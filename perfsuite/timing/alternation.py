"""Let two processes, one for each environment, take turns in timing the blocks of a workload.

The blocks are in the order A B, B A, A B and so on, so that a linear drift of the device affects both alike. Each
process reports over a socket when it is prepared, how many blocks it plans, and when it has finished a block.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from perfsuite.errors import PerfsuiteError

GONE = ".gone"
"""Suffix of the file that says that the other process will not connect."""
POLL_S = 0.1
"""Seconds between two checks for that file."""
SPIN_S = 0.02
"""Seconds to wait after a block, so that threads of a pool stop spinning before the other process times."""
ENDED = "the process in the other environment ended before this workload was timed"


class Alternation:
    """One process's end of the connection. It is closed at the end of its context.

    place   path of the socket, at most about 100 characters
    number  0 for the process that times first in the first block, 1 for the other
    waits   called with true before each wait for the other process, and with false after it, so that the time limit of
            this process does not include the wait
    """

    def __init__(self, place: str, number: int, waits: Callable[[bool], None] = lambda begins: None) -> None:
        self._place, self._number, self._waits = place, number, waits
        self._socket: socket.socket | None = None
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def planned(self, plan: Callable[[], int]) -> int:
        """Wait until both are prepared, call `plan` in one process after the other, and return the smaller of the two
        numbers of blocks."""
        self._connect()
        theirs = self._receive() if self._number else None
        own = plan()
        self._send(own)
        return min(own, self._receive() if theirs is None else theirs)

    def begin(self) -> None:
        """Wait until this process may time the first block."""
        if self._number:
            self._expect(0)

    def ended(self, block: int, *, last: bool) -> None:
        """Report that this process has timed a block, and wait until it may time the next one. After the last block,
        wait until both have finished."""
        time.sleep(SPIN_S)
        self._send(block)
        was_first = (block + self._number) % 2 == 0
        if was_first:
            self._expect(block)
            if not last:  # the other process is first in the next block
                self._expect(block + 1)

    def close(self) -> None:
        """Close the connection, which ends the other process's wait."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        self._waits(True)
        if self._number:
            self._socket = self._called()
        else:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
                listening.bind(f"{self._place}.new")
                listening.listen(1)
                listening.settimeout(POLL_S)
                os.rename(f"{self._place}.new", self._place)  # only now can the other process find it
                self._socket = self._answered(listening)
        self._socket.settimeout(POLL_S)
        self._waits(False)

    def _answered(self, listening: socket.socket) -> socket.socket:
        while True:
            with contextlib.suppress(TimeoutError):
                return listening.accept()[0]
            self._check()

    def _called(self) -> socket.socket:
        while True:
            calling = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                calling.connect(self._place)
            except OSError:
                calling.close()
                self._check()
                time.sleep(POLL_S)
            else:
                return calling

    def _check(self) -> None:
        if os.path.exists(f"{self._place}{GONE}"):
            raise PerfsuiteError(ENDED)

    def _expect(self, block: int) -> None:
        found = self._receive()
        if found != block:
            raise PerfsuiteError(f"the process in the other environment is at block {found}, not at {block}")

    def _send(self, number: int) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(b"%d\n" % number)
        except OSError:
            raise PerfsuiteError(ENDED) from None

    def _receive(self) -> int:
        assert self._socket is not None
        if waits := b"\n" not in self._received:
            self._waits(True)
        while b"\n" not in self._received:
            try:
                got = self._socket.recv(64)
            except TimeoutError:
                self._check()
                continue
            except OSError:
                got = b""
            if not got:
                raise PerfsuiteError(ENDED)
            self._received += got
        if waits:
            self._waits(False)
        line, _, self._received = self._received.partition(b"\n")
        return int(line)


def abandon(place: str) -> None:
    """Report that one of the processes will not connect, so that the other does not wait for it."""
    Path(f"{place}{GONE}").touch()
