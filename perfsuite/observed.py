"""Record the files that a process opens and the modules that it imports by name.

The digests of what a workload ran (digests.py) are made from this record.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from perfsuite.second_import import is_first_party

SOURCE_FOLDERS = ("", "src", "python", "lib")
"""Folders in which repositories keep their packages, relative to the top folder."""
NOT_DATA = (".py", ".pyc", ".so", ".pth")
INCLUDING = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")
"""Suffixes of sources of extensions, whose headers only a compiler opens."""
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


_noting: list[Observed] = []
"""Records that are not closed yet."""


@functools.cache
def _add_audit_hook() -> None:
    """Add the only audit hook of this process. A hook cannot be removed, and is called at every event, even at
    `id()`."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _noting:
        return
    path, mode = arguments[0], arguments[1]
    if isinstance(path, str) and not str(mode or "r").startswith(("w", "a", "x")):
        for observed in _noting:
            observed.paths.add(os.path.abspath(path))


_import_module = importlib.import_module


def _noted(name: str, package: str | None = None) -> ModuleType:
    """Import a module and note it in every open record. Takes the place of `importlib.import_module` while one is
    open, so that records can be closed in any order."""
    caller = sys._getframe(1).f_code.co_filename
    try:
        module = _import_module(name, package)
    except ModuleNotFoundError as error:
        for observed in _noting:
            if is_first_party(Path(caller), observed.top):
                observed.absent.add(str(error.name))
        raise
    for observed in _noting:
        observed.imports.append((caller, module.__name__))
    return module


class Observed:
    """Record of files that are opened for reading and of calls of `importlib.import_module`, since it was created.

    `ignored` are files that no workload uses as data, such as pytest's own configuration.
    """

    def __init__(self, top: Path, ignored: Collection[Path] = ()) -> None:
        self.top, self.ignored = top, frozenset(ignored)
        self.paths: set[str] = set()
        self.imports: list[tuple[str, str]] = []
        """(File of the caller, module) for each call."""
        self.absent: set[str] = set()
        """Modules that the repository's code imported by name and did not find."""
        self._collected: int | None = None
        self._begun = 0
        _add_audit_hook()
        if not _noting:
            importlib.import_module = _noted
        _noting.append(self)

    def close(self) -> None:
        """Stop recording. A second call does nothing."""
        if self in _noting:
            _noting.remove(self)
            if not _noting:
                importlib.import_module = _import_module

    def begin(self) -> None:
        """Begin another workload, without the imports by name of earlier workloads.

        Imports before the first call of this method, when the test modules were imported, count for every workload.
        """
        self._begun = len(self.imports)
        if self._collected is None:
            self._collected = self._begun

    def imported_by(self, file: Path) -> set[str]:
        """Return the modules that the code of a file has imported by name."""
        own = [*self.imports[: self._collected], *self.imports[self._begun :]]
        return {name for caller, name in own if caller == str(file)}

    def data(self) -> list[Path]:
        """Return the data files in the repository, including files that were not found, since they may be added
        later."""
        found = [p for p in map(Path, sorted(self.paths)) if self._is_data(p)]
        for path in found:
            found += [p for p in _included(path) if p not in found and self._is_data(p)]
        return sorted([*found, *self._absent_modules()])

    def _absent_modules(self) -> Iterator[Path]:
        for name in self.absent:
            for folder in SOURCE_FOLDERS:
                yield self.top / folder / f"{name.replace('.', '/')}.py"
                yield self.top / folder / name.replace(".", "/") / "__init__.py"

    def _is_data(self, path: Path) -> bool:
        if path.name.endswith(NOT_DATA) or path in self.ignored or path.is_dir():
            return False
        return is_first_party(path, self.top)


def _included(path: Path) -> Iterator[Path]:
    """Yield the headers that a C++ or CUDA source includes by a path relative to it."""
    if path.suffix not in INCLUDING:
        return
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    yield from (Path(os.path.normpath(path.parent / name)) for name in INCLUDE.findall(text))
