"""No revision is compared with itself: one call of each side shows whose code it runs."""

from __future__ import annotations

import contextlib
import cProfile
import importlib
import math
import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from repositories import KERNELS, MODULE, PACKAGE, TEST, Repository, imports_put_back

from perfsuite.session import gpu_sharing, worker_main
from perfsuite.session.tasks import Task
from perfsuite.state.process_state import set_profile
from perfsuite.timing import provenance


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with imports_put_back():
        made = Repository(tmp_path / "project")
        made.write_all({f"{PACKAGE}/__init__.py": "", f"tests/{MODULE}.py": using(f"{PACKAGE}.kernels")})
        made.write(f"{PACKAGE}/kernels.py", KERNELS)
        yield made


def using(module: str, side: str = "fast") -> str:
    """Return the test module with the optimized side imported from `module`."""
    text = TEST.replace(f"from {PACKAGE} import fast", f"from {module} import {side}")
    return text if side == "fast" else text.replace("optimized=fast", f"optimized={side}")


def refused(repo: Repository, rev: str | None = None) -> str:
    """Return why a worker refuses to compare the work tree with the revision; empty if it does not refuse."""
    module = repo.current()
    tree = repo.tree(rev or repo.commit())
    item: Any = SimpleNamespace(
        pair=module.scale,
        workload=module.scale.workloads[0],
        nodeid="",
        home=None,
        getparent=lambda kind: SimpleNamespace(obj=module),
    )
    journal: Any = SimpleNamespace(phase=lambda id, phase: None)
    work = worker_main._Workload(item, Task(id="", accepted=tree), journal, "cpu", gpu_sharing.Gpu(""))
    pair, reason = work._comparable(0)
    assert (pair is None) is bool(reason)
    return reason


def library(folder: Path, name: str, text: str) -> Path:
    """Install a module in a folder of libraries."""
    place = folder / "lib/python3.11/site-packages"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.py").write_text(text)
    sys.path.append(str(place))
    importlib.invalidate_caches()
    return place


# --- each side runs its own code ------------------------------------------------------------------------------------


def test_two_revisions_are_compared(repo: Repository) -> None:
    first = repo.commit()
    repo.write(f"{PACKAGE}/kernels.py", KERNELS.replace("x * FACTOR", "FACTOR * x"))
    assert refused(repo, first) == ""


def test_libraries_that_both_revisions_use_are_no_matter(repo: Repository, tmp_path: Path) -> None:
    library(tmp_path, "library_here", "def times(x, factor):\n    return x * factor\n")
    repo.write(f"{PACKAGE}/kernels.py", "from library_here import times\n\n\ndef fast(x):\n    return times(x, 3)\n")
    assert refused(repo) == ""


def test_a_registry_of_the_repository_is_each_revision_s_own(repo: Repository) -> None:
    repo.write(f"{PACKAGE}/registry.py", "FUNCTIONS = {}\n")
    repo.write(
        f"{PACKAGE}/kernels.py",
        f"from {PACKAGE}.registry import FUNCTIONS\n\n\ndef scaled(x):\n    return x * 3\n\n\n"
        "FUNCTIONS['scaled'] = scaled\n\n\ndef fast(x):\n    return FUNCTIONS['scaled'](x)\n",
    )
    assert refused(repo) == ""


# --- the accepted side runs the current tree's ----------------------------------------------------------------------

LOOKUPS = {
    "sys.modules": f"import sys\n\n\ndef fast(x):\n    return sys.modules['{PACKAGE}.other'].scaled(x)\n",
    "__import__": f"def fast(x):\n    return __import__('{PACKAGE}.other').other.scaled(x)\n",
    "pkgutil": f"import pkgutil\n\n\ndef fast(x):\n    return pkgutil.resolve_name('{PACKAGE}.other:scaled')(x)\n",
}


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_current_code_that_is_found_by_its_name(repo: Repository, lookup: str) -> None:
    repo.write(f"{PACKAGE}/other.py", "def scaled(x):\n    return x * 3\n")
    repo.write(f"{PACKAGE}/kernels.py", f"import {PACKAGE}.other\n{lookup}")
    assert refused(repo) == f"the accepted revision runs {PACKAGE}/other.py of the current tree"


