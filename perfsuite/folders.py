"""The folders in which a run leaves reports, logs, locks and trees, which git ignores, and those of its sockets."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from perfsuite.errors import MachineError

SCRATCH = ".perfsuite"
"""The folder's name: one in the project, one beside the baselines."""
LONGEST_PARENT = 64
"""Bytes of a path in which a folder for sockets is made. A socket's own path has room for 107."""


def own_folder(folder: Path) -> Path:
    """Make a folder. If it lies in a `.perfsuite` folder, have git ignore that. Raises OSError where it cannot be
    made."""
    folder.mkdir(parents=True, exist_ok=True)
    for top in (folder, *folder.parents):
        if top.name == SCRATCH:
            ignore = top / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
            break
    return folder


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder whose path is short enough for sockets in it: where temporary files go, else in /tmp.

    Raises MachineError where neither serves.
    """
    usual = tempfile.gettempdir()
    for parent in (usual, "/tmp"):
        if len(os.fsencode(parent)) <= LONGEST_PARENT and os.access(parent, os.W_OK | os.X_OK):
            return tempfile.TemporaryDirectory(prefix="perfsuite-", dir=parent)
    raise MachineError(
        f"no folder for sockets: {usual} has more than {LONGEST_PARENT} characters, and /tmp cannot be written; "
        "set TMPDIR to a shorter path"
    )
