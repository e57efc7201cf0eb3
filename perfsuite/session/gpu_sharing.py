"""Share one GPU among several measuring processes: they start and prepare at the same time, and each times alone.

Each GPU has three lock files. The first is locked in shared mode by processes that prepare, and exclusively by one that
times. The second keeps a process from starting to prepare while another waits to time. So all processes that are ready
time one after another, and then all prepare at the same time. The run locks the third exclusively while it proves on
the GPU. Processes may prepare meanwhile, but not time.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from perfsuite.errors import PerfsuiteError
from perfsuite.system.folders import own_folder


@contextmanager
def proving(locks: Iterable[str]) -> Iterator[None]:
    """Keep processes from timing on the GPUs of these lock files during the block. Raises PerfsuiteError if a file
    cannot be locked.

    All GPUs are locked until the last proof has ended, because proofs use the host's cores, whichever GPU they run on.
    """
    with ExitStack() as held:
        for lock in {lock for lock in locks if lock}:
            try:
                own_folder(Path(lock).parent)
                fcntl.flock(held.enter_context(_proofs(lock).open("a")), fcntl.LOCK_EX)
            except OSError as error:
                reason = error.strerror or error
                raise PerfsuiteError(f"{lock} cannot be locked ({reason}); make its folder writable") from None
        yield


def _proofs(lock: str) -> Path:
    return Path(f"{lock}.proofs")


class Gpu:
    """One process's share of a GPU. Without a lock file, it has the GPU for itself, and the methods do nothing.

    A process that ends, for whatever reason, releases its share.
    """

    def __init__(self, lock: str) -> None:
        self._files: tuple[IO[str], IO[str]] | None = None
        self._proofs = _proofs(lock)
        if lock:
            use, turn = Path(lock), Path(f"{lock}.turn")
            self._files = use.open("a"), turn.open("a")  # as long as the process lives

    @property
    def shared(self) -> bool:
        """True if other processes of this run use the GPU too."""
        return self._files is not None

    def prepare(self) -> None:
        """Wait until no other process times or waits to time."""
        if self._files:
            use, turn = self._files
            self.leave()
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(use, fcntl.LOCK_SH)
            fcntl.flock(turn, fcntl.LOCK_UN)

    def alone(self) -> None:
        """Wait until no other process proves, prepares or times. Afterwards the others wait for this process."""
        if self._files:
            with self._proofs.open("a") as proofs:  # others may begin to prepare until the last proof has ended
                fcntl.flock(proofs, fcntl.LOCK_SH)
            use, turn = self._files
            fcntl.flock(turn, fcntl.LOCK_SH)
            fcntl.flock(use, fcntl.LOCK_EX)

    def leave(self) -> None:
        """Release the locks for preparing and timing."""
        for file in self._files or ():
            fcntl.flock(file, fcntl.LOCK_UN)