def test_current_code_behind_a_link(repo: Repository, tmp_path: Path) -> None:
    """The current tree is imported through a symbolic link, and its files are recognised as the same."""
    repo.write(f"{PACKAGE}/other.py", "def scaled(x):\n    return x * 3\n")
    repo.write(f"{PACKAGE}/kernels.py", f"import {PACKAGE}.other\n{LOOKUPS['sys.modules']}")
    first = repo.commit()
    (tmp_path / "link").symlink_to(repo.path, target_is_directory=True)
    repo.path = tmp_path / "link"
    sys.path[:2] = [str(repo.path), str(repo.path / "tests")]
    assert refused(repo, first) == f"the accepted revision runs {PACKAGE}/other.py of the current tree"


# --- the current side runs the accepted tree's ----------------------------------------------------------------------

REGISTERS = """
    from registry_here import FUNCTIONS


    def scaled(x):
        return x * 3


    FUNCTIONS["{name}"] = scaled


    def fast(x):
        return FUNCTIONS["{name}"](x)
"""


def test_a_name_in_a_library_s_registry_that_both_take(repo: Repository, tmp_path: Path) -> None:
    """The name belongs to the revision that is imported last."""
    library(tmp_path, "registry_here", "FUNCTIONS = {}\n")
    repo.write(f"{PACKAGE}/kernels.py", REGISTERS.format(name="scaled"))
    assert refused(repo) == (
        f"the current side runs {PACKAGE}/kernels.py of the accepted tree: both register the same name"
    )


def test_names_in_a_library_s_registry_that_differ(repo: Repository, tmp_path: Path) -> None:
    library(tmp_path, "registry_here", "FUNCTIONS = {}\n")
    repo.write(f"{PACKAGE}/kernels.py", REGISTERS.format(name="before"))
    first = repo.commit()
    repo.write(f"{PACKAGE}/kernels.py", REGISTERS.format(name="now"))
    assert refused(repo, first) == ""


OPERATOR = """
    import torch


    @torch.library.custom_op("perfsuite_tests::{name}", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 3


    def fast(x):
        return torch.ops.perfsuite_tests.{name}(x)
"""


def test_an_operator_that_both_revisions_define(repo: Repository) -> None:
    repo.write(f"{PACKAGE}/kernels.py", OPERATOR.format(name="scaled_by_both"))
    assert refused(repo).endswith("of the accepted tree: both register the same name")


def test_an_operator_of_the_current_tree_alone(repo: Repository) -> None:
    first = repo.commit()
    repo.write(f"{PACKAGE}/kernels.py", OPERATOR.format(name="scaled_by_one"))
    assert refused(repo, first) == ""


# --- neither is of the repository -----------------------------------------------------------------------------------


def test_a_package_installed_as_a_copy(repo: Repository, tmp_path: Path) -> None:
    """With `pip install .` both revisions import the copy, even if the repository itself is named perfsuite."""
    place = library(tmp_path / "perfsuite", "library_here", "")
    shutil.copytree(repo.path / PACKAGE, place / PACKAGE)
    sys.path.remove(str(repo.path))
    repo.write(f"{PACKAGE}/kernels.py", KERNELS.replace("3", "4"))
    assert refused(repo) == (
        f"{PACKAGE} is installed as a copy in {place / PACKAGE}, not from the work tree: pip install -e ."
    )


def test_a_copy_of_a_source_folder(repo: Repository, tmp_path: Path) -> None:
    place = library(tmp_path, "library_here", "")
    shutil.copytree(repo.path / PACKAGE, place / PACKAGE)
    (repo.path / "src").mkdir()
    (repo.path / PACKAGE).rename(repo.path / "src" / PACKAGE)
    assert f"{PACKAGE} is installed as a copy" in refused(repo)


def test_a_folder_of_the_repository_with_a_library_s_name(repo: Repository, tmp_path: Path) -> None:
    """The folder is no copy, because the library's files are different ones."""
    library(tmp_path, "library_here", "def times(x, factor):\n    return x * factor\n")
    repo.write("library_here/README.md", "how we use it")
    repo.write(f"{PACKAGE}/kernels.py", "from library_here import times\n\n\ndef fast(x):\n    return times(x, 3)\n")
    assert refused(repo) == ""


@pytest.mark.parametrize(
    "module",
    [
        "import torch\n\nfast = torch.nn.functional.relu\n",
        "import torch\n\nfast = torch.abs\n",
        "from functools import partial\n\nimport torch\n\nfast = partial(torch.mul, other=3)\n",
    ],
)
def test_a_side_that_is_a_library_function(repo: Repository, module: str) -> None:
    repo.write(f"{PACKAGE}/kernels.py", module)
    assert refused(repo) == "none of the code that it runs is in the repository, so both revisions run the same"


