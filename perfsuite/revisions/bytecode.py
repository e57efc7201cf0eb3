"""Keep bytecode files in a folder of perfsuite's own when Python may not write them next to the sources.

Container images set PYTHONDONTWRITEBYTECODE, some without bytecode for their installed packages. Every process then
compiles the project again, or torch as well, which takes seconds, and a gate starts dozens of processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from perfsuite.revisions.second_import import ENVIRONMENTS, INSTALLED
from perfsuite.system.folders import SCRATCH, own_folder

if TYPE_CHECKING:
    import pytest

FOLDER, HASHES = "bytecode", "sources.json"
FORBIDDEN, PLACE = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


def keep_during(config: pytest.Config) -> None:
    """Call `keep`, and undo its effect when pytest ends."""
    undo = keep(config.rootpath)
    if undo is not None:
        config.add_cleanup(undo)


def keep(root: Path) -> Callable[[], None] | None:
    """Make this process, and those that it starts from now on, keep bytecode in perfsuite's own folder of the project.

    Returns a function that undoes this. Returns None, with nothing changed, if Python may write bytecode itself or the
    folder cannot be made.
    """
    if not sys.dont_write_bytecode or sys.pycache_prefix or PLACE in os.environ:
        return None
    try:
        folder = str(own_folder(root / SCRATCH / FOLDER).resolve())
        _forget_sources(Path(folder))
    except OSError:
        return None
    forbidden = os.environ.pop(FORBIDDEN, None)
    os.environ[PLACE] = folder
    sys.dont_write_bytecode, sys.pycache_prefix = False, folder

    def undo() -> None:
        sys.dont_write_bytecode, sys.pycache_prefix = True, None
        os.environ.pop(PLACE, None)
        if forbidden is not None:
            os.environ[FORBIDDEN] = forbidden

    return undo


def forget(folder: Path) -> None:
    """Remove the bytecode of a folder's sources from the cache folder, if PYTHONPYCACHEPREFIX is in use."""
    for path in {folder.absolute(), folder.resolve()} if sys.pycache_prefix else ():
        shutil.rmtree(Path(str(sys.pycache_prefix), *path.parts[1:]), ignore_errors=True)


def _forget_sources(copies: Path) -> None:
    """Remove the bytecode files whose source may have changed since they were written.

    Python matches bytecode to its source by the source's size and modification time in seconds. A tool that sets times
    may leave both unchanged. So bytecode is kept only if its source has the same contents as at the start of the last
    run, which wrote the bytecode or kept it. The bytecode of Python's own modules and of installed packages, which only
    an installer changes, is always kept.
    """
    environments = [copies.joinpath(*path.parts[1:]) for path in ENVIRONMENTS]
    before, now = _hashes(copies / HASHES), dict[str, str]()
    for folder, _, files in os.walk(copies):
        path = Path(folder)
        if path == copies or not INSTALLED.isdisjoint(path.parts):
            continue
        if any(e == path or e in path.parents for e in environments):
            continue
        for name in files:
            source = Path("/", *path.relative_to(copies).parts, f"{_stem(name)}.py")
            found = now[str(source)] = now.get(str(source)) or _hash(source)
            if not found or found != before.get(str(source)):
                (path / name).unlink(missing_ok=True)
    (copies / HASHES).write_text(json.dumps(now))


def _stem(name: str) -> str:
    """Return the source's name without ".py" for a bytecode file such as "test_a.b.cpython-311-pytest-9.2.0.pyc"."""
    return re.sub(r"\.(cpython|pypy)[^.]*-?.*\.pyc(\.\d+)?$", "", name)


def _hash(source: Path) -> str:
    try:
        return hashlib.sha256(source.read_bytes()).hexdigest()
    except OSError:
        return ""


def _hashes(path: Path) -> dict[str, str]:
    """Return the hash of each source at the start of the last run; empty if they are not known."""
    try:
        return {str(k): str(v) for k, v in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
