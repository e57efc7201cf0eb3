"""Make the folders for reports, logs, locks and work trees, which git ignores, and the folders for sockets."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from perfsuite.errors import MachineError

SCRATCH = ".perfsuite"
"""Name of the folder. There is one in the project, and one next to the baselines."""
LONGEST_PARENT = 64
"""Most bytes of a path in which a folder for sockets is made. The path of a socket can have 107 bytes."""


def own_folder(folder: Path) -> Path:
    """Make a folder. If it is in a `.perfsuite` folder, make git ignore that. Raises OSError if it cannot be made."""
    folder.mkdir(parents=True, exist_ok=True)
    for top in (folder, *folder.parents):
        if top.name == SCRATCH:
            ignore = top / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
            break
    return folder


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder with a path short enough for sockets: in the usual place for temporary files, else /tmp.

    Raises MachineError if neither is possible.
    """
    usual = tempfile.gettempdir()
    for parent in (usual, "/tmp"):
        if len(os.fsencode(parent)) <= LONGEST_PARENT and os.access(parent, os.W_OK | os.X_OK):
            return tempfile.TemporaryDirectory(prefix="perfsuite-", dir=parent)
    raise MachineError(
        f"no folder for sockets: {usual} has more than {LONGEST_PARENT} characters, and /tmp cannot be written; "
        "set TMPDIR to a shorter path"
    )
