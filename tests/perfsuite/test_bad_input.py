"""Mistakes of a user or a machine give one clear line with the remedy, and an exit code other than 0."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scale import FULLY, some
from scratch import ROOT, SMALL, TWO_LINES, Failure, Job, Project, lines_with, times, wait_for

from perfsuite.codec import from_json, to_json
from perfsuite.records import Status
from perfsuite.session.journal import JOB
from perfsuite.session.tasks import Task

pytest_plugins = ["pytester"]


def assert_says(result: pytest.RunResult, *words: str, code: int = 1) -> str:
    """Assert that the run ended with this code, and that one line holds all these words; return that line."""
    output = result.stdout.str() + result.stderr.str()
    assert result.ret == code, output
    assert "INTERNALERROR" not in output
    assert "Traceback" not in output
    found = lines_with(output, *words)
    assert found, output
    return found[0]


# --- a pair that is declared wrongly --------------------------------------------------------------------------------

WORKLOAD = 'Workload("small", n=64, clock="wall")'


@pytest.mark.parametrize(
    ("workloads", "words"),
    [
        ("", ["pair 'scale' has no workload", 'add workloads=[Workload("name", n=…)]']),
        (f"{WORKLOAD}, {WORKLOAD}", ["two workloads called 'small'", "rename one"]),
        ('Workload("small")', ["workload 'small'", "size 'n' has no value", "give n=…"]),
        ('Workload("small", n=64, m=2)', ["workload 'small'", "no input has a size 'm'", "the sizes are n"]),
        ('Workload("small", n=64, clock="sun")', ["workload 'small'", "clock='sun'", "device, wall"]),
        ('Workload("small", n=64, speedup=0)', ["workload 'small'", "speedup=0", "above 0"]),
        ('Workload("small", n=64, device="tpu")', ["workload 'small'", "device='tpu'", "cpu, cuda"]),
    ],
)
@pytest.mark.parametrize("arguments", [["-m", "correctness"], ["-m", "perf", "--benchmark-compare"]])
def test_wrong_workload_is_reported_in_one_line(
    project: Project, workloads: str, words: list[str], arguments: list[str]
) -> None:
    project.write("test_scale.py", TWO_LINES.replace(WORKLOAD, workloads))
    result = project.run(*arguments)
    assert_says(result, *words, code=2)
    assert result.stdout.str().count(words[0]) <= 2  # once, and in pytest's summary


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("workloads=", 'mutates={"z"}, workloads=', ["mutates={'z'}", "no such input", "x"]),
        ("workloads=", 'dtypes=("float8",), workloads=', ["float8", "float32"]),
        ("workloads=", "dtypes=(), workloads=", ["dtypes is empty"]),
        ("optimized=fast", "optimized=stateful(fast)", ["one side is stateful", "wrap both"]),
        ("workloads=", 'rivals={"reference": slow}, workloads=', ["may not be called 'reference'"]),
    ],
)
def test_wrong_pair_declaration_is_reported_with_its_location(
    project: Project, old: str, new: str, words: list[str]
) -> None:
    text = TWO_LINES.replace("import Pair", "import Pair, stateful").replace(old, new)
    project.write("test_scale.py", text)
    result = project.run()
    assert_says(result, *words, code=2)
    lines = lines_with(result.stdout.str(), *words)
    assert all("test_scale.py:" in line or line.startswith("ERROR") for line in lines)
    assert ": in __init__" not in result.stdout.str(), "no frames of a traceback"


# --- an optimized side that fails during a proof --------------------------------------------------------------------

MISBEHAVIOUR: dict[str, tuple[str, list[str]]] = {
    "raises": (
        "raise KeyError('no such tile')",
        ["scale: the optimized side raises KeyError at", "test_scale.py:9", "no such tile"],
    ),
    "hangs": (
        "import time; time.sleep(30)",
        [
            "scale: in the optimized side at ",
            "test_scale.py:9: hangs: ",
            "limit of 0.5 s",
            "raise the pair's time_limit",
        ],
    ),
    "memory": (
        "import torch; raise torch.OutOfMemoryError('tried to allocate 7 EiB')",
        ["scale:", "out of memory", "7 EiB"],
    ),
    "exits": ("import sys; sys.exit(3)", ["scale:", "SystemExit"]),
    "none": ("return None", ["scale:", "output"]),
    "two": ("return 3 * x, x", ["scale:", "output", "2"]),
    "shape": ("return (3 * x)[:-1]", ["scale:", "shape"]),
    "dtype": ("return (3 * x).double()", ["scale:", "dtype", "float64"]),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_optimized_side_that_fails_during_a_proof_is_reported(project: Project, name: str) -> None:
    body, words = MISBEHAVIOUR[name]
    text = TWO_LINES.replace("return 3 * x", body)
    if name == "hangs":
        project.write("test_scale.py", TWO_LINES)
        project.run("-k", "equivalence")  # torch's lazy imports would otherwise count towards the time limit
        text = text.replace("workloads=", "time_limit=0.5, workloads=")
    project.write("test_scale.py", text)
    result = project.run("-k", "equivalence", "--perfsuite-profile=dev")  # `ci` doubles the time limit
    assert_says(result, *words)
    result.assert_outcomes(failed=1)
    assert lines_with(result.stdout.str(), "reproduce: pytest ")


def test_side_with_keyword_only_inputs_is_reported_with_the_order_of_inputs(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES.replace("def fast(x)", "def fast(*, x)"))
    words = ("scale: the optimized side raises TypeError", "called with its inputs by position, in this order: x")
    assert_says(project.run("-k", "equivalence"), *words)


def test_reference_that_raises_is_reported(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES.replace("return x + x + x", "raise ValueError('n is odd')"))
    assert_says(project.run("-k", "equivalence"), "scale: the reference raises ValueError", "n is odd", "sizes=")


# --- an optimized side that fails while it is timed -----------------------------------------------------------------


def timed(project: Project, id: str) -> Failure:
    """Return the failure reported for a workload that cannot be timed; the measuring process is this one."""
    reader, writer = os.pipe()
    job, out = project.path / "job.json", project.path / "out.jsonl"
    job.write_text(json.dumps(to_json(Job(out=str(out), tasks=reader))))
    os.write(writer, f"{json.dumps({'task': to_json(Task(id=id))})}\n".encode())
    os.close(writer)
    project.monkeypatch.setenv(JOB, str(job))
    result = project.run("test_scale.py")
    assert result.ret == 0, result.stdout.str()
    events = [json.loads(line.partition(" ")[2]) for line in out.read_text().splitlines()]
    assert [e["event"] for e in events][:2] == ["ready", "begin"]
    assert {e["id"] for e in events[1:]} == {id}
    fields = {k: v for k, v in events[-1].items() if k not in ("event", "id")}
    return from_json(Failure, fields)


@pytest.mark.parametrize("name", sorted(MISBEHAVIOUR.keys() - {"hangs", "exits"}))
def test_optimized_side_that_fails_while_timed_is_reported(project: Project, name: str) -> None:
    body, words = MISBEHAVIOUR[name]
    project.write("test_scale.py", TWO_LINES.replace("return 3 * x", body))
    failure = timed(project, SMALL)
    wrong = name in ("none", "two", "shape", "dtype")
    assert failure.status is (Status.NOT_EQUIVALENT if wrong else Status.UNMEASURED)
    assert failure.message.count("\n") <= 2
    if name == "raises":
        assert failure.message == "the optimized side raises KeyError: 'no such tile'"
    elif name == "memory":
        assert failure.message == "the optimized side runs out of device memory"
    else:
        assert all(w in failure.message for w in words), failure.message


def test_truth_that_lacks_memory_is_not_reported_as_the_optimized_side(project: Project) -> None:
    raises = "(_ for _ in ()).throw(torch.OutOfMemoryError())"
    body = f"return {raises} if x.dtype is torch.float64 else x + x + x"
    text = TWO_LINES.replace("return x + x + x", f"import torch; {body}")
    project.write("test_scale.py", text)
    words = "the reference in float64 runs out of device memory; declare truth=, the same function with less memory"
    assert timed(project, SMALL).message == words


def test_missing_job_file_is_reported(project: Project) -> None:
    project.monkeypatch.setenv("PERFSUITE_JOB", str(project.path / "gone.json"))
    project.write("test_scale.py", TWO_LINES)
    assert_says(project.run(), "PERFSUITE_JOB", "not a job file", "unset PERFSUITE_JOB", code=4)


def test_workload_that_a_worker_cannot_collect_is_unmeasured(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    failure = timed(project, SMALL.replace("small", "gone"))
    assert failure == Failure(status=Status.UNMEASURED, message="it could not be collected again in a worker")


# --- no triton ------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_triton(project: Project) -> Project:
    project.write("no_triton.py", "import sys\nsys.modules['triton'] = None")
    return project


@FULLY
def test_pairs_without_kernels_are_proven_without_triton(without_triton: Project) -> None:
    without_triton.write("test_scale.py", TWO_LINES)
    done = without_triton.process("pytest", "-p", "no_triton", "-m", "correctness", "-W", "error")
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


@FULLY
def test_module_that_imports_triton_reports_that_triton_is_missing(without_triton: Project) -> None:
    without_triton.write("test_scale.py", _dedented("import triton", TWO_LINES))
    done = without_triton.process("pytest", "-p", "no_triton", "-m", "correctness")
    assert done.returncode == 2
    assert lines_with(done.stdout, "ModuleNotFoundError: import of triton halted"), done.stdout


@FULLY
def test_optimized_modules_can_be_imported_without_triton() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "optimized").rglob("*.py"))
        if path.name != "__init__.py"
    ]
    assert modules
    code = f"import sys; sys.modules['triton'] = None\nimport importlib\nfor m in {modules}: importlib.import_module(m)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _dedented(first: str, text: str) -> str:
    return "\n".join(["    " + first, *text.strip("\n").splitlines()])


# --- damaged baseline files -----------------------------------------------------------------------------------------


def _edited(text: str) -> str:
    data = json.loads(text)
    data["benchmarks"][1]["extra_info"]["perfsuite"]["reason"] = "another"
    return json.dumps(data)


def _schema(schema: object) -> Callable[[str], str]:
    return lambda text: json.dumps(
        {**json.loads(text), "perfsuite": {**json.loads(text)["perfsuite"], "schema": schema}}
    )


DAMAGE: dict[str, tuple[Callable[[str], str], list[str]]] = {
    "truncated": (
        lambda text: text[: len(text) // 2],
        ["cut short or damaged", "restore it from git, or move it away and record a baseline with `perfsuite accept`"],
    ),
    "empty": (lambda text: "", ["the file is empty", "restore it from git"]),
    "edited": (_edited, ["edited by hand", "restore it from git"]),
    "foreign": (lambda text: json.dumps({"benchmarks": []}), ["perfsuite did not write", "move it away"]),
    "newer": (_schema(99), ["schema 99 is newer", "upgrade perfsuite"]),
    "older": (_schema(0), ["schema 0 is unknown"]),
    "not_json": (lambda text: "<<<<<<< HEAD\n" + text, ["not valid JSON"]),
    "a_list": (lambda text: "[1]", ["not a table"]),
}


@pytest.mark.parametrize("name", some(DAMAGE, ("truncated", "edited", "foreign", "newer")))
def test_damaged_baseline_is_reported_before_measuring_and_left_unchanged(project: Project, name: str) -> None:
    damage, words = DAMAGE[name]
    project.write("test_scale.py", TWO_LINES)
    path = project.accept()
    path.write_text(damage(path.read_text()))
    before = path.read_bytes()
    workers = project.measured(times())

    assert_says(project.gate(), "ERROR", path.name, *words, code=4)
    accepted = project.cli("accept", "--reason", "again")
    assert accepted.exit_code == 4
    assert lines_with(accepted.output, path.name, *words), accepted.output
    listed = project.cli("list")
    assert listed.exit_code == 10
    assert lines_with(listed.output, path.name, *words), listed.output

    assert path.read_bytes() == before
    assert not workers.calls  # reported before minutes of measuring


# --- folders that cannot be written ---------------------------------------------------------------------------------


def test_accept_reports_a_baselines_folder_that_cannot_be_written(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.commit()
    project.write("baselines", "a file in the place of the folder")
    workers = project.measured(times())
    done = project.cli("accept", "--reason", "the first")
    assert not workers.calls
    assert done.exit_code == 4
    assert "Traceback" not in done.output
    assert "INTERNALERROR" not in done.output
    assert lines_with(done.output, "baselines", "cannot be written", "make the folder writable"), done.output


def test_full_disk_leaves_the_baseline_unchanged(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write("test_scale.py", TWO_LINES)
    path = project.accept()
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    project.measured(times(speedup=3.0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = project.cli("accept", "--reason", "again")
    assert done.exit_code == 4
    assert lines_with(done.output, "cannot be written", "No space left on device", "nothing was changed"), done.output
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == [".perfsuite", path.name]


@pytest.mark.parametrize(
    ("command", "code"),
    [(["gate"], 10), (["accept", "--reason", "x"], 4), (["compare", "HEAD"], 4), (["run", "-k", "speed"], 10)],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_report_a_project_folder_that_cannot_be_written(
    project: Project, command: list[str], code: int
) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.write("test_other.py", TWO_LINES.replace("scale", "other"))
    project.write(".perfsuite", "a file in the place of the folder")
    project.commit()
    done = project.cli(*command, *(["--report", "out"] if command[0] != "accept" else []))
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    assert "INTERNALERROR" not in done.output
    assert lines_with(done.output, "✗", ".perfsuite/", "cannot be", "writable"), done.output


# --- errors in reports: at most one line, and the same verdict and exit code ----------------------------------------

OUTCOMES = {"green": (times(), 0), "red": (times(slower=0.05), 1), "undecided": (times(noise=100.0), 10)}


@pytest.fixture(params=OUTCOMES)
def verdict(request: pytest.FixtureRequest, project: Project) -> tuple[Project, int]:
    """Prepare a gate that will end with this exit code."""
    outcome, code = OUTCOMES[request.param]
    project.write("test_scale.py", TWO_LINES)
    project.accept()
    project.measured(outcome)
    return project, code


@pytest.mark.parametrize("command", [["gate"], ["run"], ["compare", "HEAD"], ["compare", "--python", sys.executable]])
def test_folder_in_which_no_report_can_be_written_is_refused_before_measuring(
    project: Project, command: list[str]
) -> None:
    project.write("test_scale.py", TWO_LINES)
    project.commit()
    workers = project.measured(times())
    project.write("out", "a file in the place of the folder")
    done = project.cli(*command, "--report", "out/below")
    assert done.exit_code == 4, done.output
    assert len(lines_with(done.output, "cannot write into out/below: Not a directory; make it writable, or name")) == 1
    assert "Traceback" not in done.output
    if command[0] == "gate":
        assert_says(project.gate("--perfsuite-report=out"), "ERROR: cannot write into out: File exists", code=4)
    assert not workers.calls


def test_report_that_cannot_be_written_does_not_change_the_exit_code(verdict: tuple[Project, int]) -> None:
    project, code = verdict
    project.write("out/report.json/file", "a folder in the place of the file")
    for done in (project.cli("gate", "--report", "out", "--json"), project.cli("gate", "--report", "out")):
        assert done.exit_code == code, done.output
        assert len(lines_with(done.output, "no report: cannot write out/report.json", "make its folder writable")) == 1
        assert "Traceback" not in done.output
    result = project.gate("--perfsuite-report=out")
    assert result.ret == code
    assert len(lines_with(result.stdout.str(), "no report: cannot write out/report.json")) == 1


def test_older_report_that_cannot_be_removed_is_not_shown(verdict: tuple[Project, int]) -> None:
    project, code = verdict
    project.monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "summary.md"))
    project.write("out/report.json/file", "a folder in the place of the file")
    done = project.cli("gate", "--report", "out", "--json")
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert len(lines_with(done.stderr, "no report: cannot write out/report.json")) == 1
    assert not (project.path / "summary.md").exists()


@pytest.mark.parametrize("place", ["", pytest.param("folder", marks=FULLY), pytest.param("folder/below", marks=FULLY)])
def test_job_summary_that_cannot_be_written_does_not_change_the_exit_code(
    verdict: tuple[Project, int], place: str
) -> None:
    project, code = verdict
    (project.path / "folder").mkdir()
    summary = project.path / (place or "\0") if place != "folder/below" else project.path / "gone/summary.md"
    project.monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary) if place else "/proc/no-summary")
    done = project.cli("gate")
    assert done.exit_code == code, done.output
    assert len(lines_with(done.output, "cannot write the job summary")) == 1
    assert "Traceback" not in done.output
    assert (project.path / ".perfsuite/report/report.json").exists()
    merged = project.cli("merge", ".perfsuite/report/report.json", "--report", "whole")
    assert len(lines_with(merged.output, "cannot write the job summary")) == 1
    assert merged.exit_code == max(code, 10) if code != 1 else 1  # the report is not of a shard


ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SHELL = """
import json
import sys

