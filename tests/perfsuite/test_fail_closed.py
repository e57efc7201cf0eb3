"""A gate is green only if every selected workload was measured and passed; otherwise a line names the reason."""

from __future__ import annotations

import datetime
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from scale import FULLY
from scratch import Failure, Project, fails, lines_with, times

from perfsuite.gate import exit_codes
from perfsuite.records import Status, Verdict
from perfsuite.session.modes.gate import Gate

pytest_plugins = ["pytester"]

SCALE = """
    from perfsuite import Pair, Workload, tensor


    def slow(x):
        return x + x + x


    def fast(x):
        return 3 * x


    scale = Pair(
        reference=slow,
        optimized=fast,
        inputs={"x": tensor("n")},
        workloads=[Workload("small", n=64, clock="wall"), Workload("large", n=64, clock="wall")],
    )
"""
OTHER = SCALE.replace("scale", "other").replace(', Workload("large", n=64, clock="wall")', "")
LARGE = "tests/test_scale.py::scale::speed[large]"
LITTLE = "tests/test_scale.py::scale::speed[small]"
THIRD = "tests/test_other.py::other::speed[small]"


@pytest.fixture
def accepted(project: Project) -> Project:
    """Accept three workloads in two modules; later runs measure the same."""
    project.write("tests/test_scale.py", SCALE)
    project.write("tests/test_other.py", OTHER)
    project.accept_again("fail_closed")
    project.measured(times())
    return project


UNDECIDED = exit_codes.UNDECIDED


def red(result: pytest.RunResult, *words: str, code: int = 1) -> str:
    """Assert that the run failed and that one readable line holds all these words; return that line."""
    output = result.stdout.str() + result.stderr.str()
    assert result.ret == code, output
    assert "INTERNALERROR" not in output
    assert "Traceback" not in output
    found = lines_with(output, *words)
    assert found, output
    return found[0]


def green(result: pytest.RunResult) -> str:
    output = result.stdout.str()
    assert result.ret == 0, output
    return output


# --- nothing, or only a part, was measured --------------------------------------------------------------------------


def test_unchanged_code_is_green(accepted: Project) -> None:
    assert "3 PASS" in green(accepted.gate())
    assert accepted.workers is not None
    # Three workloads are too few for a sample, so all run a second process.
    assert [ids for ids, _ in accepted.workers.calls] == [(THIRD, LITTLE, LARGE)] * 2
    assert accepted.workers.proven == [THIRD, LITTLE, LARGE]


@pytest.mark.parametrize("arguments", [["-k", "nothing_of_the_name"], ["tests/test_empty.py"]])
def test_gate_without_selected_items_is_red(accepted: Project, arguments: list[str]) -> None:
    accepted.write("tests/test_empty.py", "def test_nothing(): pass")
    red(accepted.gate(*arguments), "nothing was measured", "perfsuite list", code=UNDECIDED)


def test_gate_in_an_empty_folder_is_red(project: Project) -> None:
    red(project.gate(), "nothing was measured", code=UNDECIDED)


def test_gate_with_only_workloads_of_another_device_is_red(project: Project) -> None:
    project.write("test_scale.py", SCALE.replace('clock="wall"', 'clock="wall", device="cuda"'))
    project.measured(times())
    red(project.gate(), "nothing was measured", "none of 2 selected workloads", "cpu", code=UNDECIDED)


def test_skipped_workloads_are_red(project: Project) -> None:
    project.write("test_scale.py", "import pytest\npytestmark = pytest.mark.skip(reason='later')\n" + _flat(SCALE))
    project.measured(times())
    red(project.gate(), "nothing was measured", "2 selected", code=UNDECIDED)


def test_a_skipped_workload_among_others_is_red(accepted: Project) -> None:
    accepted.write("conftest.py", _SKIP_LARGE)
    red(accepted.gate(), "UNMEASURED", LARGE, "skipped", code=UNDECIDED)


_SKIP_LARGE = """
    import pytest


    def pytest_collection_modifyitems(items):
        for item in items:
            if "large" in item.name:
                item.add_marker(pytest.mark.skip(reason="later"))
"""


def test_a_renamed_workload_is_red(accepted: Project) -> None:
    accepted.replace("tests/test_scale.py", '"large"', '"huge"')
    result = accepted.gate()
    red(result, LARGE, "not collected", "renamed or removed", "perfsuite accept", code=UNDECIDED)
    red(result, "NO_BASELINE", "scale::speed[huge]", code=UNDECIDED)