def test_a_library_function_that_is_called_by_one_of_the_repository(repo: Repository) -> None:
    repo.write(f"{PACKAGE}/kernels.py", "import torch\n\n\ndef fast(x):\n    return torch.mul(x, 3)\n")
    assert refused(repo) == ""


# --- compiled extensions --------------------------------------------------------------------------------------------


def extension() -> Path:
    """Return a compiled module of Python's own, as a stand-in for a project's."""
    folder = Path(sysconfig.get_config_var("DESTSHARED") or "")
    found = sorted(folder.glob("_bisect.*.so"))
    if not found:
        pytest.skip("this Python has its own extensions built in")
    return found[0]


COMPILED = "{imports}\n\n\ndef fast(x):\n    return x * ({module}.bisect_right([1, 2, 3], 3) if {module} else 3)\n"


def test_an_extension_that_git_does_not_hold(repo: Repository) -> None:
    """An extension that is built in place is missing in the accepted revision, which may fall back to slower code."""
    repo.write(".gitignore", "*.so\n__pycache__/\n.perfsuite/\n")
    shutil.copy(extension(), repo.path / PACKAGE)
    repo.write(f"{PACKAGE}/kernels.py", COMPILED.format(imports=f"from {PACKAGE} import _bisect", module="_bisect"))
    assert "_bisect" in refused(repo)
    fallback = f"try:\n    from {PACKAGE} import _bisect\nexcept ImportError:\n    _bisect = None"
    repo.write(f"{PACKAGE}/other.py", COMPILED.format(imports=fallback, module="_bisect"))
    repo.write(f"tests/{MODULE}.py", using(f"{PACKAGE}.other"))
    for name in [n for n in sys.modules if n.startswith((MODULE, PACKAGE))]:
        del sys.modules[name]
    assert refused(repo).startswith("the current side runs the compiled extension _bisect.")


def test_an_extension_that_git_holds_is_each_revision_s_own(repo: Repository) -> None:
    shutil.copy(extension(), repo.path / PACKAGE)
    repo.write(f"{PACKAGE}/kernels.py", COMPILED.format(imports=f"from {PACKAGE} import _bisect", module="_bisect"))
    assert refused(repo) == ""


def test_an_extension_that_is_installed_and_shared(repo: Repository, tmp_path: Path) -> None:
    place = library(tmp_path, "library_here", "")
    repo.write("space_of_revision/__init__.py", "")
    shutil.copytree(repo.path / "space_of_revision", place / "space_of_revision")
    shutil.copy(extension(), place / "space_of_revision")
    sys.path.insert(0, str(place))
    repo.write(
        f"{PACKAGE}/kernels.py", COMPILED.format(imports="from space_of_revision import _bisect", module="_bisect")
    )
    assert refused(repo).startswith("both revisions share the compiled extension _bisect.")


def test_an_extension_of_a_library_is_no_matter(repo: Repository) -> None:
    repo.write(f"{PACKAGE}/kernels.py", COMPILED.format(imports="import _bisect", module="_bisect"))
    assert refused(repo) == ""


# --- what a revision lacks ------------------------------------------------------------------------------------------


def test_a_module_that_the_accepted_side_cannot_find(repo: Repository) -> None:
    repo.write(".gitignore", "generated_here.py\n__pycache__/\n.perfsuite/\n")
    repo.write(f"{PACKAGE}/generated_here.py", "FACTOR = 3")
    repo.write(
        f"{PACKAGE}/kernels.py",
        "def fast(x):\n"
        f"    try:\n        from {PACKAGE}.generated_here import FACTOR\n"
        "    except ImportError:\n        FACTOR = 3\n"
        "    return x * FACTOR\n",
    )
    assert refused(repo) == (
        f"the accepted revision asks for the module {PACKAGE}.generated_here, which git does not hold at that revision"
    )


def test_an_accepted_side_that_raises(repo: Repository) -> None:
    repo.write(f"{PACKAGE}/kernels.py", "def fast(x):\n    raise RuntimeError('built for another torch\\nand more')\n")
    first = repo.commit()
    repo.write(f"{PACKAGE}/kernels.py", KERNELS)
    assert refused(repo, first) == "the accepted side raises RuntimeError: built for another torch"


