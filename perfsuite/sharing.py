"""Several measuring processes on one GPU: they start and prepare beside each other, and each times alone.

The operating system locks a file for each GPU: shared by those that prepare, for one alone while it times.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


class Gpu:
    """One process's share of a GPU. Without a lock file it has the GPU for itself, and nothing here does anything.

    A process that ends, however it ends, leaves.
    """

    def __init__(self, lock: str) -> None:
        self._file: IO[str] | None = Path(lock).open("a") if lock else None  # noqa: SIM115 - as long as the process

    @property
    def shared(self) -> bool:
        """Whether other processes of this run use the GPU too."""
        return self._file is not None

    def prepare(self) -> None:
        """Wait until no other process times."""
        self._lock(fcntl.LOCK_SH)

    def alone(self) -> None:
        """Wait until no other process prepares or times; from then on they wait for this one."""
        self._lock(fcntl.LOCK_EX)

    def leave(self) -> None:
        """Neither prepare nor time any more."""
        self._lock(fcntl.LOCK_UN)

    def _lock(self, kind: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, kind)
