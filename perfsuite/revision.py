"""Load the optimized side of another revision beside the current one, from git, in a second import of that tree."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from perfsuite.errors import RevisionError
from perfsuite.pair import Pair, Side, as_side

HARNESS = "perfsuite"
APART = (
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.splitIndex=false"),
    *("-c", "submodule.recurse=false"),
)
"""For a temporary index, which is none of the repository's: no hook, daemon or shared part of it is to begin."""


def git(*arguments: str, cwd: Path, options: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> str:
    """Output of a git command, run with git's own `options`; RevisionError with its last line where it fails."""
    environment = {**os.environ, **variables} if variables else None
    command = ["git", *options, *arguments]
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, check=False, env=environment)
    except FileNotFoundError:
        raise RevisionError("git is not installed") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RevisionError(f"git {arguments[0]}: {lines[-1] if lines else 'failed'}")
    return done.stdout.decode(errors="replace").strip()


def top_level(root: Path) -> Path:
    """The work tree's top folder; RevisionError outside a git repository."""
    return Path(git("rev-parse", "--show-toplevel", cwd=root))


def head(root: Path) -> tuple[str | None, bool]:
    """(current revision, whether tracked files differ from it); (None, False) outside git."""
    try:
        revision = git("rev-parse", "HEAD", cwd=root)
        return revision, bool(git("status", "--porcelain", "--untracked-files=no", cwd=root))
    except RevisionError:
        return None, False


def resolve(revision: str, root: Path) -> str:
    """The full hash of a revision; RevisionError where git does not know it."""
    try:
        return git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", cwd=root)
    except RevisionError:
        shallow = git("rev-parse", "--is-shallow-repository", cwd=root) == "true"
        hint = "the clone is shallow: git fetch --unshallow" if shallow else "see git log for the revisions there are"
        raise RevisionError(f"revision {revision} is not in this repository; {hint}") from None


def extract(revision: str, root: Path, into: Path) -> Path:
    """The revision's tree as files in a fresh folder below `into`; the repository is not changed.

    Checked out through an index of its own. `git archive` would leave out what is marked export-ignore, as many
    projects mark their tests, and rewrite what is marked export-subst.
    """
    full, top = resolve(revision, root), top_level(root)
    try:
        into.mkdir(parents=True, exist_ok=True)
        tree = Path(tempfile.mkdtemp(prefix=f"{full[:12]}-", dir=into)).resolve()
        with tempfile.TemporaryDirectory(prefix="index-", dir=into) as apart:
            git(
                *("read-tree", "-m", "-u", "--no-sparse-checkout", full),
                cwd=top,
                options=[f"--work-tree={tree}", *APART],
                variables={"GIT_INDEX_FILE": str(Path(apart, "index").resolve())},
            )
    except (OSError, RevisionError) as error:
        raise RevisionError(f"revision {revision} cannot be unpacked into {into} ({error})") from None
    return tree


@contextmanager
def extracted(
    revisions: Iterable[str], root: Path, folder: Path
) -> Iterator[tuple[dict[str, Path], dict[str, RevisionError]]]:
    """(trees, refused): each revision's tree in `folder`, or why there is none. The folder is gone afterwards."""
    trees: dict[str, Path] = {}
    refused: dict[str, RevisionError] = {}
    try:
        for revision in dict.fromkeys(revisions):
            try:
                trees[revision] = extract(revision, root, folder)
            except RevisionError as error:
                refused[revision] = error
        yield trees, refused
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load_side(pair: Pair, module_name: str, tree: Path, root: Path) -> Side:
    """The optimized side of the same pair in the tree of another revision.

    The tree's modules are imported beside the current ones under the same names, and then put out of the way.
    RevisionError where the tree lacks the pair, or where a module would reach back into the current tree.
    """
    top = top_level(root).resolve()
    with second_import(top, tree.resolve()):
        try:
            module = importlib.import_module(module_name)
            old: Any = getattr(module, pair.name)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            raise RevisionError(
                f"{module_name}::{pair.name} cannot be loaded from the accepted revision: "
                f"{type(error).__name__}: {lines[0][:200]}"
            ) from None
        if not isinstance(old, Pair):
            raise RevisionError(f"{module_name}::{pair.name} is no pair in the accepted revision")
        side = as_side(old.optimized)
        loaded = [m for m in list(sys.modules.values()) if _lies_in(m, tree.resolve())]
        leaks = [m.__name__ for m in list(sys.modules.values()) if _is_first_party(m, top)]
        if leaks:
            raise RevisionError(f"the accepted revision imports {leaks[0]} from the current tree")
        owned = {m.__name__.partition(".")[0] for m in loaded}
        for late in filter(None, (_late_import(m, owned) for m in loaded)):
            raise RevisionError(
                f"the accepted revision imports inside a function ({late}), which would find the current tree"
            )
    return replace(side)


@contextmanager
def second_import(top: Path, tree: Path) -> Iterator[None]:
    """Inside, imports of this repository's modules find `tree`; outside, all is as before."""
    path, modules = list(sys.path), dict(sys.modules)
    for name, module in modules.items():
        if _is_first_party(module, top):
            del sys.modules[name]
    sys.path[:] = [_mapped(entry, top, tree) for entry in path]
    if str(tree) not in sys.path:
        sys.path.insert(0, str(tree))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in [n for n, m in sys.modules.items() if n not in modules or m is not modules[n]]:
            if _lies_in(sys.modules[name], tree) or name in modules:
                del sys.modules[name]
        sys.modules.update(modules)
        importlib.invalidate_caches()


def _mapped(entry: str, top: Path, tree: Path) -> str:
    absolute = Path(entry or os.getcwd()).resolve()
    if absolute == top or top in absolute.parents:
        inside = tree / absolute.relative_to(top)
        if inside.exists():
            return str(inside)
    return entry


def _file(module: ModuleType) -> Path | None:
    name = getattr(module, "__file__", None)
    if not name:
        spec = getattr(module, "__path__", None)
        name = next(iter(spec), None) if spec else None
    return Path(name) if isinstance(name, str) else None


def _lies_in(module: ModuleType, folder: Path) -> bool:
    file = _file(module)
    return file is not None and folder in file.parents


def _is_first_party(module: ModuleType, top: Path) -> bool:
    """A module of the repository under test: not the harness, not an installed package, not a conftest."""
    name = getattr(module, "__name__", "")
    if name == HARNESS or name.startswith(f"{HARNESS}.") or name in ("__main__", "conftest"):
        return False
    file = _file(module)
    if file is None or top not in file.parents:
        return False
    inside = file.relative_to(top).parts
    return "site-packages" not in inside and not any(part.startswith(".") for part in inside)


def _late_import(module: ModuleType, owned: set[str]) -> str | None:
    """Where a function of the module imports another module of its own repository, or None."""
    file = _file(module)
    if file is None or file.suffix != ".py" or not file.is_file():
        return None
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for inner in ast.walk(node):
            names = (
                [a.name for a in inner.names]
                if isinstance(inner, ast.Import)
                else [inner.module or ""]
                if isinstance(inner, ast.ImportFrom)
                else []
            )
            relative = isinstance(inner, ast.ImportFrom) and inner.level > 0
            if relative or any(n.partition(".")[0] in owned for n in names):
                return f"{file.name}:{getattr(inner, 'lineno', '?')}"
    return None