def test_a_removed_workload_is_red(accepted: Project) -> None:
    accepted.replace("tests/test_scale.py", ', Workload("large", n=64, clock="wall")', "")
    red(accepted.gate(), LARGE, "not collected", code=UNDECIDED)


def test_a_renamed_pair_is_red(accepted: Project) -> None:
    accepted.replace("tests/test_other.py", "other = Pair", "another = Pair")
    red(accepted.gate(), THIRD, "not collected", code=UNDECIDED)


def test_a_removed_module_is_red(accepted: Project) -> None:
    (accepted.path / "tests/test_other.py").unlink()
    red(accepted.gate(), THIRD, "not collected", code=UNDECIDED)
    red(accepted.gate("tests"), THIRD, "not collected", code=UNDECIDED)


def test_deselected_workloads_must_exist_in_a_partial_gate(accepted: Project) -> None:
    part = ("-k", "scale and small", "--perfsuite-partial")
    assert "1 of 3 workloads" in green(accepted.gate(*part))
    accepted.replace("tests/test_other.py", "other = Pair", "another = Pair")
    red(accepted.gate(*part), THIRD, "not collected", code=UNDECIDED)


@pytest.mark.parametrize("selection", [["tests/test_scale.py"], [LITTLE, LARGE], ["-k", "scale"]])
def test_partial_gate_prints_its_share_of_the_accepted_workloads(accepted: Project, selection: list[str]) -> None:
    assert "2 of 3 workloads" in green(accepted.gate(*selection, "--perfsuite-partial"))


@pytest.mark.parametrize("selection", [["tests/test_scale.py"], [LITTLE, LARGE], ["-k", "scale"]])
def test_selection_without_partial_is_red(accepted: Project, selection: list[str]) -> None:
    red(accepted.gate(*selection), "1 of 3 accepted workloads", THIRD, "give --perfsuite-partial", code=UNDECIDED)


@pytest.mark.parametrize(
    "ini", ["testpaths = tests/test_scale.py", "addopts = -k scale", "addopts = --ignore=tests/test_other.py"]
)
def test_configuration_that_narrows_the_collection_is_red(accepted: Project, ini: str) -> None:
    accepted.write("pytest.ini", f"[pytest]\n{ini}")
    red(accepted.gate(), THIRD, code=UNDECIDED)


def test_conftest_that_ignores_a_module_is_red(accepted: Project) -> None:
    accepted.write("conftest.py", 'collect_ignore = ["tests/test_other.py"]')
    red(accepted.gate(), THIRD, "not collected", code=UNDECIDED)
    red(accepted.gate("--perfsuite-partial"), THIRD, "not collected", code=UNDECIDED)


def test_conftest_that_deselects_items_is_red(accepted: Project) -> None:
    accepted.write(
        "conftest.py",
        """
        def pytest_collection_modifyitems(items):
            items[:] = [item for item in items if "other" not in item.nodeid]
    """,
    )
    red(accepted.gate(), "1 of 3 accepted workloads", THIRD, code=UNDECIDED)


def test_removed_workloads_outside_the_given_paths_are_ignored(accepted: Project) -> None:
    (accepted.path / "tests/test_other.py").unlink()
    green(accepted.gate("tests/test_scale.py", "--perfsuite-partial"))


def test_a_module_that_cannot_be_imported_is_red(accepted: Project) -> None:
    accepted.write("tests/test_other.py", "import no_such_module")
    result = accepted.gate()
    assert result.ret == 2
    assert lines_with(result.stdout.str(), "no_such_module")


# --- no baseline, or one of another machine -------------------------------------------------------------------------


def test_missing_baseline_is_red(project: Project) -> None:
    project.write("test_scale.py", SCALE)
    project.measured(times())
    result = project.gate()
    red(
        result,
        "NO_BASELINE",
        "test_scale.py::scale::speed[small]",
        "there is no baselines/cpu",
        "perfsuite accept",
        code=UNDECIDED,
    )
    assert project.workers is not None
    assert len(project.workers.calls) == 1  # only one process


def test_missing_baseline_entry_is_red(accepted: Project) -> None:
    accepted.write("tests/test_third.py", OTHER.replace("other", "third"))
    result = accepted.gate()
    red(result, "NO_BASELINE", "third::speed[small]", "not in baselines/cpu", code=UNDECIDED)
    assert "3 PASS" in result.stdout.str()


