"""Revisions are imported beside each other, and each finds its own modules."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import multiprocessing
import pickle
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from repositories import KERNELS, MODULE, PACKAGE, TEST, Repository, imports_put_back
from scratch import ROOT

import perfsuite
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side
from perfsuite.errors import RevisionError
from perfsuite.revisions import revision, second_import

FACTORS = (3, 5, 7)
"""Factors of the first revision, the second one, and the work tree."""

IMPORTS = {
    # how a module names its helper: (statement, the helper's factor)
    "from a import b": ("from P import helper", "helper.FACTOR"),
    "from a import b as c": ("from P import helper as h", "h.FACTOR"),
    "from a.b import c": ("from P.helper import FACTOR", "FACTOR"),
    "from a import *": ("from P.helper import *", "FACTOR"),
    "import a.b": ("import P.helper", "P.helper.FACTOR"),
    "import a.b as c": ("import P.helper as h", "h.FACTOR"),
    "two in one": ("import math, P.helper, os.path", "P.helper.FACTOR * int(math.cos(0)) * bool(os.path)"),
    "from . import b": ("from . import helper", "helper.FACTOR"),
    "from .b import c": ("from .helper import FACTOR", "FACTOR"),
    "import_module": ("import importlib", "importlib.import_module('P.helper').FACTOR"),
    "importlib as il": ("import importlib as il", "il.import_module('P.helper').FACTOR"),
    "importlib.util": ("import importlib.util", "importlib.import_module('P.helper').FACTOR"),
    "from importlib": ("from importlib import import_module, util", "import_module('P.helper').FACTOR"),
    "from importlib as": ("from importlib import import_module as load", "load('P.helper').FACTOR"),
    "relative import_module": (
        "import importlib",
        "importlib.import_module('.helper', __package__).FACTOR",
    ),
    "import_module by name": (
        "import importlib",
        "getattr(importlib, 'import_module')(name='P.helper', package=None).FACTOR",
    ),
}
PLACES = {
    "when it is imported": "{statement}\nfactor = {factor}\n\n\ndef fast(x):\n    return x * factor\n",
    "when it is called": "def fast(x):\n    {statement}\n    return x * ({factor})\n",
    "when it is built": (
        "class Built:\n    def __init__(self):\n        {statement}\n        self.factor = {factor}\n\n\n"
        "def fast(x):\n    return x * Built().factor\n"
    ),
}


def spelled() -> dict[str, str]:
    """Return name → source of a module that looks its helper up in that way."""
    return {
        f"{how}, {place}": template.format(statement=statement, factor=factor)
        .replace("P.", f"{PACKAGE}.")
        .replace("from P ", f"from {PACKAGE} ")
        for how, (statement, factor) in IMPORTS.items()
        for place, template in PLACES.items()
        if not (how == "from a import *" and place != "when it is imported")  # a syntax error in a function
    }


def every() -> str:
    """Return a test module whose pair has each of these modules as a variant."""
    lines = [f"from {PACKAGE} import k{n}" for n in range(len(spelled()))]
    variants = ", ".join(f"{name!r}: k{n}.fast" for n, name in enumerate(spelled()))
    declared = TEST.replace("gradients=False", f"variants={{{variants}}}, gradients=False").strip("\n")
    return "\n".join([*("    " + line for line in lines), declared])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pair]]:
    """Yield the pair as two revisions and the work tree declare it, in one process; they differ in one helper."""
    with imports_put_back():
        repo = Repository(tmp_path_factory.mktemp("three"))
        repo.write(f"{PACKAGE}/__init__.py", "from .kernels import fast")
        repo.write(f"{PACKAGE}/kernels.py", "def fast(x):\n    from .helper import FACTOR\n    return x * FACTOR\n")
        for n, source in enumerate(spelled().values()):
            repo.write(f"{PACKAGE}/k{n}.py", source)
        repo.write(f"tests/{MODULE}.py", every())
        revisions = []
        for factor in FACTORS[:2]:
            repo.write(f"{PACKAGE}/helper.py", f"FACTOR = {factor}\n")
            revisions.append(repo.commit())
        repo.write(f"{PACKAGE}/helper.py", f"FACTOR = {FACTORS[2]}\n")
        current = repo.current().scale
        yield [*(repo.load(rev) for rev in revisions), current]


def of_one(call: object) -> float:
    call = call.call if isinstance(call, Side) else call
    assert callable(call)
    return float(call(torch.ones(1)))


def change(repo: Repository, factor: int = 7) -> None:
    """Give the work tree's kernels another factor."""
    for path in repo.path.rglob("*.py"):
        if ".perfsuite" not in path.parts and "FACTOR = 3" in path.read_text():
            path.write_text(path.read_text().replace("FACTOR = 3", f"FACTOR = {factor}"))


