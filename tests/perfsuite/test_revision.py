"""The optimized side of another revision, imported beside the current one."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scratch import SMALL, TWO_LINES, Failure, Project, lines_with, real_workers, times

from perfsuite import gate, revision
from perfsuite.errors import RevisionError
from perfsuite.pair import Pair, Side
from perfsuite.records import Measurement, Status

pytest_plugins = ["pytester"]

FAST = "FACTOR = 3\n\n\ndef fast(x):\n    return x * FACTOR\n"
MODULE = """
from {package} import fast
from perfsuite import Pair, Workload, tensor


def slow(x):
    return x + x + x


scale = Pair(reference=slow, optimized=fast, inputs={{"x": tensor("n")}}, workloads=[Workload("small", n=8)])
"""
LAYOUTS = {
    # layout: (folder of the package, folders on sys.path)
    "beside": ("", ["", "tests"]),
    "src": ("src/", ["src", "tests"]),
    "below": ("project/", ["project", "project/tests"]),
}


class Repository:
    """A package and a test module in git; `load` gives the side of a revision as a worker would."""

    def __init__(self, project: Project, layout: str) -> None:
        self.project, self.path = project, project.path
        self.package, places = LAYOUTS[layout]
        self.root = self.path / "project" if layout == "below" else self.path
        self.tests = "project/tests/" if layout == "below" else "tests/"
        project.write(f"{self.package}impl_of_{layout}/__init__.py", "from .kernels import fast")
        self.write_kernels(FAST)
        (self.path / self.tests).mkdir(exist_ok=True)
        self.module_file.write_text(MODULE.format(package=f"impl_of_{layout}"))
        sys.path[:0] = [str(self.path / place) for place in places]

    @property
    def module_file(self) -> Path:
        return self.path / self.tests / "test_scale_of_revision.py"

    def write_kernels(self, text: str) -> None:
        (folder,) = (self.path / self.package).glob("impl_of_*")
        (folder / "kernels.py").write_text(text)

    def current(self) -> Pair:
        importlib.invalidate_caches()
        pair: Pair = importlib.import_module("test_scale_of_revision").scale
        pair.name = "scale"
        return pair

    def load(self, rev: str) -> Side:
        tree = revision.extract(rev, self.root, self.path / ".perfsuite/revisions")
        return revision.load_side(self.current(), "test_scale_of_revision", tree, self.root)


@pytest.fixture
def imports() -> Iterator[None]:
    """Puts sys.path and sys.modules back; torch's own stay."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("impl_of_", "test_scale_of_revision", "generated_here")):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def repository(project: Project, imports: None) -> Callable[[str], Repository]:
    return lambda layout: Repository(project, layout)


def of_one(call: object) -> float:
    assert callable(call)
    return float(call(torch.ones(1)))


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_old_side_beside_the_current_one(repository: Callable[[str], Repository], layout: str) -> None:
    repo = repository(layout)
    first = repo.project.commit()
    repo.write_kernels(FAST.replace("3", "5"))
    second = repo.project.commit()
    repo.write_kernels(FAST.replace("3", "7"))
    pair = repo.current()
    path, modules = list(sys.path), dict(sys.modules)

    old, newer = repo.load(first), repo.load(second)

    assert (of_one(old.call), of_one(newer.call), of_one(pair.optimized)) == (3, 5, 7)
    assert sys.path == path
    assert {n: m for n, m in sys.modules.items() if n in modules} == modules
    assert not {n for n in sys.modules if n.startswith("impl_of_")} - set(modules)
    assert of_one(importlib.import_module("test_scale_of_revision").scale.optimized) == 7


def test_the_repository_is_not_changed(repository: Callable[[str], Repository]) -> None:
    repo = repository("beside")
    first = repo.project.commit()
    repo.write_kernels(FAST.replace("3", "5"))
    before = (
        repo.project.git("status", "--porcelain"),
        repo.project.git("stash", "list"),
        repo.project.git("branch", "-a"),
    )
    repo.load(first)
    after = (
        repo.project.git("status", "--porcelain"),
        repo.project.git("stash", "list"),
        repo.project.git("branch", "-a"),
    )
    assert after == before
    assert repo.project.git("worktree", "list").count("\n") == 0