def test_baselines_of_other_devices_are_named(accepted: Project) -> None:
    (path,) = (accepted.path / "baselines").glob("*.json")
    path.rename(path.with_name("nvidia-h200.json"))
    result = accepted.gate()
    red(result, "NO_BASELINE", code=UNDECIDED)
    assert "there are: nvidia-h200" in result.stdout.str()


def test_baseline_of_another_machine_is_red(accepted: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from perfsuite.system import machine

    here = machine.identify()
    other = dataclasses.replace(here, cpu="Another CPU", cores=here.cores + 1)
    monkeypatch.setattr(machine, "identify", lambda: other)
    red(accepted.gate(), "WRONG_MACHINE", LITTLE, "Another CPU", "perfsuite accept", code=UNDECIDED)
    assert accepted.workers is not None
    assert not accepted.workers.calls


def test_a_changed_workload_is_red(accepted: Project) -> None:
    accepted.replace("tests/test_other.py", "n=64", "n=128")
    accepted.measured(times(sizes={"n": 128}))
    result = accepted.gate("-k", "other")
    red(result, THIRD, "sizes were {'n': 64}, now {'n': 128}", code=UNDECIDED)


# --- red verdicts ---------------------------------------------------------------------------------------------------

DIED = Failure(status=Status.UNMEASURED, message="the optimized side crashed with SIGSEGV")
WRONG = Failure(status=Status.NOT_EQUIVALENT, message="scale: output is off by 1 at [0]")


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (times(slower=0.05), ["REGRESSED", "5.0% slower"]),
        (times(noise=100), ["NOISY", "is not excluded", "declare margin="]),
        (times(speedup=1.4), ["BELOW_FLOOR", "1.5"]),
        (fails(DIED, only="large"), ["UNMEASURED", LARGE, "SIGSEGV"]),
        (fails(WRONG, only="large"), ["NOT_EQUIVALENT", LARGE, "off by 1"]),
    ],
    ids=["regressed", "noisy", "below_floor", "died", "not_equivalent"],
)
def test_each_red_verdict_makes_the_gate_red(project: Project, outcome: object, words: list[str]) -> None:
    project.write("tests/test_scale.py", SCALE.replace('"large", n=64', '"large", n=64, speedup=1.5'))
    project.accept()
    project.measured(outcome)
    result = project.gate("--perfsuite-report=out")
    red(result, *words, code=UNDECIDED if words[0] == "NOISY" else 1)  # a crash of the optimized side is its fault
    report = json.loads((project.path / "out/report.json").read_text())
    assert any(v["status"] == words[0] for v in report["verdicts"].values())


def test_lost_workload_is_red(accepted: Project) -> None:
    """A workload is lost if its measuring process reports nothing about it."""
    assert accepted.workers is not None
    run = accepted.workers.run
    accepted.workers.run = lambda *given: (o for o in run(*given) if o[0] != LARGE)  # type: ignore[method-assign]
    red(accepted.gate(), "UNMEASURED", LARGE, code=UNDECIDED)


def test_improved_workloads_are_green(accepted: Project) -> None:
    accepted.measured(times(slower=-0.3))
    assert "3 IMPROVED" in green(accepted.gate())


def test_one_red_workload_leaves_the_others_green(accepted: Project) -> None:
    slow = times(slower=0.05)
    accepted.measured(lambda id, process, second: (slow if id == LARGE else times())(id, process, second))
    output = accepted.gate().stdout.str()
    assert "1 REGRESSED" in output
    assert "2 PASS" in output
    assert not lines_with(output, "✗", LITTLE)


def test_plain_run_checks_only_promises(project: Project) -> None:
    project.write("tests/test_scale.py", SCALE.replace('"large", n=64', '"large", n=64, speedup=3.0'))
    project.measured(times())
    result = project.run("-m", "perf")
    red(result, "BELOW_FLOOR", LARGE, "3×")
    result.assert_outcomes(passed=1, failed=1)


# --- waivers --------------------------------------------------------------------------------------------------------


def waive(project: Project, until: datetime.date, workload: str = LARGE) -> Path:
    text = f'[[waiver]]\nworkload = "{workload}"\nowner = "Ada"\nreason = "a new compiler"\nuntil = {until}\n'
    return project.write("baselines/waivers.toml", text)


TODAY = datetime.date.today()
DAY = datetime.timedelta(days=1)