def test_an_accepted_side_without_memory_is_tried_again_alone(repo: Repository) -> None:
    """It may lack memory beside others, which is no reason to compare stored figures."""
    repo.write(f"{PACKAGE}/kernels.py", "import torch\n\n\ndef fast(x):\n    raise torch.OutOfMemoryError('7 EiB')\n")
    first = repo.commit()
    repo.write(f"{PACKAGE}/kernels.py", KERNELS)
    with pytest.raises(torch.OutOfMemoryError):
        refused(repo, first)


# --- what is seen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a thread", "torch.compile", "a backward pass", "a step that is built"])
def test_code_is_seen_wherever_a_side_runs_it(repo: Repository, how: str) -> None:
    """Each case runs the current tree's function from a place that the call alone does not show."""
    repo.write(f"{PACKAGE}/other.py", "def scaled(x):\n    return x * 3\n")
    found = f"sys.modules['{PACKAGE}.other'].scaled"
    bodies = {
        "a thread": f"""
            def fast(x):
                found = []
                thread = threading.Thread(target=lambda: found.append({found}(x)))
                thread.start()
                thread.join()
                return found[0]
        """,
        "torch.compile": f"""
            @torch.compile(backend="eager")
            def compiled(x, scaled):
                return scaled(x)


            def fast(x):
                return compiled(x, {found})
        """,
        "a backward pass": f"""
            class Scale(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x * 3

                @staticmethod
                def backward(ctx, grad):
                    return {found}(grad)


            fast = Scale.apply
        """,
        "a step that is built": f"""
            def fast(start):
                total = {found}(start)
                return lambda x: total.add_(x).clone()
        """,
    }
    text = repo.write(f"{PACKAGE}/kernels.py", bodies[how]).read_text()
    repo.write(
        f"{PACKAGE}/kernels.py", f"import sys\nimport threading\n\nimport torch\n\nimport {PACKAGE}.other\n{text}"
    )
    if how == "a backward pass":
        test = TEST.replace("gradients=False,\n", "").replace('clock="wall"', 'clock="wall", direction="both"')
        repo.write(f"tests/{MODULE}.py", test.replace(f"from {PACKAGE} import", f"from {PACKAGE}.kernels import"))
    if how == "a step that is built":
        test = using(f"{PACKAGE}.kernels").replace("optimized=fast", "optimized=stateful(fast)")
        test = test.replace("reference=slow", "reference=stateful(slow)").replace(
            "import Pair", "import Pair, stateful"
        )
        test = test.replace('inputs={"x": tensor("n")}', 'inputs={"x": tensor("n")}, step_inputs={"y": tensor("n")}')
        repo.write(f"tests/{MODULE}.py", test)
    assert refused(repo) == f"the accepted revision runs {PACKAGE}/other.py of the current tree"


def test_profilers_are_put_back() -> None:
    def own(frame: Any, event: str, argument: Any) -> None:
        pass

    before, of_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(own)
    threading.setprofile(own)
    try:
        with provenance.watched(provenance.Executed()):
            assert sys.getprofile() is not own
            assert threading.getprofile() is not own
        assert sys.getprofile() is own
        assert threading.getprofile() is own
    finally:
        threading.setprofile(of_threads)
        sys.setprofile(before)


def test_profiler_in_c_is_put_back() -> None:
    """Before Python 3.12, `sys.getprofile` returns cProfile's profiler, which `sys.setprofile` cannot call."""
    before, profiler = sys.getprofile(), cProfile.Profile()
    profiler.enable()
    try:
        with provenance.watched(provenance.Executed()), provenance._unwatched():
            pass
        math.sqrt(2.0)
    finally:
        profiler.disable()
        set_profile(before)
    assert any("sqrt" in str(entry.code) for entry in profiler.getstats())


# --- what is compiled -----------------------------------------------------------------------------------------------


def test_what_is_compiled_in_the_watched_call_runs_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds even if nothing has imported the compiler yet."""
    entered: list[str] = []

    @contextlib.contextmanager
    def stance(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        entered.append(f"{name} ends")

    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(torch.compiler, "set_stance", stance)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    plain = torch.compile
    executed = provenance.Executed()
    with provenance._eager(), provenance.watched(executed):
        assert entered == []
        doubled, tripled = torch.compile(lambda x: x * 2), torch.compile(lambda x: x * 3, dynamic=True)
        assert (doubled(1), tripled(1)) == (2, 3)
        assert entered == ["force_eager"]
    assert entered == ["force_eager", "force_eager ends"]
    assert torch.compile is plain
    assert __file__ in executed.files