def test_the_harness_itself_is_not_imported_twice(repository: Callable[[str], Repository]) -> None:
    repo = repository("beside")
    side = repo.load(repo.project.commit())
    assert isinstance(side, Side)
    assert sys.modules["perfsuite.pair"].Side is Side


def test_a_revision_without_the_pair(repository: Callable[[str], Repository]) -> None:
    repo = repository("beside")
    text = repo.module_file.read_text()
    repo.module_file.write_text(text.replace("scale =", "other ="))
    first = repo.project.commit()
    repo.module_file.write_text(text)
    with pytest.raises(RevisionError, match=r"test_scale_of_revision::scale cannot be loaded.*AttributeError") as error:
        repo.load(first)
    assert "\n" not in str(error.value)


def test_something_else_of_the_name(repository: Callable[[str], Repository]) -> None:
    repo = repository("beside")
    text = repo.module_file.read_text()
    repo.module_file.write_text("scale = 3")
    first = repo.project.commit()
    repo.module_file.write_text(text)
    with pytest.raises(RevisionError, match="is no pair in the accepted revision"):
        repo.load(first)


def test_a_revision_that_cannot_be_imported(repository: Callable[[str], Repository]) -> None:
    repo = repository("beside")
    repo.write_kernels("raise RuntimeError('built for another torch')")
    first = repo.project.commit()
    repo.write_kernels(FAST)
    modules = dict(sys.modules)
    with pytest.raises(RevisionError, match="RuntimeError: built for another torch"):
        repo.load(first)
    assert of_one(repo.current().optimized) == 3
    assert {n: m for n, m in sys.modules.items() if n in modules} == modules


def test_a_module_of_the_current_tree_is_a_leak(repository: Callable[[str], Repository]) -> None:
    """A generated module, in no revision: the old side would run today's."""
    repo = repository("beside")
    repo.project.write("built/generated_here.py", "FACTOR = 3")
    repo.project.commit("an empty one")  # writes .gitignore
    repo.project.replace(".gitignore", "baselines/", "baselines/\nbuilt/")
    sys.path.insert(0, str(repo.path / "built"))
    repo.write_kernels("from generated_here import FACTOR\n\n\ndef fast(x):\n    return x * FACTOR\n")
    repo.project.git("rm", "-r", "--cached", "built")
    first = repo.project.commit()
    modules = dict(sys.modules)
    with pytest.raises(RevisionError, match="imports generated_here from the current tree"):
        repo.load(first)
    assert "generated_here" in sys.modules  # the current side's
    assert {n: m for n, m in sys.modules.items() if n in modules} == modules


@pytest.mark.parametrize(
    "line", ["from impl_of_beside import other", "import impl_of_beside.other", "from . import other"]
)
def test_a_late_import_is_refused(repository: Callable[[str], Repository], line: str) -> None:
    repo = repository("beside")
    repo.project.write("impl_of_beside/other.py", "FACTOR = 3")
    repo.write_kernels(f"def fast(x):\n    {line}\n    return x * 3\n")
    first = repo.project.commit()
    with pytest.raises(RevisionError, match=r"imports inside a function \(kernels.py:2\)"):
        repo.load(first)


def test_a_late_import_of_a_library_is_none(repository: Callable[[str], Repository]) -> None:
    repo = repository("beside")
    repo.write_kernels("def fast(x):\n    import math\n    return x * math.floor(3.5)\n")
    assert of_one(repo.load(repo.project.commit()).call) == 3


