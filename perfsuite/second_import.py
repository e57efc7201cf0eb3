"""Import another revision's tree beside the current one, under names of its own.

A tree at `<folder>/work-tree` comes with a package at `<folder>/<package>`, which `write_package` makes. With
`folder` on sys.path, `import <package>.optimized.kernels` imports the tree's `optimized/kernels.py`. Inside the tree's
modules every import of one of its own top-level names is rewritten to that package when the source is compiled,
wherever it stands, and so is `importlib.import_module`. No name is shared with the current tree, so nothing that looks
a module up by its name (torch.compile, pickle, a registry, a process that a data loader starts) finds the current one.

The harness itself is never imported twice.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

HARNESS = "perfsuite"
TREE = "work-tree"
"""The folder of a tree, beside its package; no name that could be imported."""
PREFIX = "perfsuite_revision_"
INSTALLED = frozenset({"site-packages", "dist-packages"})
ENVIRONMENTS = frozenset(Path(p).resolve() for p in (sys.prefix, sys.base_prefix))
"""Folders of Python's own modules, which may lie in the repository."""
_SHIM, _IMPORT, _MISSING = "__importlib__", "__import_module__", "__missing__"


def write_package(folder: Path, top: Path) -> str:
    """Write the package of the tree in `folder` and return its name. `top` is the current work tree's top folder."""
    name = PREFIX + folder.name.replace("-", "_")
    package = folder / name
    package.mkdir()
    text = (
        '"""Another revision of this repository; written by perfsuite."""\n\n'
        "from perfsuite.second_import import install\n\n"
        f"install(__name__, {str(folder / TREE)!r}, {str(top)!r})\n"
    )
    (package / "__init__.py").write_text(text)
    return name


def install(package: str, tree: str, top: str) -> None:
    """Make the package's submodules those of the tree from now on. The package calls this when it is imported."""
    finder = _Finder(package, Path(tree), Path(top))
    module = sys.modules[package]
    module.__path__ = finder.paths
    setattr(module, _IMPORT, finder.import_module)
    setattr(module, _SHIM, _Importlib(finder))
    setattr(module, _MISSING, finder.missing)
    sys.meta_path.insert(0, finder)


def missing(package: str) -> list[str]:
    """Return the modules that the tree's code has asked for and the tree lacks, although the current tree has them."""
    found: list[str] = getattr(sys.modules[package], _MISSING)
    return found


def is_first_party(file: Path, top: Path) -> bool:
    """Return whether a file is the repository's own code: below `top`, and in no environment or hidden folder of it."""
    if top not in file.parents:
        return False
    if any(top in e.parents and e in file.parents for e in ENVIRONMENTS):
        return False
    inside = file.relative_to(top).parts
    return INSTALLED.isdisjoint(inside) and not any(part.startswith(".") for part in inside)


class _Finder(MetaPathFinder):
    """Finds the submodules of one package in the tree, and knows which top-level names are the tree's own."""

    def __init__(self, package: str, tree: Path, top: Path) -> None:
        self.package, self.tree, self.top = package, tree, top
        self.paths = list(dict.fromkeys([str(tree), *(p for e in sys.path if (p := self._mapped(e)))]))
        self.missing: list[str] = []
        self._owned: dict[str, bool] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if not fullname.startswith(f"{self.package}."):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, str(spec.origin), self)
        if spec is None and _is_current(fullname.removeprefix(f"{self.package}.")):
            self.missing.append(fullname.removeprefix(f"{self.package}."))
        return spec

    def owns(self, name: str) -> bool:
        """Return whether an import of this top-level name is one of the tree's own modules."""
        if name not in self._owned:
            self._owned[name] = name != HARNESS and not name.startswith(PREFIX) and self._is_own(name)
        return self._owned[name]

    def _is_own(self, name: str) -> bool:
        spec = _current_spec(name)
        if spec is None:
            return PathFinder.find_spec(name, self.paths) is not None
        current = _location(spec)
        if current is None or not is_first_party(current, self.top):
            return False  # built in, or the current tree imports it from elsewhere, too
        if (mapped := self._mapped(str(current.parent))) and mapped not in self.paths:
            self.paths.append(mapped)  # an editable install may put a folder on no path
        return True  # also where the tree lacks it: it must not be found in the current tree

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """Import a module as `importlib.import_module` does, for the tree's modules."""
        if not name.startswith(".") and self.owns(name.partition(".")[0]):
            name = f"{self.package}.{name}"
        return importlib.import_module(name, package)

    def _mapped(self, entry: str) -> str | None:
        absolute = Path(entry or os.getcwd()).resolve()
        if absolute != self.top and self.top not in absolute.parents:
            return None
        inside = self.tree / absolute.relative_to(self.top)
        return str(inside) if inside.exists() else None


