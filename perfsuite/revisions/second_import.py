"""Import another revision's tree in addition to the current one, under separate names.

A tree at `<folder>/work-tree` comes with a package at `<folder>/<package>`, which `write_package` makes. With
`folder` on sys.path, `import <package>.optimized.kernels` imports the tree's `optimized/kernels.py`. When a module of
the tree is compiled, every import of one of the tree's own top-level names, wherever it is, is rewritten to that
package, and so is `importlib.import_module`. The trees share no module names, so code that looks up a module by its
name (torch.compile, pickle, a registry, a process that a data loader starts) does not find the current one.

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
"""Name of a tree's folder, next to its package. It cannot be imported as a module."""
PREFIX = "perfsuite_revision_"
INSTALLED = frozenset({"site-packages", "dist-packages"})
ENVIRONMENTS = frozenset(Path(p).resolve() for p in (sys.prefix, sys.base_prefix))
"""Folders of Python environments, which may be inside the repository."""
MOVED = {
    "perfsuite.ceilings": "perfsuite.timing.roofline",
    "perfsuite.counting": "perfsuite.timing.profiler_counts",
    "perfsuite.equivalence": "perfsuite.correctness.equivalence",
    "perfsuite.host": "perfsuite.system.host",
    "perfsuite.machine": "perfsuite.system.machine",
    "perfsuite.orphans": "perfsuite.system.orphans",
    "perfsuite.process_state": "perfsuite.state.process_state",
}
"""Former name of a module of the harness → its name now, for those that trainers and pairs of this repository import.
Their accepted revisions are older than the names."""
_SHIM, _IMPORT, _MISSING = "__importlib__", "__import_module__", "__missing__"


def write_package(folder: Path, top: Path) -> str:
    """Write the package of the tree in `folder` and return its name. `top` is the current work tree's top folder."""
    name = PREFIX + folder.name.replace("-", "_")
    package = folder / name
    package.mkdir()
    text = (
        '"""Another revision of this repository; written by perfsuite."""\n\n'
        "from perfsuite.revisions.second_import import install\n\n"
        f"install(__name__, {str(folder / TREE)!r}, {str(top)!r})\n"
    )
    (package / "__init__.py").write_text(text)
    return name


def install(package: str, tree: str, top: str) -> None:
    """Make imports of the package's submodules import the tree's modules. The package calls this when it is
    imported."""
    finder = _Finder(package, Path(tree), Path(top))
    module = sys.modules[package]
    module.__path__ = finder.paths
    setattr(module, _IMPORT, finder.import_module)
    setattr(module, _SHIM, _Importlib(finder))
    setattr(module, _MISSING, finder.missing)
    sys.meta_path.insert(0, finder)


def missing(package: str) -> list[str]:
    """Return the modules that the tree's code has tried to import and that only the current tree has."""
    found: list[str] = getattr(sys.modules[package], _MISSING)
    return found


def is_first_party(file: Path, top: Path) -> bool:
    """Return whether a file is the repository's own: below `top`, and not in an environment or a hidden folder."""
    if top not in file.parents:
        return False
    if any(top in e.parents and e in file.parents for e in ENVIRONMENTS):
        return False
    inside = file.relative_to(top).parts
    return INSTALLED.isdisjoint(inside) and not any(part.startswith(".") for part in inside)


class _Finder(MetaPathFinder):
    """Import finder of one package's submodules in the tree. It also decides which top-level names are the tree's
    own."""

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
        """Return whether this top-level name belongs to one of the tree's own modules."""
        if name not in self._owned:
            self._owned[name] = name != HARNESS and not name.startswith(PREFIX) and self._is_own(name)
        return self._owned[name]

    def _is_own(self, name: str) -> bool:
        spec = _current_spec(name)
        if spec is None:
            return PathFinder.find_spec(name, self.paths) is not None
        current = _location(spec)
        if current is None or not is_first_party(current, self.top):
            return False  # built in, or installed elsewhere, so that both trees import the same module
        if (mapped := self._mapped(str(current.parent))) and mapped not in self.paths:
            self.paths.append(mapped)  # the folder of an editable install need not be on sys.path
        return True  # even if the tree lacks it, since it must not be imported from the current tree

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
    """Return the spec of the module that the current tree imports under this top-level name; None if there is none."""
    module = sys.modules.get(name)
    try:
        return module.__spec__ if module is not None else importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _is_current(name: str) -> bool:
    """Return whether the current tree has this module, as far as can be found without importing it."""
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
    """Loader that compiles a module of the tree with rewritten imports."""

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
        """Do nothing, because the tree is removed after the run."""


class _Rewritten(ast.NodeTransformer):
    """AST transformer that prefixes imports of the tree's own modules with the package."""

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
        if node.module == HARNESS:
            return [self._of_harness(alias, node) for alias in node.names]
        if node.module != "importlib":
            node.module = MOVED.get(node.module, node.module)
            return [node]
        by_name = [ast.alias(_IMPORT, a.asname or a.name) for a in node.names if a.name == "import_module"]
        others = [a for a in node.names if a.name != "import_module"]
        parts = [(self.finder.package, by_name), (node.module, others)]
        return [ast.copy_location(ast.ImportFrom(m, names, 0), node) for m, names in parts if names]

    def _of_harness(self, alias: ast.alias, node: ast.ImportFrom) -> ast.stmt:
        """Return the import of one name from the harness, of a moved module from its place now."""
        moved = MOVED.get(f"{HARNESS}.{alias.name}")
        if moved is None:
            return ast.copy_location(ast.ImportFrom(HARNESS, [alias], 0), node)
        package, _, name = moved.rpartition(".")
        return ast.copy_location(ast.ImportFrom(package, [ast.alias(name, alias.asname or alias.name)], 0), node)
