"""Resumable building of a data set by one process at a time. Its parts are stored next to it until it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy
from filelock import FileLock, Timeout

from perfsuite.errors import PerfsuiteError

Array = numpy.ndarray[Any, Any]


class StoppedError(PerfsuiteError):
    """Building has stopped. The same command continues from the stored parts."""


class Watcher(Protocol):
    """Receiver of progress messages."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def say(self, line: str) -> None: ...


class Parts:
    """Arrays in a folder, each complete or absent. Other files in the folder are never touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, name: str) -> Array | None:
        """Return a memory-mapped array; None if it is missing or damaged."""
        try:
            loaded: Array = numpy.load(self.folder / f"{name}.npy", mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        return loaded

    def save(self, name: str, array: Array) -> None:
        """Write an array atomically."""
        temporary = self.folder / f"{name}.{os.getpid()}.tmp"  # workers of a killed run may still write
        with temporary.open("wb") as file:
            numpy.save(file, array)
        os.replace(temporary, self.folder / f"{name}.npy")

    def clear(self) -> None:
        """Remove all parts, and the folder if it is then empty."""
        for path in self.folder.glob("part-*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


@contextlib.contextmanager
def parts_beside(out: Path) -> Iterator[Parts]:
    """Yield the parts folder next to `out`; PerfsuiteError if another process is building the same data set."""
    folder = out.with_name(f"{out.name}.parts")
    try:
        with FileLock(f"{folder}.lock", timeout=0) as lock:
            folder.mkdir(exist_ok=True)
            parts = Parts(folder)
            try:
                yield parts
            except StoppedError:
                raise
            except PerfsuiteError:  # a retry needs other options or recordings, so the parts are useless
                parts.clear()
                raise
            finally:
                if not folder.exists():
                    Path(lock.lock_file).unlink(missing_ok=True)
    except Timeout:
        raise PerfsuiteError(f"another process is making {out}; wait for it, or name another file") from None


def digest_of(settings: object) -> str:
    """Return the SHA-256 digest of settings, which must be representable in JSON."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
