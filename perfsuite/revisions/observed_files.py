"""Record the files that a process opens, the libraries that it loads, and the modules that it imports by name.

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
from types import FrameType, ModuleType
from typing import Any

from perfsuite.errors import PACKAGE
from perfsuite.revisions.second_import import INSTALLED, is_first_party

SOURCE_FOLDERS = ("", "src", "python", "lib")
"""Folders in which repositories keep their packages, relative to the top folder."""
NOT_DATA = (".pyc", ".pth")
LIBRARY = os.path.dirname(os.__file__) + os.sep
"""Folder of the standard library."""
READERS = ("<frozen importlib._bootstrap_external>", f"{LIBRARY}importlib{os.sep}", f"{LIBRARY}linecache.py")
"""Code that reads a source to import it or to show its lines, not as data."""
HARNESS_FOLDER = f"{PACKAGE}{os.sep}"
REWRITING = os.path.join("_pytest", "assertion", "rewrite.py")
"""File of pytest that reads the sources of tests to import them."""
LOADER = os.path.join("torch", "_ops.py")
"""File of `torch.ops.load_library`, which loads a library for its caller."""
MAPPED = Path("/proc/self/maps")
"""Linux's list of the files in this process's memory."""
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
    if event not in ("open", "ctypes.dlopen") or not _noting or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    name = os.fsdecode(arguments[0])
    if event == "ctypes.dlopen":
        if os.sep in name and (opener := _opener(sys._getframe(1))):
            _add("libraries", (opener, os.path.abspath(name)))
    elif str(arguments[1] or "r").startswith(("w", "a", "x")) or arguments[2] & os.O_ACCMODE == os.O_WRONLY:
        return
    elif not name.endswith(".py"):
        _add("paths", os.path.abspath(name))
    elif opener := _opener(sys._getframe(1)):
        _add("sources", (opener, os.path.abspath(name)))


def _add(field: str, value: object) -> None:
    for observed in _noting:
        getattr(observed, field).add(value)


def _opener(frame: FrameType | None) -> str:
    """Return the file of the innermost code outside the standard library that called; empty if Python itself reads the
    file to import it or to show its lines."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(READERS) or file.endswith(REWRITING):
            return ""
        is_library = file.startswith(LIBRARY) and INSTALLED.isdisjoint(Path(file).parts)
        if not is_library and not file.startswith("<frozen ") and not file.endswith(LOADER):
            return file
        frame = frame.f_back
    return ""


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
    """Record of files that are opened for reading, of libraries that are loaded and of calls of
    `importlib.import_module`, since it was created.

    `ignored` are files that no workload uses as data, such as pytest's own configuration.
    """

    def __init__(self, top: Path, ignored: Collection[Path] = ()) -> None:
        self.top, self.ignored = top, frozenset(ignored)
        self.paths: set[str] = set()
        self.sources: set[tuple[str, str]] = set()
        """(File of the code that opened it, Python source), for sources that are read but not imported."""
        self.libraries: set[tuple[str, str]] = set()
        """(File of the code that loaded it, shared library) for each library that is loaded by its path."""
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
        """Return the data files and shared libraries in the repository, including files that were not found, since they
        may be added later, and the libraries elsewhere that the repository's code loaded by their paths."""
        read = self.paths | self._read_sources() | {path for _, path in self.libraries} | _mapped()
        found = [p for p in map(Path, sorted(read)) if self._is_data(p)]
        for path in found:
            found += [p for p in _included(path) if p not in found and self._is_data(p)]
        return sorted({*found, *self._libraries_elsewhere(), *self._absent_modules()})

    def _read_sources(self) -> set[str]:
        """Return the Python sources that the repository's code read, and those that other code read and that are no
        imported modules."""
        modules = {f for m in list(sys.modules.values()) if isinstance(f := getattr(m, "__file__", None), str)}
        return {
            path
            for opener, path in self.sources
            if self._is_own(opener) or (path not in modules and not opener.startswith(HARNESS_FOLDER))
        }

    def _libraries_elsewhere(self) -> Iterator[Path]:
        for opener, path in self.libraries:
            if self._is_own(opener) and self.top not in Path(path).parents and INSTALLED.isdisjoint(Path(path).parts):
                yield Path(path)

    def _is_own(self, opener: str) -> bool:
        return is_first_party(Path(opener), self.top) and not opener.startswith(HARNESS_FOLDER)

    def _absent_modules(self) -> Iterator[Path]:
        for name in self.absent:
            for folder in SOURCE_FOLDERS:
                yield self.top / folder / f"{name.replace('.', '/')}.py"
                yield self.top / folder / name.replace(".", "/") / "__init__.py"

    def _is_data(self, path: Path) -> bool:
        if path.name.endswith(NOT_DATA) or path in self.ignored or path.is_dir():
            return False
        return is_first_party(path, self.top)


def _mapped() -> set[str]:
    """Return the shared libraries in this process's memory; none where the system does not list them."""
    try:
        lines = MAPPED.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    fields = [line.split(maxsplit=5) for line in lines]
    return {f[5] for f in fields if len(f) == 6 and "x" in f[1] and f[5].startswith("/")}


def _included(path: Path) -> Iterator[Path]:
    """Yield the headers that a C++ or CUDA source includes by a path relative to it."""
    if path.suffix not in INCLUDING:
        return
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    yield from (Path(os.path.normpath(path.parent / name)) for name in INCLUDE.findall(text))