def test_a_module_loaded_after_the_fact_is_the_current_one(repository: Callable[[str], Repository]) -> None:
    repo = repository("beside")
    repo.project.write("impl_of_beside/other.py", "FACTOR = 1")
    first = repo.project.commit()
    repo.project.write("impl_of_beside/other.py", "FACTOR = 2")
    repo.load(first)
    other: ModuleType = importlib.import_module("impl_of_beside.other")
    assert other.FACTOR == 2


# --- git ------------------------------------------------------------------------------------------------------------


def test_an_unknown_revision(project: Project) -> None:
    project.commit()
    with pytest.raises(RevisionError, match="revision 1234567 is not in this repository; see git log"):
        revision.resolve("1234567", project.path)


def test_a_shallow_clone(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    first = project.commit()
    project.write("later.txt", "later")
    project.commit()
    clone = tmp_path_factory.mktemp("clone")
    command = ["git", "clone", "--quiet", "--depth", "1", f"file://{project.path}", str(clone)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(RevisionError, match="the clone is shallow: git fetch --unshallow"):
        revision.resolve(first, clone)


def test_outside_git(project: Project) -> None:
    assert revision.head(project.path) == (None, False)
    with pytest.raises(RevisionError, match="git rev-parse"):
        revision.top_level(project.path)


def test_no_git(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project.path))
    assert revision.head(project.path) == (None, False)
    with pytest.raises(RevisionError, match="git is not installed"):
        revision.resolve("HEAD", project.path)


def test_head(project: Project) -> None:
    project.write("code.py", "1")
    first = project.commit()
    assert revision.head(project.path) == (first, False)
    project.write("untracked.py", "1")
    assert revision.head(project.path) == (first, False)
    project.write("code.py", "2")
    assert revision.head(project.path) == (first, True)


def test_a_tree_that_cannot_be_unpacked(project: Project) -> None:
    first = project.commit()
    place = project.write("taken", "a file in the place of the folder")
    with pytest.raises(RevisionError, match=f"revision {first} cannot be unpacked into"):
        revision.extract(first, project.path, place)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_what_is_left_out_of_archives_is_unpacked(project: Project) -> None:
    """A release's archive has no tests and its version filled in; what was accepted has."""
    project.write(".gitattributes", "tests export-ignore\n/*.md export-ignore\nversion.py export-subst")
    project.write("tests/test_scale.py", TWO_LINES)
    project.write("notes.md", "notes")
    project.write("version.py", "VERSION = '$Format:%H$'")
    (project.path / "run.sh").write_text("#!/bin/sh\n")
    (project.path / "run.sh").chmod(0o755)
    (project.path / "link.py").symlink_to("version.py")
    (project.path / "data.bin").write_bytes(b"\r\n\x00\xff\n")
    first = project.commit()
    wanted = {k: v for k, v in files_below(project.path).items() if not k.startswith(".git/")}
    project.git("archive", "--output=.git/archive.tar", first)
    archive = (project.path / ".git/archive.tar").read_bytes()
    assert b"test_scale.py" not in archive
    assert b"$Format" not in archive

    tree = revision.extract(first, project.path, project.path / ".perfsuite/revisions")

    assert files_below(tree) == wanted
    assert (tree / "run.sh").stat().st_mode & 0o100
    assert (tree / "link.py").is_symlink()
    assert [p.name for p in tree.parent.iterdir()] == [tree.name]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"core.splitIndex": "true", "core.untrackedCache": "true"},
        {"core.sparseCheckout": "true"},
        {"core.hooksPath": "hooks"},
    ],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_unpacking_leaves_no_trace_in_the_repository(project: Project, settings: dict[str, str]) -> None:
    """Neither in .git nor in the work tree, whatever is staged, and with all files however the clone is set up."""
    for folder in ("", "src/", "tests/"):
        project.write(f"{folder}code.py", "1")
    hook = project.write("hooks/post-index-change", "#!/bin/sh\ntouch called-by-hook")
    hook.chmod(0o755)
    first = project.commit()
    wanted = {k: v for k, v in files_below(project.path).items() if not k.startswith(".git/")}
    project.write("code.py", "2")
    project.write("staged.py", "3")
    project.write(".gitattributes", "* text eol=crlf")
    project.git("add", "code.py", "staged.py")
    for name, value in settings.items():
        project.git("config", name, value)
    if "core.sparseCheckout" in settings:
        (project.path / ".git/info").mkdir(exist_ok=True)
        (project.path / ".git/info/sparse-checkout").write_text("/src/\n")
    (project.path / "tests/code.py").unlink()
    (project.path / "called-by-hook").unlink(missing_ok=True)
    before = files_below(project.path)

    tree = revision.extract(first, project.path, project.path / ".perfsuite/revisions")

    assert files_below(tree) == wanted
    shutil.rmtree(project.path / ".perfsuite")
    assert files_below(project.path) == before