# --- every way to name a module -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", spelled())
def test_each_revision_finds_its_own_modules(three: Sequence[Pair], name: str) -> None:
    assert tuple(of_one(pair.variants[name]) for pair in three) == FACTORS


def test_the_current_modules_are_not_replaced(three: Sequence[Pair]) -> None:
    assert tuple(of_one(pair.optimized) for pair in three) == FACTORS
    assert FACTORS[2] == importlib.import_module(f"{PACKAGE}.helper").FACTOR
    assert importlib.import_module(MODULE).scale is three[2]
    own = [n for n in sys.modules if n.startswith(second_import.PREFIX) and n.endswith(".helper")]
    assert sorted(sys.modules[n].FACTOR for n in own) == list(FACTORS[:2])


def test_the_harness_and_the_libraries_are_not_imported_twice(three: Sequence[Pair]) -> None:
    assert all(type(pair) is Pair for pair in three)
    roots = {n.split(".")[1] for n in sys.modules if n.startswith(second_import.PREFIX) and "." in n}
    assert roots == {PACKAGE, MODULE}


# --- layouts --------------------------------------------------------------------------------------------------------

LAYOUTS = {
    # layout: (folder of the package, the test module, folders on sys.path, import mode)
    "beside": ("", f"tests/{MODULE}.py", ["", "tests"], "prepend"),
    "src": ("src/", f"tests/{MODULE}.py", ["src", "tests"], "prepend"),
    "a project below the top": ("project/", f"project/tests/{MODULE}.py", ["project", "project/tests"], "prepend"),
    "the tests on no path": ("", f"tests/deep/{MODULE}.py", [""], "importlib"),
    "src and the tests on no path": ("src/", f"tests/{MODULE}.py", ["src"], "importlib"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_project_layout_is_supported(tmp_path: Path, layout: str) -> None:
    package, test, places, mode = LAYOUTS[layout]
    with imports_put_back():
        repo = Repository(tmp_path / "top", places=places, mode=mode)
        repo.write_all({f"{package}{PACKAGE}/__init__.py": "from .kernels import fast", test: TEST})
        repo.write(f"{package}{PACKAGE}/kernels.py", KERNELS)
        first = repo.commit()
        change(repo)
        assert of_one(repo.current(test).scale.optimized) == 7
        assert of_one(repo.load(first, test).optimized) == 3


class Editable:
    """Finder of an editable install, which puts no folder on sys.path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(self.folder)]) if name == PACKAGE else None


def test_an_editable_install_is_supported(tmp_path: Path) -> None:
    with imports_put_back():
        repo = Repository(tmp_path / "top", places=["tests"])
        repo.write_all({f"code/{PACKAGE}/__init__.py": "from .kernels import fast", f"tests/{MODULE}.py": TEST})
        repo.write(f"code/{PACKAGE}/kernels.py", KERNELS)
        sys.meta_path.append(Editable(repo.path / "code"))  # type: ignore[arg-type]  # as setuptools does
        first = repo.commit()
        change(repo)
        assert of_one(repo.current().scale.optimized) == 7
        assert of_one(repo.load(first).optimized) == 3


def test_a_namespace_package_is_supported(repo: Repository) -> None:
    repo.write("space_of_revision/kernels.py", KERNELS)
    repo.write(f"tests/{MODULE}.py", TEST.replace(f"from {PACKAGE} import", "from space_of_revision.kernels import"))
    first = repo.commit()
    change(repo)
    assert of_one(repo.current().scale.optimized) == 7
    assert of_one(repo.load(first).optimized) == 3


def test_a_folder_named_like_a_builtin_module_does_not_replace_it(repo: Repository) -> None:
    """The work tree's code gets Python's own module, and so does the accepted revision's."""
    repo.write("time/notes.py", "FACTOR = 3")
    repo.write(f"{PACKAGE}/kernels.py", f"import time\n{KERNELS}\n\ncalled_at = time.monotonic()\n")
    assert of_one(repo.load(repo.commit()).optimized) == 3


def test_the_python_environment_may_be_inside_the_repository(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is a conda environment in a folder of the project."""
    environment = repo.path / "env"
    repo.write("env/lib/library_here.py", "FACTOR = 3")
    sys.path.append(str(environment / "lib"))
    monkeypatch.setattr(second_import, "ENVIRONMENTS", frozenset({environment}))
    (repo.path / ".gitignore").write_text("env/\n.perfsuite/\n__pycache__/\n")
    repo.write(f"{PACKAGE}/kernels.py", "from library_here import FACTOR\n\n\ndef fast(x):\n    return x * FACTOR\n")
    assert of_one(repo.load(repo.commit()).optimized) == 3


def test_the_repository_path_may_contain_a_symlink(repo: Repository, tmp_path: Path) -> None:
    first = repo.commit()
    change(repo)
    link = tmp_path / "link"
    link.symlink_to(repo.path, target_is_directory=True)
    sys.path[:2] = [str(link), str(link / "tests")]
    repo.path = link
    assert of_one(repo.current().scale.optimized) == 7
    assert of_one(repo.load(first).optimized) == 3


# --- what a revision lacks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["built/generated_here.py", f"{PACKAGE}/generated_here.py"])
def test_importing_a_module_that_git_does_not_hold_is_an_error(repo: Repository, place: str) -> None:
    """For a generated module, the accepted side must not run today's version."""
    name = "generated_here" if place.startswith("built") else f"{PACKAGE}.generated_here"
    repo.write(".gitignore", "__pycache__/\n.perfsuite/\ngenerated_here.py\n")
    repo.write(place, "FACTOR = 3")
    sys.path.insert(0, str(repo.path / "built"))
    repo.write(f"{PACKAGE}/kernels.py", f"from {name} import FACTOR\n\n\ndef fast(x):\n    return x * FACTOR\n")
    first = repo.commit()
    with pytest.raises(RevisionError, match=rf"imports {name}, which git does not hold at that revision") as caught:
        repo.load(first)
    assert "\n" not in str(caught.value)
    assert of_one(repo.current().scale.optimized) == 3


def test_a_failed_import_of_a_project_module_is_recorded(repo: Repository) -> None:
    """With its fallback the accepted revision would run other code than when it was accepted."""
    repo.write(".gitignore", "__pycache__/\n.perfsuite/\ngenerated_here.py\n")
    repo.write(f"{PACKAGE}/generated_here.py", "FACTOR = 3")
    repo.write(
        f"{PACKAGE}/kernels.py",
        f"try:\n    from {PACKAGE}.generated_here import FACTOR\nexcept ImportError:\n    FACTOR = 2\n"
        "try:\n    import no_such_library\nexcept ImportError:\n    pass\n"
        "\n\ndef fast(x):\n    return x * FACTOR\n",
    )
    module = repo.current()
    tree = repo.tree(repo.commit())
    from perfsuite.revisions import revision

    assert of_one(revision.load_pair(module.scale, module, tree).optimized) == 2
    assert second_import.missing(tree.package) == [f"{PACKAGE}.generated_here"]


# --- what looks modules up by name ----------------------------------------------------------------------------------

PROCESSES = """
    import os

    FACTOR = 3


    class Data:
        def __init__(self):
            self.factor = FACTOR

        def __getitem__(self, index):
            return self.factor, FACTOR, os.getpid()


    def item(data):
        return data[0]


    def fast(x):
        return x * FACTOR
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_a_side_starts_imports_its_revision(repo: Repository, method: str) -> None:
    """A data loader's process does this: it gets a pickled object, and imports the modules that the object names."""
    repo.write(f"{PACKAGE}/kernels.py", PROCESSES)
    first = repo.commit()
    change(repo)
    sides = [repo.load(first).optimized, repo.current().scale.optimized]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        found = []
        for side in sides:
            module = sys.modules[side.__module__]  # type: ignore[union-attr]  # a plain function
            found.append(pool.submit(module.item, module.Data()).result(timeout=240))
    assert [f[:2] for f in found] == [(3, 3), (7, 7)]
    assert found[0][2] != multiprocessing.current_process().pid


def test_pickled_objects_keep_the_class_of_their_revision(repo: Repository) -> None:
    repo.write(f"{PACKAGE}/kernels.py", PROCESSES)
    first = repo.commit()
    change(repo)
    module = sys.modules[repo.load(first).optimized.__module__]  # type: ignore[union-attr]  # a plain function
    again = pickle.loads(pickle.dumps(module.Data()))
    assert type(again) is module.Data
    assert again[0][:2] == (3, 3)


def test_compiled_code_reads_the_globals_of_its_own_revision(repo: Repository) -> None:
    """torch.compile finds the module of an inlined function by its name."""
    repo.write(f"{PACKAGE}/helper.py", "FACTOR = 3\n\n\ndef scaled(x):\n    return x * FACTOR\n")
    repo.write(
        f"{PACKAGE}/kernels.py", f"from {PACKAGE}.helper import scaled\n\n\ndef fast(x):\n    return scaled(x) + 1\n"
    )
    first = repo.commit()
    change(repo)
    torch._dynamo.reset()
    calls = [
        torch.compile(side, backend="eager", fullgraph=True)
        for side in (repo.current().scale.optimized, repo.load(first).optimized)
    ]
    assert [of_one(call) for call in calls] == [8, 4]
    compiled = torch._dynamo.utils.counters["frames"]["total"]
    assert [of_one(call) for call in calls] == [8, 4]
    assert torch._dynamo.utils.counters["frames"]["total"] == compiled  # guards, too, read the revision's own globals


RAISES = f"""
    import importlib

    from {PACKAGE} import helper


    def fast(x):
        import {PACKAGE}.helper
        if x.numel() > 1:
            raise ValueError("on line 9")
        return x * helper.FACTOR
"""


def test_tracebacks_and_sources_are_those_of_the_revision(repo: Repository) -> None:
    repo.write(f"{PACKAGE}/helper.py", "FACTOR = 3\n")
    path = repo.write(f"{PACKAGE}/kernels.py", RAISES)
    text = path.read_text()
    first = repo.commit()
    path.write_text("# another line\n" + text)
    old: Any = repo.load(first).optimized
    assert inspect.getsource(old) == text[text.index("def fast") :]
    assert inspect.getsourcelines(old)[1] == 6
    with pytest.raises(ValueError, match="on line 9") as caught:
        old(torch.ones(2))
    (*_, frame) = traceback.extract_tb(caught.value.__traceback__)
    assert (frame.lineno, frame.line) == (9, 'raise ValueError("on line 9")')
    assert Path(frame.filename).read_text() == text


KERNEL = """
    import torch
    import triton
    import triton.language as tl

    from impl_of_revision.device import scaled


    @triton.jit
    def scale_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n)
        tl.store(out_ptr + at, scaled(x), mask=at < n)


    def fast(x):
        out = torch.empty_like(x)
        scale_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), BLOCK=16)
        return out
"""
DEVICE = """
    import triton
    import triton.language as tl  # noqa: F401 - the interpreter looks for it


    @triton.jit
    def scaled(x):
        return x * 3.0
"""


def test_a_triton_kernel_calls_its_revision_s_functions(repo: Repository) -> None:
    """This tests the interpreter; the cache key of a compiled kernel contains its sources."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    repo.write(f"{PACKAGE}/device.py", DEVICE)
    repo.write(f"{PACKAGE}/kernels.py", KERNEL)
    first = repo.commit()
    repo.write(f"{PACKAGE}/device.py", DEVICE.replace("3.0", "7.0"))
    assert of_one(repo.current().scale.optimized) == 7
    assert of_one(repo.load(first).optimized) == 3


# --- the package ----------------------------------------------------------------------------------------------------


def test_only_the_package_beside_a_tree_can_be_imported(repo: Repository) -> None:
    """A tree's folder is on sys.path: `import tree`, for example, must still find that library, or none."""
    tree = repo.tree(repo.commit())
    beside = {p.name for p in Path(tree.folder).iterdir()}
    assert beside == {second_import.TREE, tree.package}
    assert not second_import.TREE.isidentifier()
    assert tree.package.isidentifier()


def test_importlib_works_in_a_revision(repo: Repository) -> None:
    repo.write(
        f"{PACKAGE}/kernels.py",
        "import importlib.util\nimport importlib\n\n"
        "assert importlib.util.find_spec('json') is not None\n"
        "assert importlib.import_module('json').__name__ == 'json'\n"
        "assert importlib.import_module('importlib').reload is importlib.reload\n"
        f"{KERNELS}",
    )
    assert of_one(repo.load(repo.commit()).optimized) == 3


def test_nothing_is_written_into_a_tree(repo: Repository) -> None:
    tree = repo.tree(repo.commit())
    before = sorted(Path(tree.folder, second_import.TREE).rglob("*"))
    module: ModuleType = repo.current()
    revision.load_pair(module.scale, module, tree)
    assert sorted(Path(tree.folder, second_import.TREE).rglob("*")) == before


def test_modules_of_the_harness_are_imported_by_their_former_names(repo: Repository) -> None:
    repo.write(
        f"{PACKAGE}/kernels.py",
        "from perfsuite import Cost, host as machine_of, machine\nfrom perfsuite.counting import count_calls\n\n"
        "assert machine_of.__name__ == 'perfsuite.system.host'\n"
        "assert machine.__name__ == 'perfsuite.system.machine'\n"
        "assert count_calls.__module__ == 'perfsuite.timing.profiler_counts'\n"
        f"{KERNELS}",
    )
    first = repo.commit()
    repo.write(f"{PACKAGE}/kernels.py", KERNELS)
    assert of_one(repo.load(first).optimized) == 3


def test_accepted_revisions_of_this_repository_import_modules_that_the_harness_has() -> None:
    """Their pairs and trainers use some modules of the harness, by the names that these had then."""
    stored = "".join(path.read_text() for path in (ROOT / "baselines").glob("*.json"))
    revisions = sorted(set(re.findall(r'"revision": "([0-9a-f]{40})', stored)))
    assert revisions
    words = r"^\s*from perfsuite(\.[a-z_.]+)? import "
    apart = [f":(exclude)tests/{folder}" for folder in ("perfsuite", "planted", "suite")]
    for commit in revisions:
        try:
            found = revision.git("grep", "-hE", words, commit, "--", "suite", "optimized", "tests", *apart, cwd=ROOT)
        except RevisionError:
            pytest.skip(f"this clone does not have the revision {commit[:9]}")
        for line in set(found.splitlines()):
            module, names = line.removeprefix("from ").strip().removeprefix("from ").split(" import ")
            if module != "perfsuite":
                assert importlib.util.find_spec(second_import.MOVED.get(module, module)), line
                continue
            for name in (text.split()[0] for text in names.strip("()").split(",") if text.strip()):
                inside = f"perfsuite.{name}"
                known = name in perfsuite.__all__ or importlib.util.find_spec(second_import.MOVED.get(inside, inside))
                assert known, line
