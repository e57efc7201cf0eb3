"""Other revisions: git's answers about a tree, their files and pairs, and the gate's verdicts on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repositories import KERNELS, MODULE, PACKAGE, TEST, Repository
from scale import FULLY
from scratch import (
    SMALL,
    TWO_LINES,
    Failure,
    FakeWorkers,
    Project,
    fails,
    git,
    lines_with,
    real_workers,
    run_tasks,
    times,
)

from perfsuite.errors import RevisionError
from perfsuite.records import Measurement, Status, WorkloadProof
from perfsuite.revisions import revision, second_import
from perfsuite.revisions.revision import State, Tree
from perfsuite.session.tasks import PROVE, Task

pytest_plugins = ["pytester"]


def files_of(tree: Tree) -> Path:
    return Path(tree.folder, second_import.TREE)


@pytest.mark.parametrize("form", ["sha1", "sha256"])
def test_blob_hash_of_a_file_is_computed_without_git(tmp_path: Path, form: str) -> None:
    git(tmp_path, "init", f"--object-format={form}")
    files = {"a.py": b"x = 1\n", "b c/\u00e9.py": b"", "d.bin": bytes(range(256))}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "files")
    found = revision.blobs("HEAD", tmp_path)
    assert found.keys() == files.keys()
    for name, hash in found.items():
        assert revision.is_blob(files[name], hash)
        assert not revision.is_blob(files[name] + b"x", hash)
    assert revision.blobs("no-such-revision", tmp_path) == {}


# --- a pair of another revision -------------------------------------------------------------------------------------


def test_loading_a_pair_does_not_change_the_repository(repo: Repository) -> None:
    def shown() -> list[str]:
        return [repo.git(*c) for c in (["status", "--porcelain"], ["stash", "list"], ["branch", "-a"])]

    first = repo.commit()
    repo.write(f"{PACKAGE}/kernels.py", KERNELS.replace("3", "5"))
    before = shown()
    repo.load(first)
    assert shown() == before
    assert repo.git("worktree", "list").count("\n") == 0


TESTS = f"tests/{MODULE}.py"
UNLOADABLE: dict[str, tuple[str, str, str]] = {
    # id: (file, its content at the accepted revision, the reason)
    "no pair": (TESTS, TEST.replace("scale =", "other ="), "scale is no pair in the accepted revision"),
    "no pair of the name": (TESTS, "scale = 3", "scale is no pair in the accepted revision"),
    "no test module": ("other.txt", "", f"there is no module {MODULE} in the accepted revision"),
    "raises": (TESTS, "raise RuntimeError('built for\\nanother torch')", "RuntimeError: built for$"),
    "lacks a library": (TESTS, "import no_such_library", "No module named 'no_such_library'"),
    "lacks a name": (TESTS, f"from {PACKAGE} import gone", f"cannot import name 'gone' from '{PACKAGE}'"),
    "skips itself": (TESTS, "import pytest\npytest.importorskip('no_such_library')", "Skipped: could not import"),
    "exits": (TESTS, "raise SystemExit('enough')", "SystemExit: enough"),
    "is no Python": (TESTS, "print 'hello'", "SyntaxError"),
}


@pytest.mark.parametrize("what", UNLOADABLE)
def test_a_pair_that_cannot_be_loaded_raises_a_one_line_error(repo: Repository, what: str) -> None:
    file, before, reason = UNLOADABLE[what]
    now = (repo.path / TESTS).read_text()
    if file != TESTS:
        (repo.path / TESTS).unlink()
    repo.write(file, before)
    first = repo.commit()
    (repo.path / TESTS).write_text(now)
    with pytest.raises(RevisionError, match=reason) as caught:
        repo.load(first)
    assert "\n" not in str(caught.value)
    assert second_import.PREFIX not in str(caught.value)
    assert repo.load(repo.commit()).name == "scale"  # another revision still loads


# --- what git says --------------------------------------------------------------------------------------------------


def test_an_unknown_revision_is_an_error(project: Project) -> None:
    project.commit()
    with pytest.raises(RevisionError, match="revision 1234567 is not in this repository; see git log"):
        revision.resolve("1234567", project.path)


def test_a_revision_missing_from_a_shallow_clone_is_an_error(
    project: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = project.commit()
    project.write("later.txt", "later")
    project.commit()
    clone = tmp_path_factory.mktemp("clone")
    command = ["git", "clone", "--quiet", "--depth", "1", f"file://{project.path}", str(clone)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(RevisionError, match="the clone is shallow: git fetch --unshallow"):
        revision.resolve(first, clone)


def test_a_folder_outside_git_has_no_state_and_no_top_level(project: Project) -> None:
    assert revision.state(project.path) == State(problem="it is not in a git repository")
    with pytest.raises(RevisionError, match="git rev-parse: not a git repository"):
        revision.top_level(project.path)
    assert revision.top_or(project.path) == project.path.resolve()


def test_state_of_a_repository_without_a_commit_is_a_problem(project: Project) -> None:
    project.git("init")
    assert revision.state(project.path) == State(problem="its git repository has no commit yet")


def test_state_has_the_revision_and_whether_the_tree_is_dirty(project: Project) -> None:
    project.write("code.py", "1")
    first = project.commit()
    assert revision.state(project.path) == State(revision=first)
    project.write("untracked.py", "1")
    assert revision.state(project.path) == State(revision=first)
    project.write("code.py", "2")
    assert revision.state(project.path) == State(revision=first, dirty=True)
    project.git("add", "code.py")
    assert revision.state(project.path) == State(revision=first, dirty=True)


def test_changes_in_an_ignored_folder_do_not_make_the_tree_dirty(project: Project) -> None:
    project.write("figures/cpu.json", "1")
    project.write("code.py", "1")
    first = project.commit()
    project.write("figures/cpu.json", "2")
    figures = project.path / "figures"
    assert revision.state(project.path).dirty
    assert revision.state(project.path, ignored=figures) == State(revision=first)
    assert revision.state(project.path, ignored=project.path).dirty
    assert revision.state(project.path, ignored=project.path.parent / "elsewhere").dirty
    project.write("code.py", "2")
    assert revision.state(project.path, ignored=figures).dirty
    assert revision.state(project.path / "figures", ignored=figures).dirty


def _corrupt_index(project: Project, patch: pytest.MonkeyPatch) -> None:
    (project.path / ".git/index").write_bytes(b"garbage")


def _lost_commit(project: Project, patch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(project.path / ".git/objects")
    (project.path / ".git/objects").mkdir()


def _of_another_user(project: Project, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")


def _no_git(project: Project, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PATH", str(project.path))


UNREADABLE: dict[str, tuple[Callable[[Project, pytest.MonkeyPatch], None], list[str]]] = {
    "a corrupt index": (_corrupt_index, ["index file smaller than expected"]),
    "a lost commit": (_lost_commit, ["git "]),
    "a repository of another user": (
        _of_another_user,
        ["dubious ownership", "git config --global --add safe.directory"],
    ),
    "no git": (_no_git, ["git is not installed"]),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_repository_that_git_cannot_read_is_reported(
    project: Project, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """`accept` is refused, dirty or not. The gate needs only the accepted files, or reports that they are missing."""
    breaks, words = UNREADABLE[what]
    project.write("test_scale.py", TWO_LINES)
    path = project.accept()
    before = path.read_bytes()
    fake = project.measured(times(slower=0.05))
    with monkeypatch.context() as patch:
        breaks(project, patch)
        with pytest.raises(RevisionError) as caught:
            revision.state(project.path)
        assert "\n" not in str(caught.value)
        assert lines_with(str(caught.value), "git cannot read the repository", *words, "repair it"), caught.value
        for arguments in ([], ["--allow-dirty"]):
            done = project.cli("accept", "--reason", "again", *arguments)
            assert done.exit_code == 4, done.output
            assert lines_with(done.output, "git cannot read the repository", *words), done.output
        assert not fake.calls
        assert path.read_bytes() == before
        result = project.gate()
    assert result.ret == 1
    compared = ["slower than the accepted"] if what == "a corrupt index" else ["compared with stored figures", "git"]
    assert lines_with(result.stdout.str(), "REGRESSED", SMALL, *compared)


# --- the files of a revision ----------------------------------------------------------------------------------------


def test_a_revision_that_cannot_be_unpacked_is_an_error(project: Project) -> None:
    first = project.commit()
    place = project.write("taken", "a file in the place of the folder")
    with pytest.raises(RevisionError, match=f"revision {first} cannot be unpacked into"):
        revision.extract(first, project.path, place)


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_extract_includes_files_that_git_archive_omits(project: Project) -> None:
    """`git archive` omits the tests and fills in the version; `extract` keeps these files as committed."""
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

    files = files_of(tree)
    assert files_below(files) == wanted
    assert (files / "run.sh").stat().st_mode & 0o100
    assert (files / "link.py").is_symlink()
    assert sorted(p.name for p in files.parent.iterdir()) == sorted([second_import.TREE, tree.package])
    assert [p.name for p in files.parent.parent.iterdir()] == [files.parent.name]


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
    """Unpacking changes neither .git nor the work tree, whatever is staged; every kind of clone gives all files."""
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

    assert files_below(files_of(tree)) == wanted
    shutil.rmtree(project.path / ".perfsuite")
    assert files_below(project.path) == before


def test_extracted_trees_are_removed_and_unknown_revisions_are_reported(project: Project) -> None:
    project.write("code.py", "1")
    first = project.commit()
    project.write("code.py", "2")
    second = project.commit()
    folder = project.path / ".perfsuite/revisions"
    with revision.extracted([first, second, "1234567", first], project.path, folder) as (trees, refused):
        assert [(rev, (files_of(tree) / "code.py").read_text()) for rev, tree in trees.items()] == [
            (first, "1\n"),
            (second, "2\n"),
        ]
        assert list(refused) == ["1234567"]
        assert "is not in this repository" in str(refused["1234567"])
        assert (project.path / ".perfsuite/.gitignore").read_text() == "*\n"
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), revision.extracted([first], project.path, folder):
        raise KeyboardInterrupt
    assert not folder.exists()
    with revision.extracted([], project.path, folder) as (trees, refused):
        assert not trees
        assert not refused
        assert not folder.exists()


def test_trees_of_another_run_are_not_removed(project: Project) -> None:
    """With two runs on two devices in one folder, the first to end must not remove the other's trees."""
    project.write("code.py", "1")
    first = project.commit()
    folder = project.path / ".perfsuite/revisions"
    with revision.extracted([first], project.path, folder) as (trees, _):
        with revision.extracted([first], project.path, folder) as (others, _):
            assert trees[first].folder != others[first].folder
        assert (files_of(trees[first]) / "code.py").read_text() == "1\n"
    assert not folder.exists()


