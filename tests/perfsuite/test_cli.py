"""The command `perfsuite`: its output, the arguments that it passes to pytest, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from scratch import SMALL, TWO_LINES, Failure, Project, fails, lines_with, times

from perfsuite import __version__, cli, command_group
from perfsuite.baseline import storage
from perfsuite.cli import main
from perfsuite.gate import conclusion, exit_codes
from perfsuite.records import Ran, Status
from perfsuite.revisions import digests
from perfsuite.session import device_lock

pytest_plugins = ["pytester"]

COMMANDS = (
    "accept",
    "bisect",
    "comment",
    "compare",
    "doctor",
    "gate",
    "history",
    "init",
    "list",
    "merge",
    "run",
    "table",
)


@pytest.fixture
def scale(project: Project) -> Project:
    project.write("test_scale.py", TWO_LINES)
    project.measured(times())
    return project


# --- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(command: str, flag: str) -> None:
    done = CliRunner().invoke(main, [command, flag])
    assert done.exit_code == 0
    assert done.output.startswith("Usage: ")
    own = main.commands[command]
    assert own.help
    assert own.help.splitlines()[0] in done.output
    for parameter in own.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{command} {parameter.name} has no help"


def test_help_lists_every_command() -> None:
    done = CliRunner().invoke(main, ["--help"])
    assert done.exit_code == 0
    for command in COMMANDS:
        assert lines_with(done.output, f"  {command} ")
    assert "perfsuite doctor" in done.output  # where to start
    assert sorted(main.commands) == list(COMMANDS)


def test_version_option_prints_the_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"perfsuite, version {__version__}\n"


def test_python_dash_m_perfsuite_runs_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "perfsuite", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"perfsuite, version {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["gate", "--no-such-option"], ["compare"], ["run", "--profile=x"]]
)
def test_wrong_command_line_ends_with_exit_code_2(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert lines_with(done.output, "Error: ")


# --- arguments for pytest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run"], ["-m", "correctness or perf", "--perfsuite-mode=run", "--perfsuite-report=.perfsuite/report"]),
        (["run", "--profile", "ci"], ["--perfsuite-profile=ci"]),
        (["gate", "-k", "scale", "tests"], ["-m", "perf", "-k", "scale", "--perfsuite-mode=gate", "tests"]),
        (["gate", "--baselines", "here"], ["--perfsuite-baselines=here"]),
        (["gate", "--changed", "--partial"], ["--perfsuite-changed", "--perfsuite-partial"]),
        (["gate", "--shard", "1/3"], ["--perfsuite-shard=1/3"]),
        (["compare", "HEAD~1", "tests"], ["--perfsuite-mode=compare", "--perfsuite-argument=revision=HEAD~1", "tests"]),
        (["accept", "--reason", "x = y"], ["--perfsuite-mode=accept", "--perfsuite-argument=reason=x = y"]),
        (["accept", "--reason", "x", "--more"], ["--perfsuite-argument=more=yes"]),
        (["accept", "--reason", "x", "--prune"], ["--perfsuite-argument=prune=yes"]),
        (["accept", "--reason", "x", "--allow-dirty"], ["--perfsuite-argument=dirty=yes"]),
        (["accept", "--reason", "x", "--processes", "7"], ["--perfsuite-argument=processes=7"]),
        (["accept", "--reason", "x", "--shard", "2/2"], ["--perfsuite-shard=2/2"]),
        (["list", "--json"], ["--perfsuite-mode=list", "--perfsuite-argument=json=yes"]),
    ],
)
@pytest.mark.parametrize("code", [0, 1, 2, 5])
def test_options_are_passed_to_pytest_and_its_exit_code_is_returned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], expected: list[str], code: int
) -> None:
    seen: list[str] = []

    def run(given: list[str]) -> int:
        seen.extend(given)
        awaited = conclusion.asked()
        assert awaited is not None
        awaited.reach(arguments[0], code)
        return code

    monkeypatch.setattr("pytest.main", run)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == code
    assert all(e in seen for e in expected), seen


# --- list -----------------------------------------------------------------------------------------------------------


def test_list_shows_workloads_and_accepted_times(scale: Project) -> None:
    done = scale.cli("list")
    assert done.exit_code == 0, done.output
    assert lines_with(done.output, "scale", "small", "any", "wall", "forward", "n=64")
    assert lines_with(done.output, "1 of 1 workloads; 1 of them run here (cpu-") or "nvidia" in done.output
    scale.accept()
    assert lines_with(scale.cli("list").output, "scale", "small", "10.0 µs")
    assert "passed" not in done.output


def test_list_json(scale: Project) -> None:
    (row,) = json.loads(scale.cli("list", "--json").output)
    assert row["id"] == SMALL
    assert row["sizes"] == {"n": 64}
    assert row["accepted_s"] is None
    assert row["runs_here"] is True
    scale.accept()
    (row,) = json.loads(scale.cli("list", "--json").output)
    assert row["accepted_s"] == pytest.approx(1e-5)


def test_list_without_a_match_ends_with_exit_code_5(scale: Project) -> None:
    done = scale.cli("list", "-k", "nothing_of_the_name")
    assert done.exit_code == 5
    assert "0 of 1 workloads" in done.output
    assert "there is no item that -k 'nothing_of_the_name' selects in this folder" in done.output + done.stderr


def test_commands_do_not_collect_ignored_paths(project: Project) -> None:
    """An ignored file is not imported unless the command line names it; plain pytest still collects it."""
    project.write("pairs/test_scale.py", TWO_LINES)
    project.write("others/test_other.py", "import missing_module")
    project.write("pytest.ini", "[pytest]\nperfsuite_ignore = others")
    done = project.cli("list")
    assert done.exit_code == 0, done.output
    assert "1 of 1 workloads" in done.output
    assert project.run("--collect-only").ret != 0
    for path in ("others", "others/test_other.py"):
        assert project.cli("list", path).exit_code == 2


def test_list_names_a_module_that_cannot_be_imported(project: Project) -> None:
    project.write("test_one.py", "import nothing_of_this_name")
    for count, others in ((1, "; fix it first"), (2, " (and 1 more); fix it first")):
        done = project.cli("list")
        assert done.exit_code == 2
        assert lines_with(
            done.output, f"test_one.py: ModuleNotFoundError: No module named 'nothing_of_this_name'{others}"
        )
        assert "Traceback" not in done.output
        project.write(f"test_two{count}.py", "def f(:")


def test_the_gate_is_red_for_accepted_workloads_that_are_ignored(project: Project) -> None:
    for folder in ("pairs", "others"):
        project.write(f"{folder}/test_scale.py", TWO_LINES)
    project.write("pytest.ini", "[pytest]\naddopts = --import-mode=importlib")
    project.accept()
    project.write("pytest.ini", "[pytest]\naddopts = --import-mode=importlib\nperfsuite_ignore = others")
    done = project.cli("gate")
    assert done.exit_code == exit_codes.UNDECIDED, done.output
    assert lines_with(done.output, "others/test_scale.py", "in the baseline but not collected"), done.output


def test_the_gate_names_a_module_that_cannot_be_collected(project: Project) -> None:
    for folder in ("pairs", "others"):
        project.write(f"{folder}/test_scale.py", TWO_LINES)
    project.write("pytest.ini", "[pytest]\naddopts = --import-mode=importlib")
    project.accept()
    project.write("others/test_scale.py", "import nothing_of_this_name")
    done = project.cli("gate")
    assert done.exit_code != 0
    error = "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    assert lines_with(done.output, f"others/test_scale.py: 1 accepted workload not measured: {error}"), done.output
    assert "renamed" not in done.output


# --- accept ---------------------------------------------------------------------------------------------------------


def test_accept_prints_added_and_changed_speedups(scale: Project) -> None:
    scale.commit()
    first = scale.cli("accept", "--reason", "the first")
    assert first.exit_code == 0, first.output
    assert lines_with(first.output, SMALL, "added at 2×")
    (path,) = (scale.path / "baselines").glob("*.json")
    assert lines_with(first.output, "wrote", str(path))
    assert '"reason": "the first"' in path.read_text()
    scale.measured(times(speedup=2.5))
    second = scale.cli("accept", "--reason", "a better tile")
    assert lines_with(second.output, SMALL, "changed from 2× to 2.5× (+25.0%)")
    assert '"reason": "a better tile"' in path.read_text()


def test_accept_lists_workloads_slower_than_their_reference(scale: Project) -> None:
    scale.commit()
    line = "accepted although the optimized side is slower than its reference: scale[small] (0.50"
    scale.measured(times(speedup=0.5))
    done = scale.cli("accept", "--reason", "for its memory")
    assert done.exit_code == 0, done.output
    assert lines_with(done.output, line), done.output
    scale.measured(times(speedup=1.0))  # as fast as the reference, within the noise
    assert not lines_with(scale.cli("accept", "--reason", "better").output, "slower than its reference")


def test_accept_requires_a_reason(scale: Project) -> None:
    done = scale.cli("accept")
    assert done.exit_code == 2
    assert lines_with(done.output, "Error:", "give --reason", "why are the new figures right?")
    assert not (scale.path / "baselines").exists()


def test_accept_of_a_selection_keeps_the_other_workloads(scale: Project) -> None:
    scale.write("test_other.py", TWO_LINES.replace("scale", "other"))
    path = scale.accept()
    scale.measured(times(speedup=3.0))
    done = scale.cli("accept", "-k", "other", "--reason", "faster")
    assert done.exit_code == 0, done.output
    assert lines_with(done.output, "other::speed[small]", "changed from 2× to 3×")
    assert lines_with(done.output, "1 workload unchanged")
    assert scale.workers is not None
    assert all("scale::" not in i for ids, _ in scale.workers.calls for i in ids)
    assert path.exists()


def test_accept_leaves_out_workloads_below_their_promise(scale: Project) -> None:
    scale.replace("test_scale.py", 'clock="wall")', 'clock="wall", speedup=3.0)')
    scale.write("test_other.py", TWO_LINES.replace("scale", "other"))
    scale.commit()
    done = scale.cli("accept", "--reason", "x")
    assert done.exit_code == 1
    assert lines_with(done.output, "not accepted", "BELOW_FLOOR", SMALL)
    assert lines_with(done.output, "other::speed[small]: added")  # green workloads are accepted
    (path,) = (scale.path / "baselines").glob("*.json")
    assert SMALL not in path.read_text()


def test_accept_leaves_out_unmeasured_workloads(scale: Project) -> None:
    scale.commit()
    scale.measured(fails(Failure(status=Status.UNMEASURED, message="the optimized side hangs")))
    done = scale.cli("accept", "--reason", "x")
    assert done.exit_code == 1
    assert lines_with(done.output, "not accepted", "UNMEASURED", SMALL, "hangs")
    assert not (scale.path / "baselines").exists()


def test_accept_without_a_match_is_an_error(scale: Project) -> None:
    done = scale.cli("accept", "-k", "nothing_of_the_name", "--reason", "x")
    assert done.exit_code == 4
    assert lines_with(done.output, "nothing to accept", "perfsuite list")


def test_accept_refuses_a_dirty_tree_without_allow_dirty(scale: Project) -> None:
    scale.commit()
    scale.replace("test_scale.py", "3 * x", "3.0 * x")
    done = scale.cli("accept", "--reason", "x")
    assert done.exit_code == 4
    assert lines_with(done.output, "uncommitted changes", "--allow-dirty")
    assert scale.workers is not None
    assert not scale.workers.calls
    assert scale.cli("accept", "--reason", "x", "--allow-dirty").exit_code == 0


def test_accept_allows_untracked_files(scale: Project) -> None:
    scale.commit()
    scale.write("notes.txt", "later")
    assert scale.cli("accept", "--reason", "x").exit_code == 0


def accept_noting(project: Project, file: str, *options: str) -> Result:
    """Run `perfsuite accept` on one file; its proofs report that the workload runs only that file."""
    fake = project.measured(times())
    fake.ran = Ran(sources={file: digests.of_file(project.path / file)})
    return project.cli("accept", file, "--reason", "x", *options)


def test_accept_more_adds_sessions_until_the_code_changes(scale: Project) -> None:
    scale.commit()
    assert accept_noting(scale, "test_scale.py").exit_code == 0
    (path,) = (scale.path / "baselines").glob("*.json")
    for sessions in (2, 3):
        done = accept_noting(scale, "test_scale.py", "--more")
        assert done.exit_code == 0, done.output
        assert lines_with(done.output, SMALL, f"1 session more: {sessions} in all")
        scale.replace("test_scale.py", "3 * x", "3 * x  # a comment")
        scale.commit()
    before = path.read_bytes()
    scale.replace("test_scale.py", "3 * x", "3.0 * x")
    scale.commit()
    done = accept_noting(scale, "test_scale.py", "--more")
    assert done.exit_code == exit_codes.UNDECIDED
    assert lines_with(done.output, SMALL, "test_scale.py changed since it was accepted at", "accept it without --more")
    assert path.read_bytes() == before


def test_accept_more_leaves_out_changed_and_unaccepted_workloads(project: Project) -> None:
    """A changed workload is not measured; the others get another session."""
    files = ["test_one.py", "test_two.py", "test_three.py"]
    for file in files:
        project.write(file, TWO_LINES)
    project.commit()
    for file in files[:2]:
        assert accept_noting(project, file).exit_code == 0
    project.replace("test_two.py", "3 * x", "3.0 * x")
    project.commit()
    workers = project.measured(times())
    workers.ran = Ran(sources={"test_one.py": digests.of_file(project.path / "test_one.py")})
    done = project.cli("accept", "--more", "--reason", "another hour")
    assert done.exit_code == exit_codes.UNDECIDED, done.output
    assert lines_with(done.output, "test_two.py changed since it was accepted at", "accept it without --more")
    assert lines_with(done.output, "test_three.py", "has no accepted figures", "accept it without --more")
    assert {i for ids, _ in workers.calls for i in ids} == {"test_one.py::scale::speed[small]"}
    assert lines_with(done.output, "test_one.py", "1 session more: 2 in all")


def test_accept_more_leaves_out_only_workloads_whose_proof_ran_other_code(project: Project) -> None:
    """The difference is known only after the run, because the proof noted other files than at acceptance."""
    files = ["test_one.py", "test_two.py"]
    for file in files:
        project.write(file, TWO_LINES)
    project.commit()
    for file in files:
        assert accept_noting(project, file).exit_code == 0
    project.write("unrelated.py", "")
    project.commit()
    workers = project.measured(times())
    workers.ran = Ran(sources={"test_one.py": digests.of_file(project.path / "test_one.py")})
    done = project.cli("accept", "--more", "--reason", "another hour")
    assert done.exit_code == exit_codes.UNDECIDED, done.output
    assert lines_with(done.output, "not accepted: test_two.py::", "with other code", "accept it without --more")
    assert lines_with(done.output, "test_one.py", "1 session more: 2 in all")
    (kept,) = (project.path / "baselines").glob("*.json")
    assert [len(e.sessions) for e in storage.load(kept).entries.values()] == [2, 1]


def test_accept_prune_removes_workloads_even_if_it_accepts_none(scale: Project) -> None:
    scale.accept(times())
    scale.replace("test_scale.py", '"small"', '"tiny"')
    scale.replace("test_scale.py", 'clock="wall")', 'clock="wall", speedup=3.0)')
    scale.commit("renamed")
    scale.measured(times(speedup=2.0))
    pruned = scale.cli("accept", "--reason", "renamed", "--prune")
    assert pruned.exit_code == 1
    assert lines_with(pruned.output, "not accepted", "BELOW_FLOOR")
    assert lines_with(pruned.output, SMALL, "removed")


def test_accept_prune_removes_workloads_that_no_longer_exist(scale: Project) -> None:
    path = scale.accept()
    scale.replace("test_scale.py", '"small"', '"little"')
    scale.commit()
    scale.measured(times())
    kept = scale.cli("accept", "--reason", "renamed")
    assert kept.exit_code == 0, kept.output
    assert SMALL in path.read_text()
    pruned = scale.cli("accept", "--reason", "renamed", "--prune")
    assert lines_with(pruned.output, SMALL, "removed")
    assert SMALL not in path.read_text()
    assert "1 PASS" in scale.gate().stdout.str()


def test_accept_stops_at_a_module_that_cannot_be_imported(scale: Project) -> None:
    scale.write("test_broken.py", "import no_such_module")
    done = scale.cli("accept", "--reason", "x")
    assert done.exit_code == 2
    assert lines_with(done.output, "no_such_module")
    assert not (scale.path / "baselines").exists()


# --- run, gate, compare ---------------------------------------------------------------------------------------------


def test_run_writes_all_reports(scale: Project) -> None:
    done = scale.cli("run", "--report", "out", "--json")
    assert done.exit_code == 0, done.output
    assert "correctness: 6 passed, 0 failed" in done.stderr
    assert sorted(p.name for p in (scale.path / "out").iterdir()) == [
        "junit.xml",
        "report.html",
        "report.json",
        "summary.md",
    ]
    report = json.loads(done.stdout)
    assert list(report["measurements"]) == [SMALL]
    assert report["correctness"]["passed"] == 6


def test_run_does_not_time_a_workload_whose_proof_failed(scale: Project) -> None:
    assert scale.workers is not None
    scale.workers.failing.add("test_scale.py::scale::gradients[float32]")
    done = scale.cli("run", "--report", "out")
    assert done.exit_code == 1
    report = json.loads((scale.path / "out/report.json").read_text())
    assert report["correctness"]["failed"] == 1
    assert report["verdicts"][SMALL]["status"] == "NOT_PROVEN"
    assert report["measurements"] == {}  # a function that failed its proof is not timed


def test_run_times_compiled_pairs_last(scale: Project) -> None:
    """Files that compile are timed last, so that the first result does not wait for a compiler."""
    source = (scale.path / "test_scale.py").read_text()
    scale.write("test_a_compiled.py", source + "\n\n# calls torch.compile\n")
    fake = scale.measured(times())
    assert scale.cli("run", "--report", "out").exit_code == 0
    assert [t.id.partition("::")[0] for t in fake.tasks if t.kind == "time"] == ["test_scale.py", "test_a_compiled.py"]


def test_run_reports_skipped_proofs_with_their_reason(scale: Project) -> None:
    assert scale.workers is not None
    scale.write("pytest.ini", "[pytest]\naddopts = -ra\n")
    scale.workers.skipping.add("test_scale.py::scale::gradients[float32]")
    done = scale.cli("run", "--report", "out")
    assert done.exit_code == 0, done.output
    assert lines_with(done.output, "SKIPPED [1]", "not here")
    report = json.loads((scale.path / "out/report.json").read_text())
    assert report["correctness"] == {
        "passed": 5, "failed": 0, "skipped": 1, "skip_reasons": {"not here": 1}, "failures": {}
    }  # fmt: skip


def test_gate_writes_reports_and_the_job_summary(scale: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    scale.accept()
    scale.measured(times(slower=0.05))
    summary = scale.path / "summary-of-the-job.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    done = scale.cli("gate")
    assert done.exit_code == 1
    assert lines_with(done.output, "::error", "REGRESSED", SMALL)
    assert "REGRESSED" in summary.read_text()
    folder = scale.path / ".perfsuite/report"
    assert (folder / "junit.xml").read_text().count("<failure") == 1
    assert json.loads((folder / "report.json").read_text())["verdicts"][SMALL]["status"] == "REGRESSED"


def test_promise_for_a_misspelt_device_is_named(scale: Project) -> None:
    device = scale.accept().stem
    scale.replace("test_scale.py", "import Pair", "import Cost, Pair")
    promise = f'throughput={{"{device[:-1]}": 1.0, "{device}": 1.0}}'
    scale.replace("test_scale.py", "workloads=[", "cost=Cost(items=lambda n: n), workloads=[")
    scale.replace("test_scale.py", 'clock="wall")', f'clock="wall", {promise})')
    scale.measured(times(items=64.0))
    done = scale.cli("gate")
    assert done.exit_code == 0, done.output
    assert lines_with(done.output, f"throughput={{'{device[:-1]}': …}}", f"is {device} meant?")


def test_gate_without_a_baseline_names_the_command_that_writes_it(scale: Project) -> None:
    scale.commit()
    scale.measured(times())
    assert lines_with(scale.cli("gate").output, "NO_BASELINE", "accept it with `perfsuite accept -k scale --reason …`")
    other = scale.cli("gate", "--baselines", "of others").output
    assert lines_with(other, "accept it with `perfsuite accept -k scale --baselines 'of others' --reason …`")


def test_gate_that_cannot_start_reports_the_problem_and_no_verdicts(scale: Project) -> None:
    path = scale.accept()
    scale.measured(times())
    assert list(json.loads(scale.cli("gate", "--json").stdout)["verdicts"]) == [SMALL]
    path.write_text("")
    done = scale.cli("gate", "--json")
    assert done.exit_code == 4
    report = json.loads(done.stdout)
    assert report["verdicts"] == {}
    assert "the file is empty" in report["problems"][0]


def test_report_of_an_earlier_run_is_removed(scale: Project) -> None:
    scale.accept()
    scale.measured(times())
    assert scale.cli("gate").exit_code == 0
    scale.write("pytest.ini", "[pytest]\naddopts = --no-such-option")
    done = scale.cli("gate", "--json")
    assert done.exit_code == 4
    assert done.stdout == ""
    folder = scale.path / ".perfsuite/report"
    assert [path.name for path in folder.iterdir()] == [cli.EARLIER]


def test_report_with_results_is_kept_until_another_run_has_some(scale: Project) -> None:
    path = scale.accept()
    scale.measured(times())
    folder = scale.path / ".perfsuite/report"
    assert scale.cli("gate").exit_code == 0
    assert not (folder / cli.EARLIER).exists()
    good, baseline = {name: (folder / name).read_bytes() for name in cli.FILES}, path.read_text()
    path.write_text("")
    for _ in range(2):  # the report of the first bad run does not replace the good one
        done = scale.cli("gate")
        assert done.exit_code == 4
        assert lines_with(done.stderr, "this run has no results; the report of an earlier one is in", cli.EARLIER)
        assert {name: (folder / cli.EARLIER / name).read_bytes() for name in cli.FILES} == good
        assert "the file is empty" in (folder / "report.json").read_text()
    path.write_text(baseline)
    assert scale.cli("gate").exit_code == 0
    assert sorted(p.name for p in folder.iterdir()) == sorted(cli.FILES)


def test_compare_reports_a_slowdown_against_the_revision(scale: Project) -> None:
    head = scale.commit()
    scale.measured(times(slower=0.05))
    done = scale.cli("compare", "HEAD", "--report", "out")
    assert done.exit_code == 1
    assert lines_with(done.output, "REGRESSED", SMALL, "5.0% slower", head[:7])
    assert scale.workers is not None
    assert len(scale.workers.calls) == 4
    assert all(accepted[SMALL] == head for _, accepted in scale.workers.calls)
    assert not (scale.path / ".perfsuite/revisions").exists()
    scale.measured(times())
    assert scale.cli("compare", "HEAD").exit_code == 0


@pytest.mark.parametrize("schema", [1, 99])
def test_compare_needs_no_baseline_that_it_can_read(scale: Project, schema: int) -> None:
    path = scale.accept()
    path.write_text(path.read_text().replace(f'"schema": {storage.SCHEMA}', f'"schema": {schema}', 1))
    scale.measured(times(slower=0.05))
    done = scale.cli("compare", "HEAD")
    assert done.exit_code == 1, done.output
    assert lines_with(done.output, "REGRESSED", SMALL, "5.0% slower")
    assert lines_with(done.output, "compared without the noise that a baseline records", f"schema {schema} is ")
    assert scale.cli("gate").exit_code == 4


def test_compare_with_an_unknown_revision_is_an_error(scale: Project) -> None:
    scale.commit()
    done = scale.cli("compare", "v0.0")
    assert done.exit_code == 4
    assert lines_with(done.output, "revision v0.0 is not in this repository", "git log")
    assert scale.workers is not None
    assert not scale.workers.calls


def test_what_cannot_begin_is_refused_before_it_waits_for_its_turn(scale: Project) -> None:
    scale.commit()
    scale.replace("test_scale.py", "3 * x", "3.0 * x")
    scale.monkeypatch.setattr(device_lock, "turn", lambda *_: pytest.fail("it waited"))
    assert lines_with(scale.cli("compare", "v0.0").output, "revision v0.0 is not in this repository")
    assert lines_with(scale.cli("accept", "--reason", "x").output, "uncommitted changes")


def test_compare_refuses_an_interpreter_that_there_is_not(scale: Project) -> None:
    done = scale.cli("compare", "--python", "./absent")
    assert (done.exit_code, done.stdout) == (4, "")
    assert done.stderr.startswith("Error: --python ./absent: no such file")


def test_compare_without_a_match_is_an_error(scale: Project) -> None:
    scale.commit()
    done = scale.cli("compare", "HEAD", "-k", "nothing_of_the_name")
    assert done.exit_code == 4
    assert lines_with(done.output, "nothing to compare")


def test_compare_outside_git_is_an_error(scale: Project) -> None:
    done = scale.cli("compare", "HEAD")
    assert done.exit_code == 4
    assert lines_with(done.output, "not a git repository")


# --- commands of other packages -------------------------------------------------------------------------------------


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Register a command, two that cannot be loaded, one that is no click command, and one named as ours."""
    (tmp_path / "others_commands.py").write_text(
        "import click\n\n\n@click.command()\ndef train():\n    'Train it.'\n    click.echo('trained')\n"
    )
    (tmp_path / "others_broken.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [
        EntryPoint("train", "others_commands:train", command_group.COMMANDS),
        EntryPoint("broken", "others_broken:main", command_group.COMMANDS),
        EntryPoint("absent", "others_commands:absent", command_group.COMMANDS),
        EntryPoint("plain", "others_commands:click", command_group.COMMANDS),
        EntryPoint("gate", "others_commands:train", command_group.COMMANDS),
    ]

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [e for e in entries if e.group == group and name in (None, e.name)]

    monkeypatch.setattr(command_group, "entry_points", entry_points)


