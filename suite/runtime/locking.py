"""Lock on a run's folder: one process at a time may write into it."""

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
"""Folder → thread that holds its lock."""


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Create the folder, and lock it against other runs for the duration of the block. Readers need no lock.

    CheckpointError is raised immediately if another run holds the lock, or if the folder is not writable. The kernel
    releases the lock when the process ends for any reason. A thread that holds the lock may enter again. On exit, the
    lock file is removed, and so are folders that were created here and are empty.
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
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        _remove(made)
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"cannot write into {shown(folder)}: {reason}; name another --folder") from None
    _mine[key] = threading.get_ident()
    try:
        yield
    finally:
        del _mine[key]
        with contextlib.suppress(OSError):
            os.unlink(lock.lock_file)  # before the release, so that no other run's lock file is removed
        lock.release()
        _remove(made)


def _missing(folder: Path) -> list[Path]:
    """Return the folder and its parents that do not exist, innermost first."""
    found = []
    for path in (folder, *folder.parents):
        if os.path.lexists(path):
            break
        found.append(path)
    return found


def _remove(folders: list[Path]) -> None:
    """Remove the empty folders among `folders`."""
    for path in folders:
        with contextlib.suppress(OSError):
            path.rmdir()
