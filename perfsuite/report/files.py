"""Atomic file writes: a reader never sees half a report, and a killed run never leaves one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from perfsuite.errors import PerfsuiteError
from perfsuite.system.folders import own_folder


def probe(folder: Path) -> None:
    """Create the folder and its parents, and a temporary file in it. Raises OSError if that fails."""
    own_folder(folder)
    with tempfile.TemporaryFile(dir=folder):
        pass


def check(folder: Path, *, name: str | None = None, remedy: str = "make it writable, or name another folder") -> None:
    """Create the folder. Raises PerfsuiteError in one line if no file can be written into it.

    name  the folder in the message, by default its path
    """
    try:
        probe(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PerfsuiteError(f"cannot write into {name or folder}: {reason}; {remedy}") from None


def write(path: Path, text: str) -> Path:
    """Write `text` to `path` atomically, with its parent folders. Raises PerfsuiteError in one line if that fails."""
    temporary = None
    try:
        own_folder(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide it from other users, such as a CI runner
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        reason = error.strerror or str(error)
        raise PerfsuiteError(
            f"cannot write {path}: {reason}; free space there, make its folder writable, or name another"
        ) from None
    return path