@pytest.mark.usefixtures("group")
def test_command_of_another_package_runs() -> None:
    done = CliRunner().invoke(main, ["train"])
    assert (done.exit_code, done.output) == (0, "trained\n")
    assert CliRunner().invoke(main, ["train", "--help"]).exit_code == 0


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", ["command 'broken' of others_broken:main cannot be loaded", "no_such_module"]),
        ("absent", ["command 'absent' of others_commands:absent cannot be loaded"]),
        ("plain", ["others_commands:click", "no click command"]),
    ],
)
def test_broken_command_of_another_package_is_reported_in_one_line(name: str, words: list[str]) -> None:
    done = CliRunner().invoke(main, [name])
    assert done.exit_code == exit_codes.COULD_NOT_BEGIN
    assert done.output.count("\n") == 1
    assert lines_with(done.output, "Error:", *words)


@pytest.mark.usefixtures("group")
def test_help_works_with_a_broken_command_of_another_package() -> None:
    """A broken command of another package does not break the help of all commands; ours are listed first."""
    done = CliRunner().invoke(main, ["--help"])
    assert done.exit_code == 0, done.output
    assert lines_with(done.output, "  train ", "Train it.")
    assert lines_with(done.output, "  broken ", "cannot be loaded")
    assert lines_with(done.output, "  gate ", "Compare every workload")
    assert len(lines_with(done.output, "  gate ")) == 1


