"""The folders in which a run leaves reports, logs, locks and trees: each ignores itself in git."""

from __future__ import annotations

from pathlib import Path

SCRATCH = ".perfsuite"
"""The folder's name: one in the project, one beside the baselines."""


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
