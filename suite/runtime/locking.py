"""A run's folder, which one process at a time writes into."""

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
    """Make the folder, and keep other runs out of it while the block runs; readers need no permission.

    CheckpointError at once where another run is in it, or nothing can be written into it. The kernel releases the lock
    when the process ends, however that comes about. A thread that holds it may enter again. At the end the lock's file
    is removed, and so are the folders that were made here if nothing was written into them.
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
        if os.path.islink(lock.lock_file):  # an older filelock would empty what it leads to
            raise OSError(errno.ELOOP, f"{LOCK} in it is a link")
        lock.acquire()
    except Timeout:
        raise CheckpointError(
            f"another run is writing into {shown(folder)}; wait until it has ended, or name another --folder"
        ) from None
    except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
        _remove(made)
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"cannot write into {shown(folder)}: {reason}; name another --folder") from None
    _mine[key] = threading.get_ident()
    try:
        yield
    finally:
        del _mine[key]
        with contextlib.suppress(OSError):
            os.unlink(lock.lock_file)  # while it is held: nobody else's is removed
        lock.release()
        _remove(made)


def _missing(folder: Path) -> list[Path]:
    """The folder and those above it that are not there, the innermost first."""
    found = []
    for path in (folder, *folder.parents):
        if os.path.lexists(path):
            break
        found.append(path)
    return found


def _remove(folders: list[Path]) -> None:
    """Those that are empty."""
    for path in folders:
        with contextlib.suppress(OSError):
            path.rmdir()