from scratch import FakeWorkers, times

from perfsuite import cli
from perfsuite.session.modes import base
from perfsuite.system import tamper

tamper.check = lambda: None
base.Workers = FakeWorkers(times(slower=float(sys.argv[1])))
for command in json.loads(sys.argv[2]):
    sys.stdout.reconfigure(errors="strict")  # as in a process of its own
    try:
        cli.main(command)
    except SystemExit as end:
        print("ENDED", end.code)
        sys.stdout.flush()
"""
"""Program that runs the commands in turn and prints each exit code."""


@FULLY
@pytest.mark.parametrize(("slower", "code"), [(0.0, 0), (0.05, 1)])
def test_commands_work_in_an_ascii_terminal(project: Project, slower: float, code: int) -> None:
    project.write("test_scale.py", TWO_LINES)
    path = project.accept()
    project.write(".shell/shell.py", SHELL)
    paths = f"{ROOT}:{ROOT / 'tests/perfsuite'}:{project.path / '.shell'}"
    merge = ["merge", ".perfsuite/report/report.json", "--report", "whole"]
    commands = [["gate", "--json"], ["gate"], ["list"], ["table", str(path)], merge]
    environment = {**os.environ, **ASCII, "PYTHONPATH": paths}
    done = project.process("shell", str(slower), json.dumps(commands), env=environment)
    everything = done.stdout + done.stderr
    assert done.returncode == 0, everything
    assert "Traceback" not in everything
    assert "Error" not in everything
    *shown, rest = re.split(r"ENDED (\d+)\n", done.stdout)
    assert not rest
    assert list(map(int, shown[1::2])) == [code, code, 0, 0, 1 if code else 10], everything  # not a shard's report
    gated_json, gated, listed, table, merged = shown[::2]
    assert json.loads(gated_json)["verdicts"][SMALL]["status"] == ("REGRESSED" if code else "PASS")
    for text in (gated, merged):
        assert lines_with(text, "? REGRESSED" if code else "1 PASS", "?" if code else "")
    assert lines_with(listed, "small")
    assert lines_with(table, "small")


def test_gpu_that_the_driver_does_not_identify_is_reported(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is a GPU but the driver does not name it, one line says so."""
    from perfsuite.errors import MachineError
    from perfsuite.system import machine

    def unknown() -> None:
        raise MachineError("there is a GPU here, but which is not known: the driver does not answer")

    project.write("test_scale.py", TWO_LINES)
    project.commit()
    project.measured(times())
    monkeypatch.setattr(machine, "identify", unknown)
    assert_says(project.gate("--perfsuite-report=out"), "there is a GPU here", code=4)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")  # annotations need the same report
    assert_says(project.gate(), "there is a GPU here", code=4)
    assert_says(project.run("-m", "perf"), "there is a GPU here", code=10)
    for command in (["accept", "--reason", "x"], ["compare", "HEAD"]):
        done = project.cli(*command)
        assert done.exit_code == 4, done.output
        assert lines_with(done.output, "there is a GPU here"), done.output
        assert "Traceback" not in done.output


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------

