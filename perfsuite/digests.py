"""Digests of everything that a workload ran: its code, the data that it read, and what it ran on.

Two digests of a source file agree where the files differ in comments, layout and docstrings alone. Nothing here imports
torch; the functions that look at loaded modules are for the process that has run the workload.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from perfsuite.observed import Observed
from perfsuite.records import Ran
from perfsuite.second_import import HARNESS, is_first_party

LENGTH = 16
"""Hexadecimal digits kept of a digest: 64 bits."""
LARGE_BYTES = 1 << 26
"""Bytes above which a data file is identified by its size and modification time."""
OPAQUE = frozenset({"h5py", "sqlite3", "tensorstore", "lmdb", "safetensors"})
"""Modules that read files without Python seeing it."""
VARIABLES = ("CUBLAS", "CUDA_", "CUDNN", "KMP_", "MKL_", "NCCL", "NVIDIA_TF32", "OMP_", "PYTORCH", "TORCH", "TRITON")
"""Prefixes of environment variables that affect the speed of code."""
INCIDENTAL = ("CUDA_VISIBLE_DEVICES", "_CACHE_DIR", "PYTORCH_ALLOC_CONF")
ENVIRONMENT = dict(os.environ)
"""Environment variables as the run found them: torch and the code under test set variables of their own."""
UNSEEN_IMPORTS = frozenset({"__import__", "SourceFileLoader", "run_module", "run_path", "spec_from_file_location"})
"""Ways to import a module that are not observed. Imports by name in a conftest.py are not observed either, because
pytest may import it before the observation begins."""


def searched(paths: Iterable[str]) -> list[str]:
    """Return the entries of `sys.path` where packages are installed. Importing setuptools adds its own copies of other
    packages."""
    return [path for path in paths if Path(path).name != "_vendor"]


PATHS = searched(sys.path)
"""Paths of installed packages, also as the run found them."""

# --- one file -------------------------------------------------------------------------------------------------------


def of_file(path: Path) -> str:
    """Return the digest of a file. For a Python source it covers only what matters to its meaning. Empty where there is
    no such file."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    if path.suffix == ".py":
        try:
            return _short(ast.dump(_without_docstrings(ast.parse(data))).encode())
        except (SyntaxError, ValueError, RecursionError):
            pass
    return _short(data)


def of_data(path: Path) -> str:
    """Return the digest of a data file; for a large one, of its size and modification time. Empty where there is no
    file."""
    try:
        state = path.stat()
    except OSError:
        return ""
    return f"{state.st_size} {state.st_mtime_ns}" if state.st_size > LARGE_BYTES else of_file(path)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    if any(getattr(node, "id", getattr(node, "attr", "")) in ("__doc__", "getdoc") for node in ast.walk(tree)):
        return tree  # the code reads its docstrings, so that they matter
    return cast("ast.Module", _StringsRemoved().visit(tree))


class _StringsRemoved(ast.NodeTransformer):
    """Replaces each statement that is only a string: the docstring of a module, class, function or attribute."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        is_string = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.copy_location(ast.Pass(), node) if is_string else node


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:LENGTH]


# --- the surroundings -----------------------------------------------------------------------------------------------


@functools.cache
def surroundings() -> str:
    """Return the digest of all installed packages and of the environment variables that matter to speed."""
    return _short("\n".join([*packages(), *(f"{name}={value}" for name, value in variables().items())]).encode())


def packages() -> list[str]:
    """Return all installed packages, as `name==version`, in order."""
    return list(_installed(tuple(PATHS)))


@functools.cache
def _installed(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the installed packages of these paths. They are read once, because accept and --changed ask for each
    workload."""
    found = importlib.metadata.distributions(path=list(paths))
    return tuple(sorted({f"{d.metadata['Name']}=={d.version}" for d in found if not _is_local(d)}))


def variables() -> dict[str, str]:
    """Return the environment variables that matter to speed, in order."""
    return {
        name: value
        for name, value in sorted(ENVIRONMENT.items())
        if name.startswith(VARIABLES) and not any(word in name for word in INCIDENTAL)
    }


def _is_local(distribution: Any) -> bool:
    """Return whether a distribution is an editable install of a folder, whose code is digested file by file."""
    try:
        return '"editable": true' in (distribution.read_text("direct_url.json") or "")
    except Exception:
        return False


# --- what a workload ran --------------------------------------------------------------------------------------------


def ran(modules: Iterable[ModuleType], files: Collection[str], compiled: Collection[str], observed: Observed) -> Ran:
    """Return what a workload ran: the files that these modules and files import, and the data that was opened.

    The parent adds the surroundings, as the run found them.
    """
    top, opaque = observed.top, sorted(OPAQUE & {name.partition(".")[0] for name in compiled})
    seeds = [Path(f) for m in modules if (f := getattr(m, "__file__", None))]
    seeds += [Path(f) for f in files if Path(f).is_absolute()]
    sources = _closure([*seeds, *_conftests(seeds, top)], top, observed)
    return Ran(
        sources={name: of_file(p) for p in sorted(sources) for name in _names(p, top)},
        data={_relative(p, top): of_data(p) for p in observed.data() if p not in sources},
        unknown=f"it reads files through {opaque[0]}" if opaque else _unseen_imports(sources, top),
    )


