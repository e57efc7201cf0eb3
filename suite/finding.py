"""Lookup of the checkpoint that is given to a command as a file or as the folder of a run."""

from __future__ import annotations

import os
from pathlib import Path

from perfsuite.errors import PerfsuiteError
from suite.naming import shown
from suite.runtime import Store, checkpoints
from suite.runtime.checkpoints import Checkpoint


def checkpoint_of(name: str, trainer: str) -> tuple[Path, Checkpoint]:
    """Return (path, content) of a checkpoint file, or of the latest one in a folder; PerfsuiteError if none exists."""
    path = Path(name)
    if os.path.isdir(path) and Store(path).files():  # Path.is_dir raises for a name that is too long
        return checkpoints.load_latest(Store(path), trainer)
    if os.path.isdir(path) or not os.path.lexists(path):
        raise PerfsuiteError(
            f"no checkpoint {shown(path)}; name a file, or a folder, that `perfsuite train {trainer}` wrote"
        )
    return path, checkpoints.load(path, trainer)
