"""Small repositories whose revisions the harness's own tests import beside each other."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from _pytest.pathlib import import_path
from scratch import git

from perfsuite.declare.pair import Pair
from perfsuite.revisions import revision
from perfsuite.revisions.revision import Tree
from perfsuite.revisions.second_import import PREFIX

MODULE = "test_scale_of_revision"
PACKAGE = "impl_of_revision"
KERNELS = "FACTOR = 3\n\n\ndef fast(x):\n    return x * FACTOR\n"
TEST = f"""
    from {PACKAGE} import fast
    from perfsuite import Pair, Workload, tensor


    def slow(x):
        return x + x + x


    scale = Pair(
        reference=slow,
        optimized=fast,
        inputs={{"x": tensor("n")}},
        gradients=False,
        workloads=[Workload("small", n=8, clock="wall")],
    )
"""
OWN = (MODULE, PACKAGE, PREFIX, "generated_here", "library_here", "registry_here", "space_of_revision", "tests")
"""Prefixes of the names of all modules that these repositories import."""


class Repository:
    """Git folder with a package and a test module; `load` imports a revision as a worker would."""

    def __init__(self, path: Path, *, places: Sequence[str] = ("", "tests"), mode: str = "prepend") -> None:
        self.path, self.mode = path, mode
        path.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet")
        self.write(".gitignore", "__pycache__/\n.perfsuite/\nbuilt/\n")
        sys.path[:0] = [str(path / place) for place in places]

    def git(self, *arguments: str) -> str:
        return git(self.path, *arguments)

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        return path

    def write_all(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            self.write(name, text)

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "--quiet", "--allow-empty", "-m", "work")
        return self.git("rev-parse", "HEAD")

    def current(self, file: str = f"tests/{MODULE}.py") -> ModuleType:
        """Import the work tree's test module as pytest does."""
        importlib.invalidate_caches()
        module = import_path(self.path / file, mode=self.mode, root=self.path, consider_namespace_packages=False)
        module.scale.name = "scale"
        return module

    def tree(self, rev: str) -> Tree:
        return revision.extract(rev, self.path, self.path / ".perfsuite/revisions")

    def load(self, rev: str, file: str = f"tests/{MODULE}.py") -> Pair:
        """Return the pair as that revision declares it."""
        module = self.current(file)
        return revision.load_pair(module.scale, module, self.tree(rev))


@contextmanager
def imports_put_back() -> Iterator[None]:
    """Remove these repositories' modules for the block, and restore them afterwards. torch's own modules stay."""
    path, finders = list(sys.path), list(sys.meta_path)
    before = _taken()
    sys.path[:] = [p for p in path if not any(Path(p, name).exists() for name in (PACKAGE, f"{MODULE}.py"))]
    try:
        yield
    finally:
        sys.path[:], sys.meta_path[:] = path, finders
        _taken()
        sys.modules.update(before)
        importlib.invalidate_caches()


def _taken() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in [n for n in sys.modules if n.startswith(OWN)]}


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A package of two modules, and a pair, not committed yet."""
    with imports_put_back():
        made = Repository(tmp_path / "project")
        made.write_all({f"{PACKAGE}/__init__.py": "from .kernels import fast", f"tests/{MODULE}.py": TEST})
        made.write(f"{PACKAGE}/kernels.py", KERNELS)
        yield made