def test_trees_are_gone_afterwards_and_refusals_are_told(project: Project) -> None:
    project.write("code.py", "1")
    first = project.commit()
    project.write("code.py", "2")
    second = project.commit()
    folder = project.path / ".perfsuite/revisions"
    with revision.extracted([first, second, "1234567", first], project.path, folder) as (trees, refused):
        assert [(rev, (tree / "code.py").read_text()) for rev, tree in trees.items()] == [
            (first, "1\n"),
            (second, "2\n"),
        ]
        assert list(refused) == ["1234567"]
        assert "is not in this repository" in str(refused["1234567"])
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), revision.extracted([first], project.path, folder):
        raise KeyboardInterrupt
    assert not folder.exists()
    with revision.extracted([], project.path, folder) as (trees, refused):
        assert not trees
        assert not refused
        assert not folder.exists()


def test_a_linked_work_tree(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    project.write("code.py", "1")
    first = project.commit()
    other = tmp_path_factory.mktemp("linked") / "tree"
    project.git("worktree", "add", "--detach", str(other), first)
    before = files_below(project.path)
    tree = revision.extract(first, other, other / ".perfsuite")
    assert (tree / "code.py").read_text() == "1\n"
    assert files_below(project.path) == before


# --- the gate's second look -----------------------------------------------------------------------------------------


@pytest.fixture
def accepted(project: Project) -> Project:
    """A project in git, accepted at a clean revision; what it measures from here on is 5% slower."""
    project.write("test_scale.py", TWO_LINES)
    project.commit()
    project.accept()
    project.measured(times(slower=0.05))
    return project


def test_the_second_look_has_the_accepted_tree(accepted: Project) -> None:
    accepted.replace("test_scale.py", "3 * x", "3.0 * x")
    seen: list[str] = []
    slow = times(slower=0.05)

    def outcome(id: str, process: int, second: bool) -> object:
        if second:
            assert accepted.workers is not None
            tree, rev = accepted.workers.calls[-1][1][id]
            assert rev == accepted.git("rev-parse", "HEAD")
            seen.append((Path(tree) / "test_scale.py").read_text())
        return slow(id, process, second)

    accepted.measured(outcome)
    result = accepted.gate()
    assert result.ret == 1
    head = accepted.git("rev-parse", "HEAD")
    assert lines_with(result.stdout.str(), "REGRESSED", SMALL, f"5.0% slower than the accepted revision {head[:7]}")
    assert len(seen) == gate.STAGES[0].processes  # clear by then
    assert all("return 3 * x" in text for text in seen)
    assert not (accepted.path / ".perfsuite/revisions").exists()


LARGE = SMALL.replace("small", "large")


@pytest.fixture
def accepted_two(project: Project) -> Project:
    both = 'Workload("small", n=64, clock="wall"), Workload("large", n=64, clock="wall")'
    project.write("test_scale.py", TWO_LINES.replace('Workload("small", n=64, clock="wall")', both))
    project.commit()
    project.accept()
    return project


def test_what_is_clear_halfway_is_measured_no_more(accepted_two: Project) -> None:
    """Both are slower, one so noisily that nothing is shown: it alone goes through all stages."""
    slow, noisy = times(slower=0.05), times(slower=0.02, noise=100.0)
    workers = accepted_two.measured(lambda id, process, second: (noisy if id == LARGE else slow)(id, process, second))
    output = accepted_two.gate().stdout.str()
    assert lines_with(output, "REGRESSED", SMALL)
    assert lines_with(output, "NOISY", LARGE)
    second = [ids for ids, trees in workers.calls if trees]
    first, last = gate.STAGES[0].processes, gate.STAGES[-1].processes
    assert second == [(LARGE, SMALL)] * first + [(LARGE,)] * (last - first)


def test_a_workload_that_fails_after_halfway_is_red(accepted_two: Project) -> None:
    noisy = times(slower=0.05, noise=100.0)
    crash = Failure(status=Status.UNMEASURED, message="the optimized side crashed with SIGSEGV")
    last = gate.FIRST_PROCESSES + gate.STAGES[0].processes
    accepted_two.measured(lambda id, process, second: crash if process > last else noisy(id, process, second))
    result = accepted_two.gate()
    assert result.ret == 1
    assert lines_with(result.stdout.str(), "UNMEASURED", LARGE, "the optimized side crashed with SIGSEGV")


def _without_git(project: Project) -> None:
    shutil.rmtree(project.path / ".git")


def _another_history(project: Project) -> None:
    shutil.rmtree(project.path / ".git")
    project.commit("another beginning")
    project.git("commit", "--amend", "-m", "and another", "--allow-empty")


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_without_git, "not a git repository"), (_another_history, "is not in this repository")],
)
def test_an_accepted_revision_that_is_gone(accepted: Project, change: Callable[[Project], None], reason: str) -> None:
    change(accepted)
    result = accepted.gate()
    assert result.ret == 1
    assert lines_with(result.stdout.str(), "REGRESSED", SMALL, "compared with the stored baseline", reason)


