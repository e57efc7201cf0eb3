"""Find the imported code that is neither the repository's nor of an installed version: editable installs of other
folders, and folders that were put on sys.path."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from perfsuite.errors import PACKAGE
from perfsuite.revisions import digests
from perfsuite.revisions.second_import import INSTALLED, PREFIX, is_first_party

LIBRARIES = frozenset(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
"""Folders of the standard library."""


def imported(top: Path) -> list[Path]:
    """Return the packages and modules outside the repository that this process has imported from an editable install or
    a folder on sys.path, other than perfsuite and the standard library."""
    folders, editable = {Path(os.path.abspath(path)) for path in sys.path}, editable_folders(tuple(digests.PATHS))
    found = set()
    for name, module in list(sys.modules.items()):
        if "." not in name and not name.startswith(("__main__", PREFIX)) and isinstance(module, ModuleType):
            for place in _places(module):
                if place.parent in folders or not editable.isdisjoint(place.parents):
                    found.add(place)
    return sorted(place for place in found if _is_outside(place, top) and _is_outside(place.resolve(), top))


@functools.cache
def editable_folders(paths: tuple[str, ...]) -> frozenset[Path]:
    """Return the folders of the editable installs on these paths."""
    found = importlib.metadata.distributions(path=list(paths))
    texts = [d.read_text("direct_url.json") or "{}" for d in found if digests.is_editable(d)]
    return frozenset(Path(unquote(urlsplit(json.loads(text).get("url", "")).path)) for text in texts) - {Path()}


def _places(module: ModuleType) -> Iterator[Path]:
    """Yield the folders of a package, or the file of a module."""
    package, file = module.__dict__.get("__path__"), module.__dict__.get("__file__")
    names = package if package is not None else (file,)
    yield from (Path(name) for name in names if isinstance(name, str) and os.path.isabs(name))


def _is_outside(place: Path, top: Path) -> bool:
    if place == PACKAGE.resolve() or is_first_party(place, top):
        return False
    return INSTALLED.isdisjoint(place.parts) and LIBRARIES.isdisjoint(place.parents)