def test_a_waived_regression_is_green(accepted: Project) -> None:
    waive(accepted, TODAY + DAY)
    slow = times(slower=0.05)
    accepted.measured(lambda id, process, second: (slow if id == LARGE else times())(id, process, second))
    output = green(accepted.gate())
    assert lines_with(output, "WAIVED", "a new compiler", "owner Ada", LARGE, "REGRESSED")
    assert lines_with(output, "1 workload excused; without the waivers this run is red: the code is at fault")


def test_waiver_does_not_cover_a_wrong_result(accepted: Project) -> None:
    waive(accepted, TODAY + DAY)
    accepted.measured(fails(WRONG, only="large"))
    red(accepted.gate(), "NOT_EQUIVALENT", LARGE)


def test_expired_waiver_is_red(accepted: Project) -> None:
    waive(accepted, TODAY - 2 * DAY)
    red(accepted.gate(), "ERROR", "waivers.toml", "ended on", LARGE, code=4)


def test_waiver_of_an_unknown_workload_is_red(accepted: Project) -> None:
    waive(accepted, TODAY + DAY, "tests/test_gone.py::gone::speed[small]")
    red(accepted.gate(), "ERROR", "waivers.toml", "no workload", "test_gone.py", code=4)


def test_partial_gate_allows_waivers_of_workloads_in_other_files(accepted: Project) -> None:
    """A waiver may be for a workload that is accepted only on another device, and whose file is not collected here."""
    waive(accepted, TODAY + DAY, "tests/test_third.py::third::speed[small]")
    accepted.measured(times())
    green(accepted.gate("tests/test_scale.py", "--perfsuite-partial"))
    red(accepted.gate("tests", "--perfsuite-partial"), "ERROR", "waivers.toml", "no workload", "test_third.py", code=4)


# --- the command line -----------------------------------------------------------------------------------------------

XDIST = """
    def pytest_addoption(parser):
        # As xdist does, where it is not installed; not addoption, which keeps small letters to pytest itself.
        parser.getgroup("xdist")._addoption("-n", "--numprocesses", dest="numprocesses", type=int)
"""


@pytest.mark.parametrize("gate", [["--benchmark-compare"], []])
def test_gate_under_xdist_is_red(accepted: Project, gate: list[str]) -> None:
    beside = []
    if importlib.util.find_spec("xdist") is None:
        accepted.write("beside.py", XDIST)
        accepted.pytester.syspathinsert()
        beside = ["-p", "beside"]
    red(accepted.run(*beside, "-n", "2", "-m", "perf", *gate), "ERROR", "xdist", "without -n", code=4)


def test_timed_items_in_an_xdist_worker_are_red(accepted: Project) -> None:
    accepted.write("conftest.py", "def pytest_configure(config):\n    config.workerinput = {'workerid': 'gw0'}")
    result = accepted.run("-k", "scale and small")
    red(result, "UNMEASURED", "without -n")
    red(result, "scale::speed[small] - UNMEASURED")
    result.assert_outcomes(failed=1)
    assert accepted.workers is not None
    assert not accepted.workers.calls


@FULLY  # it starts a worker
def test_proofs_run_in_an_xdist_worker(project: Project) -> None:
    project.write("test_scale.py", SCALE)
    project.write("conftest.py", "def pytest_configure(config):\n    config.workerinput = {'workerid': 'gw0'}")
    project.run("-m", "correctness").assert_outcomes(passed=6)


def test_path_taken_as_the_value_of_benchmark_compare_is_red(accepted: Project) -> None:
    result = accepted.run("-m", "perf", "--benchmark-compare", "tests/")
    red(result, "ERROR", "--benchmark-compare took 'tests/'", "write --benchmark-compare last", code=4)
    assert accepted.workers is not None
    assert not accepted.workers.calls


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "perf"],
        pytest.param(["-m", "perf and not gpu"], marks=FULLY),
        ["-k", "speed"],
        pytest.param([LITTLE], marks=FULLY),
        pytest.param(["-m", "correctness or perf"], marks=FULLY),
    ],
)
def test_gate_applies_for_every_way_of_selecting_items(accepted: Project, arguments: list[str]) -> None:
    accepted.measured(times(slower=0.05))
    red(accepted.run(*arguments, "--benchmark-compare"), "REGRESSED", LITTLE)


def test_gate_on_proofs_only_is_red(accepted: Project) -> None:
    red(
        accepted.run("-m", "correctness", "-k", "integrity", "--benchmark-compare"),
        "nothing was measured",
        code=UNDECIDED,
    )


