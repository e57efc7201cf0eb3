"""Several measuring processes on one GPU: they start and prepare beside each other, and each times alone.

The operating system locks two files for each GPU. The first is shared by those that prepare, and is for one alone while
it times. With the second none begins to prepare while another waits to time: all that are ready time one after the
other, then all prepare beside each other.
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
        # Open as long as the process lives.
        self._file: IO[str] | None = Path(lock).open("a") if lock else None  # noqa: SIM115
        self._turn: IO[str] | None = Path(f"{lock}.turn").open("a") if lock else None  # noqa: SIM115

    @property
    def shared(self) -> bool:
        """Whether other processes of this run use the GPU too."""
        return self._file is not None

    def prepare(self) -> None:
        """Wait until no other process times or waits to time."""
        if self._file is not None and self._turn is not None:
            self.leave()
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            fcntl.flock(self._file, fcntl.LOCK_SH)
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def alone(self) -> None:
        """Wait until no other process prepares or times; from then on they wait for this one."""
        if self._file is not None and self._turn is not None:
            fcntl.flock(self._turn, fcntl.LOCK_SH)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def leave(self) -> None:
        """Neither prepare nor time any more."""
        if self._file is not None and self._turn is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            fcntl.flock(self._turn, fcntl.LOCK_UN)
