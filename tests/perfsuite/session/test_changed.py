"""`perfsuite gate --changed`: a workload is UNCHANGED only if nothing that it runs has changed; else it is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import MACHINE, entry, measurement
from scratch import SMALL, Failure, Project, git, lines_with, times

from perfsuite.baseline.accepted_entries import Entry, short
from perfsuite.records import Machine, Ran, Status
from perfsuite.revisions import digests
from perfsuite.session import changed, code_changes
from perfsuite.session.tasks import PROVE, TIME

pytest_plugins = ["pytester"]

SOURCES = {"lib/fast.py": "def f():\n    return 1\n", "lib/common.py": "X = 1\n", "test_pair.py": "import lib\n"}


ADDED = {"docs/other.py", "lib/unused.py"}
"""Files added since acceptance, which nothing imports."""


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tokens.bin").write_bytes(b"1234")
    return tmp_path


def accepted(top: Path, **fields: object) -> Entry:
    """Return an entry that ran these sources on MACHINE."""
    ran = Ran(
        sources={name: digests.of_file(top / name) for name in SOURCES},
        data={"tokens.bin": digests.of_data(top / "tokens.bin")},
        surroundings=digests.surroundings(),
        launched="a digest",
    )
    return replace(entry([measurement()] * 3), ran=replace(ran, **fields))  # type: ignore[arg-type]


def found(made: Entry, top: Path, machine: object = MACHINE) -> changed.Found:
    return changed.unchanged({made.id: made}, top, machine, lambda revision, top: ADDED)  # type: ignore[arg-type]


def since(made: Entry, top: Path, machine: Machine = MACHINE) -> str:
    return changed.other_code({made.id: made}, top, machine, lambda revision, top: ADDED).get(made.id, "")


def test_workload_is_unchanged_if_nothing_that_it_runs_has_changed(top: Path) -> None:
    made = accepted(top)
    result = found(made, top)
    assert (list(result.unchanged), result.changed, result.sources) == ([made.id], {}, {})
    assert result.unchanged[made.id].startswith("nothing that it runs has changed since ")
    verdict = changed.verdict(made.id, made, "reason")
    assert (verdict.status, verdict.status.green, verdict.slowdown) == (Status.UNCHANGED, True, None)
    assert verdict.message == f"UNCHANGED {made.id}: reason"


def test_new_comment_is_not_a_change(top: Path) -> None:
    made = accepted(top)
    (top / "lib/fast.py").write_text("# why\n" + SOURCES["lib/fast.py"])
    assert list(found(made, top).unchanged) == [made.id]


@pytest.mark.parametrize("name", SOURCES)
def test_a_changed_or_removed_source_is_named(top: Path, name: str) -> None:
    made = accepted(top)
    (top / name).write_text("Y = 2\n")
    result = found(made, top)
    assert (result.unchanged, result.changed, result.sources) == ({}, {made.id: name}, {made.id: [name]})
    (top / name).unlink()
    assert found(made, top).changed == {made.id: name}


def test_list_of_changed_sources_is_shortened(top: Path) -> None:
    made = accepted(top, sources={f"gone{n}.py": "1" for n in range(5)})
    assert found(made, top).changed == {made.id: "gone0.py, gone1.py, gone2.py, …"}
    assert len(found(made, top).sources[made.id]) == 5


def test_package_that_replaces_a_module_is_a_change(top: Path) -> None:
    made = accepted(top)
    (top / "lib/fast").mkdir()
    (top / "lib/fast/__init__.py").write_text("")
    assert found(made, top).changed == {made.id: "lib/fast.py"}


def test_changed_data_file_is_a_change(top: Path) -> None:
    made = accepted(top)
    (top / "tokens.bin").write_bytes(b"4321")
    result = found(made, top)
    assert (result.changed, result.sources) == (
        {made.id: f"data file tokens.bin changed since it was accepted at {short(made.revision)}"},
        {},
    )


def test_changed_package_outside_the_repository_is_a_change(top: Path) -> None:
    (top / "project").mkdir()
    (top / "dep").mkdir()
    (top / "dep/__init__.py").write_text("X = 1\n")
    made = accepted(top, sources={}, data={"../dep": digests.of_data(top / "dep")})
    assert list(found(made, top / "project").unchanged) == [made.id]
    (top / "dep/new.py").write_text("X = 2\n")
    assert found(made, top / "project").changed[made.id].startswith("folder ../dep changed since it was accepted at ")


@pytest.mark.parametrize("name", ["driver", "cuda", "torch", "triton", "python"])
def test_other_software_version_is_a_change(top: Path, name: str) -> None:
    made = accepted(top)
    result = found(made, top, replace(MACHINE, **{name: "0.1"}))
    assert result.changed == {made.id: f"{name} was {getattr(MACHINE, name)}, is 0.1"}
    assert result.sources == {}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"surroundings": "of another environment"}, "an installed package, or an environment variable"),
        ({"unknown": "it reads files through h5py"}, "it reads files through h5py"),
    ],
)
def test_unknown_surroundings_or_files_are_a_change(top: Path, fields: dict[str, str], why: str) -> None:
    made = accepted(top, **fields)
    assert found(made, top).changed[made.id].startswith(why)
    assert found(made, top).sources == {}


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "4"}, "environment variable OMP_NUM_THREADS was '1', is '4'"),
        ({}, {"OMP_NUM_THREADS": "4"}, "environment variable OMP_NUM_THREADS was not set, is '4'"),
        ({"NCCL_DEBUG": ""}, {}, "environment variable NCCL_DEBUG was '', is not set"),
        ({"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4"}, "an installed package"),
    ],
)
def test_changed_environment_variable_is_named(
    top: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, str], now: dict[str, str], why: str
) -> None:
    monkeypatch.setattr(digests, "ENVIRONMENT", now)
    made = accepted(top, surroundings="of another environment", variables=before)
    assert found(made, top).changed == {made.id: why}


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (["a==1", "b==2"], ["a==1", "b==3"], "package b was 2, is 3"),
        (["a==1"], ["a==1", "b==2", "c==1"], "package b was not installed, is 2, and 1 more"),
        (["a==1", "a==2"], ["a==2"], "package a was 1, 2, is 2"),
        (["a==1"], [], "package a was 1, is not installed"),
        (["a==1"], ["a==1"], "an installed package"),
    ],
)
def test_changed_package_is_named(
    top: Path, monkeypatch: pytest.MonkeyPatch, before: list[str], now: list[str], why: str
) -> None:
    monkeypatch.setattr(digests, "ENVIRONMENT", {})
    made = accepted(top, surroundings="of another environment", variables={}, packages=tuple(before))
    monkeypatch.setattr(digests, "packages", lambda: now)
    assert found(made, top).changed == {made.id: why}


def test_other_build_of_a_version_is_a_change_if_both_are_known(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "packages", lambda: ["a==1#00", "b==2#11", "c==1"])
    digests.surroundings.cache_clear()
    try:
        for before, why in (
            (["a==1#00", "b==2#11", "c==1"], ""),
            (["a==1#00", "b==2#99", "c==1"], "package b is another build of 2"),
            (["a==1#99", "b==2#99", "c==1"], "package a is another build of 1, and 1 more"),
            (["a==1", "b==2", "c==1#99"], ""),
        ):
            made = accepted(top, packages=tuple(before))
            assert found(made, top).changed.get(made.id, "") == why
    finally:
        digests.surroundings.cache_clear()


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        ({"addopts": "-s"}, {"addopts": "-s"}, ""),
        ({"addopts": "-s"}, {"addopts": "-v"}, "pytest setting addopts was '-s', is '-v'"),
        ({}, {"usefixtures": "cold"}, "pytest setting usefixtures was not set, is 'cold'"),
        (None, {"addopts": "-s"}, ""),
    ],
)
def test_changed_pytest_setting_is_named(
    top: Path, before: dict[str, str] | None, now: dict[str, str], why: str
) -> None:
    made = accepted(top, settings=before)
    result = changed.unchanged({made.id: made}, top, MACHINE, lambda revision, top: ADDED, now)
    assert result.changed.get(made.id, "") == why
    assert result.sources == {}
    differences = changed.differences({made.id: made}, top, MACHINE, lambda revision, top: ADDED, now)
    assert differences == {made.id: ([], why)}


def test_missing_record_or_uncommitted_acceptance_is_a_change(top: Path) -> None:
    for made, why in (
        (replace(accepted(top), ran=None), "what it ran was not noted when it was accepted"),
        (replace(accepted(top), dirty=True), "it was accepted with uncommitted changes"),
    ):
        assert found(made, top).changed == {made.id: why}


def test_other_code_ignores_packages_and_driver_but_not_the_python_version(top: Path) -> None:
    made = accepted(top, surroundings="of another environment")
    assert since(made, top) == ""
    assert since(made, top, replace(MACHINE, driver="1.2.3")) == ""
    assert "with Python 3" in since(made, top, replace(MACHINE, python="4.0.1"))
    assert since(replace(made, ran=None), top).startswith("what it ran was not noted")
    assert since(accepted(top, unknown="it reads through h5py"), top) == "it reads through h5py"
    (top / "tokens.bin").write_bytes(b"12345")
    assert since(made, top).startswith("data file tokens.bin changed since it was accepted at ")
    (top / "tokens.bin").write_bytes(b"1234")
    (top / "lib/fast.py").write_text("Y = 2\n")
    assert since(made, top).startswith("lib/fast.py changed since it was accepted at ")


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("conftest.py", True),
        ("lib/conftest.py", True),
        ("lib/__init__.py", True),
        ("lib/tuned.py", True),
        ("lib/tuned/__init__.py", True),
        ("vendor/extra/parts.py", True),
        ("extra/__init__.py", True),
        ("other/conftest.py", False),
        ("lib/untuned.py", False),
        ("tuned.py", False),
    ],
)
def test_new_file_is_a_change_only_if_it_would_run(top: Path, name: str, runs: bool) -> None:
    """A new conftest is a change, and so is a module that an import did not find at acceptance."""
    (top / "lib/fast.py").write_text(
        "try:\n    from lib import tuned\n    import extra.parts\nexcept ImportError: ...\n"
    )
    made = accepted(top)
    result = changed.unchanged({made.id: made}, top, MACHINE, lambda revision, top: {name})
    since = f"since {(made.revision or '')[:7]}"
    assert result.changed == ({made.id: f"{name} was added {since}"} if runs else {})
    assert result.sources == {}
    assert bool(changed.other_code({made.id: made}, top, MACHINE, lambda revision, top: {name})) is runs


def committed(top: Path) -> Entry:
    """Return an entry that was accepted at a commit of these files."""
    git(top, "init")
    git(top, "add", "-A")
    git(top, "commit", "-m", "work")
    return replace(accepted(top), revision=git(top, "rev-parse", "HEAD"))


def test_files_unchanged_in_git_are_not_parsed(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = committed(top)
    monkeypatch.setattr(digests, "of_file", None)
    monkeypatch.setattr(digests, "of_data", lambda path: made.ran and made.ran.data[path.name])
    assert list(found(made, top).unchanged) == [made.id]


def test_assume_unchanged_flag_of_git_is_ignored(top: Path) -> None:
    made = committed(top)
    git(top, "update-index", "--assume-unchanged", "lib/fast.py")
    (top / "lib/fast.py").write_text("Y = 2\n")
    assert found(made, top).changed == {made.id: "lib/fast.py"}


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("lib/tuned.json", "{}", "lib/tuned.json beside its sources changed since it was accepted at"),
        ("lib/tiles.txt", "64", "lib/tiles.txt beside its sources changed since it was accepted at"),
        ("lib/fast.cpython-311-x86_64-linux-gnu.so", "", "lib/fast.cpython-311-x86_64-linux-gnu.so beside its sources"),
        ("lib/_local.py", "", "lib/_local.py was added since"),
        ("lib/unused.py", "", ""),
        ("lib/notes.md", "", ""),
        ("lib/.cache", "", ""),
        ("tuned.json", "", ""),
        ("other/tuned.json", "", ""),
    ],
)
def test_changed_files_beside_the_sources_are_changes(top: Path, name: str, text: str, why: str) -> None:
    """Checks for a file and reads by a library are not observed, and git may ignore such files."""
    (top / "lib/tiles.txt").write_text("128")
    (top / "lib/fast.py").write_text("try: from lib import _local\nexcept ImportError: ...\n")
    (top / ".gitignore").write_text("_local.py\n*.json\n*.so\n")
    made = committed(top)
    (top / name).parent.mkdir(exist_ok=True)
    (top / name).write_text(text)
    result = changed.unchanged({made.id: made}, top, MACHINE)
    assert result.changed.get(made.id, "")[: len(why) or None] == why
    assert bool(changed.other_code({made.id: made}, top, MACHINE)) is bool(why)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lib/tiles.txt", "lib/tiles.txt beside its sources changed since it was accepted at"),
        ("lib/unused.py", ""),
        ("lib/notes.md", ""),
        ("lib/inner/tiles.txt", ""),
        ("tiles.txt", ""),
    ],
)
def test_removed_files_beside_the_sources_are_changes(top: Path, name: str, why: str) -> None:
    """Checks for a file are not observed."""
    (top / name).parent.mkdir(exist_ok=True)
    (top / name).write_text("128")
    (top / "lib/broken").symlink_to("nowhere")  # it does not exist when accepted either
    made = committed(top)
    assert made.id in changed.unchanged({made.id: made}, top, MACHINE).unchanged
    (top / name).unlink()
    result = changed.unchanged({made.id: made}, top, MACHINE)
    assert result.changed.get(made.id, "")[: len(why) or None] == why
    assert bool(changed.other_code({made.id: made}, top, MACHINE)) is bool(why)


def test_uncommitted_file_is_listed_by_its_name(top: Path) -> None:
    name = "lib/größe.py"
    (top / name).write_text("X = 1\n")
    made = committed(top)
    assert made.ran is not None
    made = replace(made, ran=replace(made.ran, sources={name: digests.of_file(top / name)}))
    (top / name).write_text("X = 2\n")
    change = code_changes.since_accepted({made.id: made}, top, MACHINE, {made.id})[made.id]
    assert change.files == change.uncommitted == (name,)


def test_removed_empty_source_is_a_change(top: Path) -> None:
    (top / "lib/common.py").write_text("")
    made = committed(top)
    assert found(made, top).changed == {}
    (top / "lib/common.py").unlink()
    assert found(made, top).changed == {made.id: "lib/common.py"}


def test_revision_unknown_to_git_is_a_change(top: Path) -> None:
    made = accepted(top)
    for entry_ in (made, replace(made, revision=None)):
        result = changed.unchanged({made.id: entry_}, top, MACHINE, lambda revision, top: None)
        assert "git does not know what was added since" in result.changed[made.id]


# --- launches -------------------------------------------------------------------------------------------------------


def the_same(
    launched: str = "a digest",
    sources: tuple[str, ...] = ("lib/fast.py",),
    now: str = "a digest",
    own: str = "lib/fast.py",
) -> bool:
    return changed.launches_the_same(launched, sources, now, own.split())


def test_same_launches_excuse_only_a_change_of_the_optimized_side() -> None:
    assert the_same()
    assert not the_same(now="another")
    # The reference or the pair's declaration has changed too, which the optimized side's launches do not show.
    assert not the_same(sources=("lib/fast.py", "test_pair.py"))
    assert not the_same(own="")


def test_missing_launch_digest_excuses_no_change() -> None:
    assert not the_same(launched="", now="")
    assert not the_same(now="")
    assert not the_same(launched="")


def test_launch_digest_is_used_only_for_the_device_clock(top: Path) -> None:
    made = accepted(top)
    assert changed.launched(made) == "a digest"
    assert not changed.launched(replace(made, clock="wall"))
    assert not changed.launched(accepted(top, launched=""))
    assert not changed.launched(replace(made, ran=None))


# --- in a whole gate ------------------------------------------------------------------------------------------------

FAST = "def fast(x):\n    return 3 * x\n"
PAIR = """
    from fast import fast
    from slow import slow

    from perfsuite import Pair, Workload, tensor

    scale = Pair(
        reference=slow,
        optimized=fast,
        inputs={"x": tensor("n")},
        workloads=[Workload("small", n=64, speedup=1.5)],
    )