def test_trees_that_a_killed_run_left_are_removed(project: Project) -> None:
    first = project.commit()
    folder = project.path / ".perfsuite/revisions"
    (folder / "run-before/tree").mkdir(parents=True)
    os.utime(folder / "run-before", (0, 0))
    with revision.extracted([first], project.path, folder):
        pass
    assert not folder.exists()


def test_extract_works_in_a_linked_work_tree(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    project.write("code.py", "1")
    first = project.commit()
    other = tmp_path_factory.mktemp("linked") / "tree"
    project.git("worktree", "add", "--detach", str(other), first)
    before = files_below(project.path)
    tree = revision.extract(first, other, other / ".perfsuite")
    assert (files_of(tree) / "code.py").read_text() == "1\n"
    assert files_below(project.path) == before


# --- what the gate makes of it --------------------------------------------------------------------------------------

LARGE = SMALL.replace("small", "large")


@pytest.fixture
def accepted(project: Project) -> Project:
    """Accept two workloads at a clean revision; measurements from now on are 5% slower."""
    both = 'Workload("small", n=64, clock="wall"), Workload("large", n=64, clock="wall")'
    project.write("test_scale.py", TWO_LINES.replace('Workload("small", n=64, clock="wall")', both))
    project.accept_again("revision")
    project.measured(times(slower=0.05))
    return project


def fake_of(project: Project) -> FakeWorkers:
    assert project.workers is not None
    return project.workers


def test_the_accepted_revision_is_timed_from_the_first_process_on(accepted: Project) -> None:
    accepted.replace("test_scale.py", "3 * x", "3.0 * x")
    head = accepted.git("rev-parse", "HEAD")
    seen: set[str] = set()
    slow = times(slower=0.05)

    def outcome(id: str, process: int, second: bool) -> object:
        assert second
        (folder,) = (accepted.path / ".perfsuite/revisions").glob(f"run-*/{head[:12]}-*")
        seen.add((folder / second_import.TREE / "test_scale.py").read_text())
        return slow(id, process, second)

    fake = accepted.measured(outcome)
    result = accepted.gate()
    assert result.ret == 1
    assert lines_with(result.stdout.str(), "REGRESSED", SMALL, f"5.0% slower than the accepted revision {head[:7]}")
    assert [trees for _, trees in fake.calls] == [{LARGE: head, SMALL: head}] * 4
    assert len(seen) == 1
    assert "return 3 * x" in seen.pop()
    assert not (accepted.path / ".perfsuite/revisions").exists()


def test_a_decided_workload_is_not_measured_again(accepted: Project) -> None:
    slow, noisy = times(slower=0.05), times(slower=0.02, noise=100.0)
    fake = accepted.measured(lambda id, process, second: (noisy if id == LARGE else slow)(id, process, second))
    output = accepted.gate().stdout.str()
    assert lines_with(output, "REGRESSED", SMALL)
    assert lines_with(output, "NOISY", LARGE)
    assert [SMALL in ids for ids, _ in fake.calls] == [True] * 4 + [False] * (len(fake.calls) - 4)
    assert len(fake.calls) > 4


def test_a_workload_that_fails_in_a_later_process_is_red(accepted: Project) -> None:
    noisy = times(slower=0.05, noise=100.0)
    crash = Failure(status=Status.UNMEASURED, message="the optimized side crashed with SIGSEGV")
    accepted.measured(lambda id, process, second: crash if process > 2 else noisy(id, process, second))
    result = accepted.gate()
    assert result.ret == 1
    assert lines_with(result.stdout.str(), "UNMEASURED", LARGE, "the optimized side crashed with SIGSEGV")


def test_stored_figures_are_used_if_the_accepted_side_cannot_be_compared(accepted: Project) -> None:
    """One of two workloads is proven again and timed without another revision, against stored figures."""
    fake = fake_of(accepted)
    fake.unloaded[LARGE] = "the current side runs test_scale.py of the accepted tree"
    result = accepted.gate()
    assert result.ret == 1
    output = result.stdout.str()
    assert lines_with(output, "REGRESSED", LARGE, "compared with stored figures: the current side runs test_scale.py")
    assert lines_with(output, "REGRESSED", SMALL, "slower than the accepted revision")
    proofs = [(t.id, t.accepted is not None) for t in fake.tasks if t.kind == PROVE]
    assert proofs == [(SMALL, True), (LARGE, True), (LARGE, False)]
    head = accepted.git("rev-parse", "HEAD")
    # The workload that is timed alone comes first in a process.
    assert [call for call in fake.calls if len(call[0]) > 1] == [((LARGE, SMALL), {SMALL: head})] * 4


def test_compare_is_unmeasured_if_the_other_side_cannot_be_compared(accepted: Project) -> None:
    fake = fake_of(accepted)
    fake.unloaded = dict.fromkeys([SMALL, LARGE], "scale is installed as a copy in /lib: pip install -e .")
    done = accepted.cli("compare", "HEAD")
    assert done.exit_code == 10
    assert lines_with(done.output, "UNMEASURED", SMALL, "installed as a copy")
    assert not fake.calls
    assert [t.accepted is not None for t in fake.tasks] == [True, True]


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
def test_stored_figures_are_used_if_the_accepted_revision_is_missing(
    accepted: Project, change: Callable[[Project], None], reason: str
) -> None:
    change(accepted)
    result = accepted.gate()
    assert result.ret == 1
    assert lines_with(result.stdout.str(), "REGRESSED", SMALL, "compared with stored figures", reason)


def test_accept_in_a_repository_without_a_commit_needs_allow_dirty(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.git("init")
    fake = project.measured(times())
    done = project.cli("accept", "--reason", "the first")
    assert done.exit_code == 4
    assert lines_with(done.output, "has no commit yet", "--allow-dirty")
    assert not fake.calls
    assert project.cli("accept", "--reason", "the first", "--allow-dirty").exit_code == 0
    project.measured(times(slower=0.05))
    assert lines_with(project.gate().stdout.str(), "REGRESSED", "compared with stored figures: it was accepted outside")


def test_stored_figures_are_used_if_the_accepted_tree_was_dirty(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.commit()
    project.replace("test_scale.py", "3 * x", "3.0 * x")
    project.accept(None, "--allow-dirty")
    project.measured(times(slower=0.05))
    output = project.gate().stdout.str()
    assert lines_with(output, "REGRESSED", "compared with stored figures: it was accepted with uncommitted changes")


def test_accept_fails_if_the_tree_changes_while_it_is_measured(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.commit()
    quiet = times()

    def outcome(id: str, process: int, second: bool) -> object:
        if process == 2:
            project.write("test_scale.py", TWO_LINES.replace("3 * x", "3.0 * x"))
        return quiet(id, process, second)

    project.measured(outcome)
    done = project.cli("accept", "--reason", "the first")
    assert done.exit_code == 4
    assert lines_with(done.output, "the work tree has uncommitted changes")
    assert not (project.path / "baselines").exists()
    project.git("checkout", ".")
    project.measured(lambda id, process, second: (project.commit("another"), quiet(id, process, second))[1])
    done = project.cli("accept", "--reason", "the first")
    assert done.exit_code == 4
    assert lines_with(done.output, "the work tree changed while it was measured", "accept again")
    assert not (project.path / "baselines").exists()


def test_an_accepted_side_that_lacks_memory_is_proven_and_timed_alone(accepted: Project) -> None:
    crowded = Failure(status=Status.UNMEASURED, message="the accepted side runs out of device memory")
    slow, tried = times(slower=0.05), []

    def outcome(id: str, process: int, second: bool) -> object:
        tried.append(id)
        return crowded if tried.count(id) == 1 else slow(id, process, second)

    accepted.measured(outcome)
    assert lines_with(accepted.gate().stdout.str(), "REGRESSED", SMALL, "slower than the accepted revision")
    tried.clear()

    def when_timed(id: str, process: int, second: bool) -> object:
        tried.append(id)
        return crowded if tried.count(id) == 2 else slow(id, process, second)

    accepted.measured(when_timed)
    assert lines_with(accepted.gate().stdout.str(), "REGRESSED", SMALL, "slower than the accepted revision")
    accepted.measured(fails(crowded, only="small"))
    assert lines_with(accepted.gate().stdout.str(), "UNMEASURED", SMALL, "runs out of device memory")


# --- a real process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [pytest.param(False, marks=FULLY), True])
def test_an_accepted_side_that_loads_an_installed_copy_is_reported(
    project: Project, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    project.write("fast_here.py", "def fast(x):\n    return 3 * x\n")
    text = TWO_LINES.replace("def fast(x):\n        return 3 * x\n", "from fast_here import fast\n")
    project.write("test_scale.py", text)
    project.write("pytest.ini", "[pytest]\n")
    tree = revision.extract(project.commit(), project.path, project.path / ".perfsuite/revisions")
    if installed:
        (project.path / "env/site-packages").mkdir(parents=True)
        shutil.copy(project.path / "fast_here.py", project.path / "env/site-packages")
        project.write("conftest.py", "import sys\nsys.path.insert(0, 'env/site-packages')\nimport fast_here\n")
    task = Task(id=SMALL, kind=PROVE, accepted=tree, same_code=("fast_here.py", "test_scale.py"))
    ((_, proof),) = run_tasks(real_workers(project.path), task)
    assert isinstance(proof, WorkloadProof), proof
    assert ("installed as a copy" in proof.unloaded) is installed
    assert (proof.evidence is None) is installed


@FULLY
def test_a_worker_proves_and_times_both_revisions(project: Project) -> None:
    text = TWO_LINES.replace("return 3 * x", "CALLED.touch()\n        return 3 * x")
    text = text.replace("def slow", 'CALLED = Path(__file__).with_suffix(".called")\n\n\n    def slow')
    project.write("test_scale.py", "    from pathlib import Path\n" + text.lstrip("\n"))
    first = project.commit()
    tree = revision.extract(first, project.path, project.path / ".perfsuite/revisions")
    project.replace("test_scale.py", "CALLED.touch()", "CALLED.with_suffix('.current').touch()")
    made: list[Any] = run_tasks(
        real_workers(project.path), Task(id=SMALL, kind=PROVE, accepted=tree), Task(id=SMALL, accepted=tree)
    )
    (_, proof), (_, measured) = made
    assert isinstance(proof, WorkloadProof), proof
    assert (proof.id, proof.unloaded) == (SMALL, "")
    assert isinstance(measured, Measurement), measured
    assert set(measured.log_ratios) == {"reference", "accepted"}
    assert len(measured.sides["accepted"].blocks_s) == len(measured.sides["optimized"].blocks_s)
    assert (files_of(tree) / "test_scale.called").exists()
    assert (project.path / "test_scale.current").exists()
    assert not (project.path / "test_scale.called").exists()
    assert not (files_of(tree) / "test_scale.current").exists()
    assert sys.path.count(tree.folder) == 0  # the parent imports nothing of it
