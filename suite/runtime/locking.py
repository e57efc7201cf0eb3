"""Lock of a run's folder, into which one process at a time writes."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from perfsuite.report.files import probe
from suite.naming import shown
from suite.runtime.errors import CheckpointError

LOCK = ".lock"

_mine: dict[str, int] = {}
"""Folder → the thread that holds its lock."""


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Create the folder, and lock it against other runs while the block runs; readers need no lock.

    CheckpointError at once if another run holds the lock, or nothing can be written into the folder. The kernel
    releases the lock when the process ends, in whatever way. A thread that holds it may enter again. At the end the
    lock's file is removed, and so are the folders that were created here if they are empty.
    """
    key = os.path.realpath(folder)
    if _mine.get(key) == threading.get_ident():
        yield
        return
    lock = FileLock(os.path.join(key, LOCK), timeout=0)
    made: list[Path] = []
    try:
        made += _missing(folder)
        probe(folder)
        if os.path.islink(lock.lock_file):  # an older filelock would truncate its target
            raise OSError(errno.ELOOP, f"{LOCK} in it is a link")
        lock.acquire()
    except Timeout:
        raise CheckpointError(
            f"another run is writing into {shown(folder)}; wait until it has ended, or name another --folder"
        ) from None
    except (OSError, NotImplementedError) as error:  # the latter on a file system without locks
        _remove(made)
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"cannot write into {shown(folder)}: {reason}; name another --folder") from None
    _mine[key] = threading.get_ident()
    try:
        yield
    finally:
        del _mine[key]
        with contextlib.suppress(OSError):
            os.unlink(lock.lock_file)  # while the lock is held, so that no other run's file is removed
        lock.release()
        _remove(made)


def _missing(folder: Path) -> list[Path]:
    """Return those of the folder and its parents that do not exist, the innermost first."""
    found = []
    for path in (folder, *folder.parents):
        if os.path.lexists(path):
            break
        found.append(path)
    return found


def _remove(folders: list[Path]) -> None:
    """Remove those of the folders that are empty."""
    for path in folders:
        with contextlib.suppress(OSError):
            path.rmdir()