"""


@pytest.fixture
def scale(project: Project) -> Project:
    """Make a pair in three modules, accepted with a record of the files that it ran."""
    project.write("fast.py", FAST)
    project.write("slow.py", "def slow(x):\n    return x + x + x\n")
    project.write("test_scale.py", PAIR)
    project.write("pytest.ini", "[pytest]\npythonpath = .\n")
    project.commit()
    fake = project.measured(times(clock="device"))
    names = ("fast.py", "slow.py", "test_scale.py")
    sources = {n: digests.of_file(project.path / n) for n in names}
    fake.ran = Ran(sources=sources, launched="a digest")
    done = project.cli("accept", "--reason", "the first")
    assert done.exit_code == 0, done.output
    return project


def gate(project: Project, launched: str = "", *options: str, slower: float = 0.05) -> tuple[int, Status, list[str]]:
    """(exit code, verdict, kinds of the tasks that were done) of `gate --changed`."""
    fake = project.measured(times(slower=slower, clock="device"))
    fake.ran, fake.own = Ran(sources={}, launched=launched), ("fast.py",)
    done = project.cli("gate", "--changed", *options)
    report = json.loads((project.path / ".perfsuite/report/report.json").read_text())
    status = Status(report["verdicts"][SMALL]["status"])
    assert "Traceback" not in done.output
    return done.exit_code, status, [task.kind for task in fake.tasks]


def test_gate_changed_runs_no_task_without_a_change(scale: Project) -> None:
    assert gate(scale) == (0, Status.UNCHANGED, [])
    scale.replace("fast.py", "def fast", "# quick\ndef fast")
    assert gate(scale) == (0, Status.UNCHANGED, [])


def test_unchanged_workloads_are_counted_separately(scale: Project) -> None:
    scale.measured(times())
    done = scale.cli("gate", "--changed")
    assert lines_with(done.output, "1 UNCHANGED")
    assert lines_with(done.output, "1 workload unchanged")
    assert not lines_with(done.output, "1 PASS")


def test_changed_pytest_setting_is_measured(scale: Project) -> None:
    scale.write("pytest.ini", "[pytest]\npythonpath = .\nmarkers = a: b\n")
    assert gate(scale)[1] is Status.UNCHANGED
    scale.write("pytest.ini", "[pytest]\npythonpath = .\nfilterwarnings = error\n")
    code, status, kinds = gate(scale)
    assert (code, status) == (1, Status.REGRESSED)
    assert TIME in kinds


def test_gate_without_changed_measures_unchanged_workloads(scale: Project) -> None:
    fake = scale.measured(times(clock="device"))
    assert scale.cli("gate").exit_code == 0
    assert TIME in [task.kind for task in fake.tasks]


def test_full_gate_measures_unchanged_code_in_one_process(scale: Project) -> None:
    """Accepted code gets one process, because a comparison with a copy of itself cannot show a slowdown of the code."""

    def gated(slower: float) -> tuple[int, Status, int]:
        fake = scale.measured(times(slower=slower, clock="device"))
        done = scale.cli("gate")
        report = json.loads((scale.path / ".perfsuite/report/report.json").read_text())
        same = "3 * x" in (scale.path / "fast.py").read_text()
        assert lines_with(done.output, f"{int(same)} of 1 workload unchanged since acceptance")
        timed = sum(task.kind == TIME for task in fake.tasks)
        return done.exit_code, Status(report["verdicts"][SMALL]["status"]), timed

    def changes() -> dict[str, Any]:
        report = json.loads((scale.path / ".perfsuite/report/report.json").read_text())
        return {name: report["changes"].get(SMALL, {}).get(name) for name in ("files", "commits", "uncommitted")}

    assert gated(0.0) == (0, Status.PASS, 1)
    assert changes() == {"files": [], "commits": [], "uncommitted": []}
    assert gated(0.05)[:2] == (1, Status.REGRESSED)
    assert changes() == {"files": [], "commits": [], "uncommitted": []}
    assert gated(0.009) == (0, Status.PASS, 1)
    scale.replace("fast.py", "def fast", "# quick\ndef fast")
    assert gated(0.0) == (0, Status.PASS, 1)
    scale.replace("fast.py", "3 * x", "x * 3")
    assert gated(0.0) == (0, Status.PASS, 2)
    assert changes() == {"files": ["fast.py"], "commits": [], "uncommitted": []}
    scale.commit("Another product")
    scale.replace("fast.py", "x * 3", "x + x + x")
    assert gated(0.05)[:2] == (1, Status.REGRESSED)
    found = changes()
    assert (found["files"], found["uncommitted"]) == (["fast.py"], ["fast.py"])
    assert [commit.partition(" ")[2] for commit in found["commits"]] == ["Another product"]


def test_package_installed_as_a_copy_does_not_count_as_unchanged_code(scale: Project) -> None:
    """If the package is installed as a copy, both sides run that copy, whatever the tree contains."""
    fake = scale.measured(times(clock="device"))
    fake.ran = Ran(sources={n: digests.of_file(scale.path / n) for n in ("fast.py", "slow.py", "test_scale.py")})
    fake.unloaded[SMALL] = "fast is installed as a copy in /lib: pip install -e ."
    assert scale.cli("accept", "--reason", "as a copy").exit_code == 0
    fake = scale.measured(times(clock="device"))
    done = scale.cli("gate")
    assert not lines_with(done.output, "1 of 1 workload unchanged since acceptance")
    assert not any(task.same_code for task in fake.tasks)


def test_proof_is_repeated_if_the_accepted_side_raises_beside_the_current_one(scale: Project) -> None:
    """A workload is proven again if the accepted side raises, as both may register one name; a hang is not retried."""
    for text, proofs in (("the accepted side raises RuntimeError: registered twice", 2), ("it hangs", 1)):
        failures = [None, Failure(status=Status.UNMEASURED, message=text)]  # the proof passes, the timing fails
        measure = times(clock="device")
        fake = scale.measured(lambda *given, f=failures, m=measure: (f.pop(0) if f else None) or m(*given))
        done = scale.cli("gate")
        assert [bool(task.same_code) for task in fake.tasks if task.kind == PROVE] == [True, False][:proofs]
        assert (done.exit_code == 0) is (proofs == 2), done.output


@pytest.mark.parametrize(
    ("launched", "code", "status"), [("a digest", 0, Status.UNCHANGED), ("another", 1, Status.REGRESSED)]
)
def test_gate_changed_excuses_changed_optimized_code_with_the_same_launches(
    scale: Project, launched: str, code: int, status: Status
) -> None:
    scale.replace("fast.py", "3 * x", "x * 3")
    found = gate(scale, launched)
    assert found[:2] == (code, status)
    assert found[2][0] == PROVE
    assert (TIME in found[2]) is (status is not Status.UNCHANGED)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [("slow.py", "x + x + x", "2 * x + x"), ("test_scale.py", "speedup=1.5", "speedup=1.9")],
    ids=["reference", "promise"],
)
def test_changed_reference_or_declaration_is_measured_despite_the_same_launches(
    scale: Project, file: str, old: str, new: str
) -> None:
    scale.replace(file, old, new)
    code, status, kinds = gate(scale, "a digest")
    assert (code, status) == (1, Status.REGRESSED)
    assert TIME in kinds


def test_gate_is_red_for_a_new_promise_that_is_not_kept(scale: Project) -> None:
    scale.replace("test_scale.py", "speedup=1.5", "speedup=5")
    code, status, _ = gate(scale, "a digest", slower=0.0)
    assert (code, status.green) == (1, False)