# --- table ----------------------------------------------------------------------------------------------------------


def test_table_is_written_between_the_markers(project: Project) -> None:
    project.write("README.md", "before\n<!-- perfsuite:table -->\nold\n<!-- /perfsuite:table -->\nafter\n")
    accepted = Path(__file__).parents[2] / "baselines" / "nvidia-h200.json"
    done = CliRunner().invoke(main, ["table", str(accepted), "--write", "README.md"])
    assert done.exit_code == 0, done.output
    text = Path("README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| geometry/rotor_update | window64 |" in text
    assert "old" not in text


def test_interrupted_command_does_not_blame_the_code(project: Project) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    project.monkeypatch.setattr("perfsuite.doctor.examine", interrupted)
    done = CliRunner().invoke(main, ["doctor"])
    assert (done.exit_code, done.output) == (exit_codes.ENDED_EARLY, "interrupted\n")


def test_table_is_not_written_into_a_file_that_is_no_text(project: Project) -> None:
    Path("README.md").write_bytes(b"\x9f\xff")
    accepted = Path(__file__).parents[2] / "baselines" / "nvidia-h200.json"
    done = CliRunner().invoke(main, ["table", str(accepted), "--write", "README.md"])
    assert done.exit_code == exit_codes.COULD_NOT_BEGIN
    assert done.output == "Error: README.md: not UTF-8 text; name a Markdown file\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table", ""], "it is empty; name a path"),
        (["merge", "report.json", "--report", ""], "it is empty; name a path"),
        (["judge", "", "candidate.py"], "it is empty; name a path"),
        (["calibrate", "--from", ""], "it is empty; name a path"),
        (["calibrate", "--seconds", "nan"], "nan is no finite number"),
        (["gate", "--baselines", "a-file"], "Directory 'a-file' is a file"),
        (["accept", "--reason", "x", "--baselines", "a-file"], "Directory 'a-file' is a file"),
        (["gate", "--report", "a-file"], "Directory 'a-file' is a file"),
        (["merge", "report.json", "--report", "a-file"], "Directory 'a-file' is a file"),
        (["accept", "--reason", "  "], "give --reason"),
        (
            ["accept", "--reason", "x", "--prune", "test_a.py::scale"],
            "test_a.py::scale is a part of one",
        ),
    ],
)
def test_unusable_values_of_options_are_refused(project: Project, arguments: list[str], message: str) -> None:
    project.write("a-file", "")
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output


@pytest.mark.parametrize("arguments", [["nowhere.json"], ["nowhere.json", "--write", "README.md"]])
def test_table_of_a_missing_baseline_is_reported_in_one_line(project: Project, arguments: list[str]) -> None:
    done = CliRunner().invoke(main, ["table", *arguments])
    assert done.exit_code == exit_codes.COULD_NOT_BEGIN
    assert done.output.startswith("Error: nowhere.json: ")
    assert done.output.count("\n") == 1