HANGS = """
    import time
    from pathlib import Path

    from perfsuite import Pair, Workload, tensor

    JOURNALS = Path(__file__).parent / ".perfsuite/workers"


    def fast(x):
        while any('"measurement"' in path.read_text() for path in JOURNALS.glob("*.jsonl")):
            time.sleep(0.05)
        return 3 * x


    scale = Pair(
        reference=lambda x: x + x + x,
        optimized=fast,
        inputs={"x": tensor("n")},
        workloads=[Workload("small", n=64, clock="wall"), Workload("other", n=65, clock="wall")],
    )
"""
"""Both workloads can be proven, and the first can be timed; after that no call returns."""


@FULLY
@pytest.mark.parametrize("command", [["gate", "--json"], ["accept", "--reason", "again"]], ids=lambda c: c[0])
def test_ctrl_c_keeps_the_baseline_and_reports_what_was_measured(project: Project, command: list[str]) -> None:
    """Ctrl-C during the second workload gives exit code 2, leaves the baseline, and reports what was measured."""
    project.write("test_scale.py", HANGS)
    small, other = times(), times(sizes={"n": 65})
    path = project.accept(lambda id, process, second: (other if "other" in id else small)(id, process, second))
    before = _contents(path.parent)
    log = project.path / ".perfsuite/log"
    with log.open("w") as sink:
        child = subprocess.Popen(
            project.command("perfsuite", *command),
            cwd=project.path,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell starts background processes with Ctrl-C ignored, and a child inherits that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        # The progress line shows that the parent has received the first measurement.
        wait_for(lambda: child.poll() is not None or lines_with(log.read_text(), "scale[small]", "optimized"))
        assert child.poll() is None, log.read_text()
        child.send_signal(signal.SIGINT)
        child.wait(timeout=120)
    finally:
        child.kill()
        child.wait()
    output = log.read_text()
    assert child.returncode == 2, output
    assert _contents(path.parent) == before
    assert not _workers_of(project)
    assert "INTERNALERROR" not in output
    if command[0] == "gate":
        report = json.loads((project.path / ".perfsuite/report/report.json").read_text())
        assert report["complete"] is False
        assert list(report["measurements"]) == [SMALL]
        assert lines_with(output, "interrupted", "what was measured until then")
    else:
        assert lines_with(output, "the baseline is unchanged; the same command", "resumes")


def _contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _workers_of(project: Project) -> list[str]:
    """Return the processes that still work on the project's jobs."""
    wanted = f"PERFSUITE_JOB={project.path}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:
            continue
    return found