def _current_spec(name: str) -> ModuleSpec | None:
    """Return the spec of what the current tree imports under this top-level name; None where there is nothing."""
    module = sys.modules.get(name)
    try:
        return module.__spec__ if module is not None else importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _is_current(name: str) -> bool:
    """Return whether the current tree has this module, as far as can be said without an import."""
    parent, _, last = name.rpartition(".")
    if not parent:
        return _current_spec(name) is not None
    paths = getattr(sys.modules.get(parent), "__path__", None)
    return name in sys.modules or (paths is not None and PathFinder.find_spec(last, list(paths)) is not None)


def _location(spec: ModuleSpec) -> Path | None:
    """Return the file or folder of a module; None for a built-in one."""
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.has_location and spec.origin else None


class _Importlib(ModuleType):
    """Stand-in for `importlib` in the tree's modules."""

    def __init__(self, finder: _Finder) -> None:
        super().__init__("importlib")
        self.import_module = finder.import_module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib, name)


class _Loader(SourceFileLoader):
    """Compiles a module of the tree with its imports rewritten."""

    def __init__(self, fullname: str, path: str, finder: _Finder) -> None:
        super().__init__(fullname, path)
        self.finder = finder

    def source_to_code(  # type: ignore[override]  # the base class has an untyped keyword more
        self, data: bytes, path: str, *, _optimize: int = -1
    ) -> CodeType:
        module = _Rewritten(self.finder).visit(ast.parse(data, path))
        code: CodeType = compile(ast.fix_missing_locations(module), path, "exec", dont_inherit=True, optimize=_optimize)
        return code

    def _cache_bytecode(self, source_path: str, bytecode_path: str, data: bytes) -> None:
        """Do nothing: the tree is gone after the run."""


class _Rewritten(ast.NodeTransformer):
    """Puts the package before the names in imports of the tree's own modules."""

    def __init__(self, finder: _Finder) -> None:
        self.finder = finder

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        return [statement for alias in node.names for statement in self._import(alias, node)]

    def _import(self, alias: ast.alias, node: ast.Import) -> list[ast.stmt]:
        package, top = self.finder.package, alias.name.partition(".")[0]
        whole: ast.stmt = ast.Import([alias])
        if self.finder.owns(top):
            whole = ast.Import([ast.alias(f"{package}.{alias.name}", alias.asname)])
            own = [whole] if alias.asname else [whole, ast.ImportFrom(package, [ast.alias(top)], 0)]
            return [ast.copy_location(statement, node) for statement in own]
        if alias.name == "importlib" or (top == "importlib" and alias.asname is None):
            shim = ast.ImportFrom(package, [ast.alias(_SHIM, alias.asname or "importlib")], 0)
            return [ast.copy_location(statement, node) for statement in (whole, shim)]
        return [ast.copy_location(whole, node)]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        if node.level or node.module is None:
            return [node]
        if self.finder.owns(node.module.partition(".")[0]):
            node.module = f"{self.finder.package}.{node.module}"
            return [node]
        if node.module != "importlib":
            return [node]
        by_name = [ast.alias(_IMPORT, a.asname or a.name) for a in node.names if a.name == "import_module"]
        others = [a for a in node.names if a.name != "import_module"]
        parts = [(self.finder.package, by_name), (node.module, others)]
        return [ast.copy_location(ast.ImportFrom(m, names, 0), node) for m, names in parts if names]