def test_gate_reports_that_it_could_not_load_the_accepted_revision(project: Project) -> None:
    project.write("test_scale.py", SCALE)
    project.accept(None, "--allow-dirty")
    shutil.rmtree(project.path / ".git")
    project.measured(times(slower=0.05))
    red(project.gate(), "REGRESSED", "compared with stored figures", "git")


def test_run_that_stops_at_the_first_failure_is_red(accepted: Project) -> None:
    accepted.measured(times(slower=0.05))
    red(accepted.gate("-x"), "REGRESSED")


ENDINGS = {
    "exit in a hook": 'import pytest\ndef pytest_runtest_setup(item): pytest.exit("enough", returncode=0)',
    "exit at a report": 'import pytest\ndef pytest_runtest_logreport(report): pytest.exit("x", returncode=0)',
    "exit when collected": 'import pytest\ndef pytest_collection_finish(session): pytest.exit("x", returncode=0)',
    "exit when the session starts": 'import pytest\ndef pytest_sessionstart(session): pytest.exit("x", returncode=0)',
    "exit when it finishes": 'import pytest\ndef pytest_sessionfinish(session): pytest.exit("x", returncode=0)',
    "the code set to 0": (
        "import pytest\n@pytest.hookimpl(trylast=True)\n"
        "def pytest_sessionfinish(session): session.exitstatus = 0\n"
        "def pytest_runtestloop(session): return True"
    ),
    "no test run": "def pytest_runtestloop(session): return True",
    "exit at import": "import sys\nsys.exit(0)",
    "pytest.exit at import": "import pytest\npytest.exit('x', returncode=0)",
}
"""Ways in which a conftest can end a run with exit code 0."""


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("command", [pytest.param("pytest", marks=FULLY), "perfsuite"])
def test_run_ended_early_by_a_conftest_is_red(accepted: Project, ending: str, command: str) -> None:
    (accepted.path / "conftest.py").write_text(ending)
    result = accepted.gate() if command == "pytest" else accepted.cli("gate")
    code = result.ret if isinstance(result, pytest.RunResult) else result.exit_code
    assert code not in (0, 5)


@pytest.mark.parametrize(
    "option", ["--co", "--fixtures", "--cache-show", "--setup-plan", "--perfsuite-mode=list", "--markers"]
)
@pytest.mark.parametrize("place", ["addopts", pytest.param("PYTEST_ADDOPTS", marks=FULLY), "after --"])
def test_pytest_option_that_runs_no_test_is_refused(
    accepted: Project, monkeypatch: pytest.MonkeyPatch, option: str, place: str
) -> None:
    if place == "addopts":
        accepted.write("pytest.ini", f"[pytest]\naddopts = {option}")
    elif place == "PYTEST_ADDOPTS":
        monkeypatch.setenv("PYTEST_ADDOPTS", option)
    done = accepted.cli("gate", *(["--", option] if place == "after --" else []))
    if option == "--perfsuite-mode=list" and place != "after --":
        assert done.exit_code == 0  # the command's own mode wins
        assert "3 PASS" in done.output
    else:
        assert done.exit_code == 2


def test_baselines_option_names_another_folder(accepted: Project) -> None:
    (accepted.path / "baselines").rename(accepted.path / "elsewhere")
    red(accepted.gate(), "NO_BASELINE", code=UNDECIDED)
    green(accepted.gate("--perfsuite-baselines=elsewhere"))


def test_gate_in_a_subfolder_uses_the_baseline_of_the_project(
    accepted: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted.write("pytest.ini", "[pytest]")
    monkeypatch.chdir(accepted.path / "tests")
    green(accepted.gate())
    (accepted.path / "tests/test_other.py").unlink()
    red(accepted.gate(), THIRD, "not collected", code=UNDECIDED)


def _flat(text: str) -> str:
    lines = text.strip("\n").splitlines()
    return "\n".join(line[4:] for line in lines)


def test_internal_error_is_shown_once_and_makes_every_workload_red(accepted: Project) -> None:
    tried = []

    def broken(self: Gate) -> dict[str, Verdict]:
        tried.append(1)
        raise TypeError("no such thing")

    accepted.monkeypatch.setattr(Gate, "_judge_all", broken)
    done = accepted.cli("gate")
    assert done.exit_code == UNDECIDED, done.output
    assert tried == [1]
    assert done.output.count("raise TypeError") == 1
    for id in (LARGE, LITTLE, THIRD):
        assert lines_with(done.output, f"UNMEASURED {id}", "TypeError: no such thing", "report this"), done.output