def test_an_accepted_revision_that_does_not_load(accepted: Project) -> None:
    from perfsuite.control import UNLOADED
    from perfsuite.records import Status
    from perfsuite.workers import Failure

    unloaded = Failure(status=Status.UNMEASURED, message=f"{UNLOADED}it imports inside a function")
    slow = times(slower=0.05)
    accepted.measured(lambda id, process, second: unloaded if second else slow(id, process, second))
    result = accepted.gate()
    assert result.ret == 1
    assert lines_with(result.stdout.str(), "REGRESSED", "the stored baseline", "it imports inside a function")


def test_what_was_accepted_with_changes_is_compared_with_the_stored_figures(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.commit()
    project.replace("test_scale.py", "3 * x", "3.0 * x")
    project.accept(None, "--allow-dirty")
    project.measured(times(slower=0.05))
    assert lines_with(project.gate().stdout.str(), "REGRESSED", "accepted with uncommitted changes")


# --- a real process -------------------------------------------------------------------------------------------------


def test_a_measuring_process_times_both_revisions(project: Project) -> None:
    text = TWO_LINES.replace("return 3 * x", "CALLED.touch()\n        return 3 * x")
    text = text.replace("def slow", 'CALLED = Path(__file__).with_suffix(".called")\n\n\n    def slow')
    project.write("test_scale.py", "    from pathlib import Path\n" + text.lstrip("\n"))
    first = project.commit()
    tree = revision.extract(first, project.path, project.path / ".perfsuite/revisions")
    project.replace("test_scale.py", "CALLED.touch()", "CALLED.with_suffix('.current').touch()")
    ((id, measured),) = real_workers(project.path).run([SMALL], accepted={SMALL: (str(tree), first)})
    assert id == SMALL
    assert isinstance(measured, Measurement), measured
    assert set(measured.log_ratios) == {"reference", "accepted"}
    assert len(measured.sides["accepted"].blocks_s) == len(measured.sides["optimized"].blocks_s)
    assert (tree / "test_scale.called").exists()
    assert (project.path / "test_scale.current").exists()
    assert not (project.path / "test_scale.called").exists()
