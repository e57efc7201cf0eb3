"""Digests of everything that a workload ran: its code, the data that it read, and what it ran on.

Two digests of a source file agree where the files differ in comments, layout and docstrings alone. Nothing here imports
torch; the functions that look at loaded modules are for the process that has run the workload.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from perfsuite.records import Ran
from perfsuite.revisions.observed_files import Observed
from perfsuite.revisions.second_import import HARNESS, is_first_party

if TYPE_CHECKING:
    import pytest

LENGTH = 16
"""Hexadecimal digits kept of a digest: 64 bits."""
LARGE_BYTES = 1 << 26
"""Bytes above which a data file is identified by its size and modification time."""
OPAQUE = frozenset({"h5py", "sqlite3", "tensorstore", "lmdb", "safetensors"})
"""Modules that read files without Python seeing it."""
VARIABLES = (
    *("CUBLAS", "CUDA_", "CUDNN", "CUTE_", "CUTLASS_", "NCCL", "NVCC_", "NVIDIA_TF32", "NVTE_"),
    *("PYTORCH", "TORCH", "TRITON", "ATEN_", "GLOO_", "UCX_", "NVSHMEM_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_"),
    *("OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "NUMEXPR_", "NPY_"),
    *("GLIBC_TUNABLES", "MALLOC_", "MIMALLOC_", "TCMALLOC_", "_RJEM_MALLOC", "LD_BIND_NOW", "LD_PRELOAD"),
    *("PYTHONDEVMODE", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONOPTIMIZE", "PYTHONTRACEMALLOC"),
    *("PYTHON_GIL", "PYTHON_JIT", "PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_PLUGINS"),
)
"""Prefixes of environment variables that affect the speed of code: of CUDA and its libraries, PyTorch and
communication, numerical libraries and their threads, memory allocation and the dynamic linker, Python, and pytest."""
INCIDENTAL_SETTINGS = (
    *("cache_dir", "console_output_style", "markers", "minversion", "norecursedirs", "required_plugins", "testpaths"),
    *("doctest_", "junit_", "perfsuite_", "python_", "tmp_path_retention_", "verbosity_", "xfail_strict"),
)
"""Prefixes of pytest's settings that only select, name and show tests."""
BUILD = "#"
"""Separates a package's version from the digest of its files."""
BUILD_DIGITS = 8
DOCUMENTS = (".md", ".rst", ".pyc", "~")
"""Suffixes of files that no code reads at run time."""
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
    """Return the digest of a data file's bytes; for a large one, of its size and modification time; for a folder, of
    all its files. Empty where there is no such file."""
    try:
        state = path.stat()
        if path.is_dir():
            return _short("\n".join(f"{p.relative_to(path)} {of_data(p)}" for p in _files_below(path)).encode())
        return f"{state.st_size} {state.st_mtime_ns}" if state.st_size > LARGE_BYTES else _short(path.read_bytes())
    except OSError:
        return ""


def _files_below(folder: Path) -> list[Path]:
    """Return the files in the folder and its subfolders that code may read at run time, in order."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if matters(name)]
        found += [path for name in names if matters(name) and (path := Path(place, name)).is_file()]
    return sorted(found)


def matters(name: str) -> bool:
    """Return whether code may read a file of this name at run time."""
    return not name.startswith(".") and not name.endswith(DOCUMENTS)


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
    versions = sorted({package.partition(BUILD)[0] for package in packages()})
    return _short("\n".join([*versions, *(f"{name}={value}" for name, value in variables().items())]).encode())


def packages() -> list[str]:
    """Return all installed packages, as `name==version#build`, in order, or as `name==version` if the build is not
    known."""
    return list(_installed(tuple(PATHS)))


@functools.cache
def _installed(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the installed packages of these paths. They are read once, because accept and --changed ask for each
    workload."""
    found = importlib.metadata.distributions(path=list(paths))
    return tuple(sorted({f"{d.metadata['Name']}=={d.version}{_build(d)}" for d in found if not is_editable(d)}))


def _build(distribution: importlib.metadata.Distribution) -> str:
    """Return BUILD and the digest of the distribution's files; empty if its installer listed none with their hashes.

    Scripts and metadata are left out, because they contain the place of the installation.
    """
    lines = (distribution.read_text("RECORD") or "").splitlines()
    files = sorted(f for f in lines if ",sha" in f and not f.startswith(("..", "/")) and ".dist-info/" not in f)
    return f"{BUILD}{_short(chr(10).join(files).encode())[:BUILD_DIGITS]}" if files else ""


def variables() -> dict[str, str]:
    """Return the environment variables that matter to speed, in order."""
    return {
        name: value
        for name, value in sorted(ENVIRONMENT.items())
        if name.startswith(VARIABLES) and not any(word in name for word in INCIDENTAL)
    }


def settings(config: pytest.Config) -> dict[str, str]:
    """Return pytest's settings that may affect a measured run, as they are written in its file or on its command
    line."""
    given = config._inicfg if hasattr(config, "_inicfg") else config.inicfg  # pytest 9, and earlier versions
    values = {name: getattr(value, "value", value) for name, value in given.items()}
    values |= {name: value for name, _, value in (o.partition("=") for o in config.option.override_ini or ())}
    return {
        name: value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in sorted(values.items())
        if not name.startswith(INCIDENTAL_SETTINGS)
    }


def is_editable(distribution: importlib.metadata.Distribution) -> bool:
    """Return whether a distribution is an editable install of a folder, whose code is digested by its content."""
    try:
        return '"editable": true' in (distribution.read_text("direct_url.json") or "")
    except Exception:
        return False


# --- what a workload ran --------------------------------------------------------------------------------------------


def ran(
    modules: Iterable[ModuleType],
    files: Collection[str],
    compiled: Collection[str],
    observed: Observed,
    outside: Iterable[Path] = (),
) -> Ran:
    """Return what a workload ran: the files that these modules and files import, the data that was opened, and these
    packages `outside` the repository.

    The parent adds the surroundings, as the run found them.
    """
    top, opaque = observed.top, sorted(OPAQUE & {name.partition(".")[0] for name in compiled})
    seeds = [Path(f) for m in modules if (f := getattr(m, "__file__", None))]
    seeds += [Path(f) for f in files if Path(f).is_absolute()]
    sources = _closure([*seeds, *_conftests(seeds, top)], top, observed)
    return Ran(
        sources={name: of_file(p) for p in sorted(sources) for name in _names(p, top)},
        data={Path(os.path.relpath(p, top)).as_posix(): of_data(p) for p in (*observed.data(), *outside)},
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
    """Return the first-party files that the seeds import, directly or through others, and the packages that contain
    these files.

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
    # These files are in every revision of perfsuite.
    return (folder / "plugin.py").exists() and (folder / "records.py").exists()


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
