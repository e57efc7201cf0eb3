"""Keep some source files from running in a process: an import of their modules returns stubs.

A module of pairs imports both sides. To time a reference in a process where no code of the optimized side has ever run,
the modules that only the optimized side needs are replaced before anything imports them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ABSENT = "PERFSUITE_ABSENT"
"""Environment variable of such a process: the paths of the files, separated by `os.pathsep`."""


class Stub:
    """Stub of any object of a module. It can be called, subclassed and iterated over, and does nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Stub:
        return self

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self._name}.{name}")

    def __getitem__(self, key: Any) -> Stub:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def __repr__(self) -> str:
        return f"<stub of {self._name}>"


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Finder(MetaPathFinder):
    """Import finder that precedes all others and returns stubs for the modules of these files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = {file.resolve() for file in files}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None:
                return self._instead(spec)
        return None

    def _instead(self, spec: ModuleSpec) -> ModuleSpec:
        if spec.origin is None or Path(spec.origin).resolve() not in self.files:
            return spec
        folders = spec.submodule_search_locations
        made = ModuleSpec(spec.name, _Loader(), origin=spec.origin, is_package=folders is not None)
        if folders is not None:
            made.submodule_search_locations = list(folders)
        return made


def install() -> None:
    """Install the finder if the environment variable names files. None of their code runs afterwards."""
    given = os.environ.pop(ABSENT, "")
    if given:
        sys.meta_path.insert(0, Finder([Path(file) for file in given.split(os.pathsep)]))
