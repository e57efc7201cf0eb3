"""Several measuring processes on one GPU: they start and prepare beside each other, and each times alone.

The operating system locks files for each GPU. The first is shared by processes that prepare, and exclusive to one that
times. The second keeps a process from starting to prepare while another waits to time: all processes that are ready
time one after the other, and then all prepare at the same time. The third is exclusive to the run while it proves on
the GPU: processes prepare meanwhile, but none times.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from perfsuite.errors import PerfsuiteError
from perfsuite.folders import own_folder


@contextmanager
def proving(locks: Iterable[str]) -> Iterator[None]:
    """Keep processes from timing on the GPUs of these lock files during the block. Raises PerfsuiteError if a file
    cannot be used.

    This holds on all of them until the last proof: proofs keep the host's cores busy, whatever GPU they run on.
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
    """One process's share of a GPU. Without a lock file it has the GPU for itself, and nothing here does anything.

    A process that ends, however it ends, gives up its share.
    """

    def __init__(self, lock: str) -> None:
        self._files: tuple[IO[str], IO[str]] | None = None
        self._proofs = _proofs(lock)
        if lock:
            use, turn = Path(lock), Path(f"{lock}.turn")
            self._files = use.open("a"), turn.open("a")  # as long as the process lives

    @property
    def shared(self) -> bool:
        """Whether other processes of this run use the GPU too."""
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
        """Wait until no other process proves, prepares or times; from then on they wait for this one."""
        if self._files:
            with self._proofs.open("a") as proofs:  # others may begin to prepare until the last proof has ended
                fcntl.flock(proofs, fcntl.LOCK_SH)
            use, turn = self._files
            fcntl.flock(turn, fcntl.LOCK_SH)
            fcntl.flock(use, fcntl.LOCK_EX)

    def leave(self) -> None:
        """Stop preparing and timing."""
        for file in self._files or ():
            fcntl.flock(file, fcntl.LOCK_UN)