def only(module: ModuleType | None, others: Iterable[ModuleType | None], top: Path) -> list[str]:
    """Return the files that a module imports and these others do not; an empty list if the module or one of the others
    is not known."""
    first, *rest = ((getattr(m, "__file__", None) or "") for m in (module, *others))
    if not first or not all(rest):
        return []
    return [_relative(p, top) for p in sorted(_closure([Path(first)], top) - _closure(map(Path, rest), top))]


def only_optimized(
    sides: Iterable[tuple[ModuleType | None, ModuleType | None]], declaring: Iterable[ModuleType], top: Path
) -> list[Path]:
    """Return the files that optimized sides import and that neither a reference nor perfsuite imports.

    `sides` are the modules of each pair's (optimized, reference) side, `declaring` those that declare the pairs. A pair
    whose sides share a module has no such files.
    """
    both = [(Path(o.__file__), Path(r.__file__)) for o, r in sides if o and r and o.__file__ and r.__file__]
    kept = [Path(m.__file__) for m in declaring if m.__file__]
    needed = _closure((r for _, r in both), top) | {p.resolve() for p in kept}
    found: set[Path] = set()
    for optimized, reference in both:
        if optimized != reference and optimized.resolve() not in needed:
            found |= _closure([optimized], top)
    return sorted(p for p in found - needed if HARNESS not in p.parts)


def _conftests(seeds: Iterable[Path], top: Path) -> Iterator[Path]:
    for seed in seeds:
        for folder in seed.resolve().parents:
            if (folder / "conftest.py").exists():
                yield folder / "conftest.py"
            if folder == top:
                break


def _closure(seeds: Iterable[Path], top: Path, observed: Observed | None = None) -> set[Path]:
    """Return the first-party files that the seeds import, directly or through others, and the packages that these lie
    in.

    With `observed`, the modules that they import by name are included.
    """
    by_file = _modules_by_file()
    found: set[Path] = set()
    waiting = list(seeds)
    while waiting:
        path = waiting.pop()
        if path in found or not _is_own(path, top):
            continue
        found.add(path)
        waiting += [p for folder in path.parents if _is_own(p := folder / "__init__.py", top) and p.exists()]
        module = by_file.get(path)
        package = getattr(module, "__package__", None) or ""
        by_name = observed.imported_by(path) if observed else ()
        for name in (*imported_by(path, package), *by_name):
            file = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(file, str):
                waiting.append(Path(file))
    return found


def loads(sources: Collection[str], top: Path) -> bool:
    """Return whether this process has loaded these files of the work tree, and not installed copies of them.

    conftest.py files are not looked for: their modules share one name, so `sys.modules` has only one of them.
    """
    files = _modules_by_file().keys()
    sought = [top / name for name in sources if Path(name).name != "conftest.py" and top / name not in files]
    # To resolve the paths of some thousand modules takes a fifth of a second.
    return not sought or {path.resolve() for path in sought} <= {path.resolve() for path in files}


def _modules_by_file() -> dict[Path, ModuleType]:
    """Return file → the module loaded from it."""
    return {_path(f): m for m in list(sys.modules.values()) if isinstance(f := getattr(m, "__file__", None), str)}


@functools.cache
def _path(file: str) -> Path:
    """Return the file's path, the same object each time: it keeps its hash."""
    return Path(file)


@functools.cache
def _is_own(path: Path, top: Path) -> bool:
    """Return whether this is a Python source of the repository, also by way of a link, and not perfsuite's own."""
    if path.suffix != ".py":
        return False
    real = path if is_first_party(path, top) else path.resolve()
    return is_first_party(real, top) and not (top / HARNESS in real.parents and _is_harness(top / HARNESS))


@functools.cache
def _is_harness(folder: Path) -> bool:
    """Return whether the folder is perfsuite itself, and not a folder of that name in another project."""
    return (folder / "proof_item.py").exists()


def imported_by(path: Path, package: str) -> Iterator[str]:
    """Yield the names of the modules that a source imports anywhere; `from a import b` may mean a.b, too."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _unseen_imports(sources: Iterable[Path], top: Path) -> str:
    """Return the first source that imports modules in a way that is not observed, and how; empty if none does."""
    for path in sorted(sources):
        unseen = UNSEEN_IMPORTS | ({"import_module"} if path.name == "conftest.py" else set())
        for node in _nodes(path):
            names = {getattr(node, "id", None), getattr(node, "attr", None)}
            if isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
            if name := next(iter(unseen & names), None):
                return f"{_relative(path, top)} imports modules through {name}"
    return ""


def _nodes(path: Path) -> Iterator[ast.AST]:
    """Yield the syntax tree of a source, node by node; nothing if the file cannot be read or parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    yield from ast.walk(tree)


def _names(path: Path, top: Path) -> list[str]:
    """Return the file's path relative to the repository. For a link also the path of its target."""
    real = _relative(path, top)
    link = path.relative_to(top).as_posix() if top in path.parents else real
    return list(dict.fromkeys((link, real)))


def _relative(path: Path, top: Path) -> str:
    return path.resolve().relative_to(top).as_posix()
