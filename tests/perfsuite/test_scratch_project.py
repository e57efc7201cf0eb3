"""A project outside the repository: the README's example is proven, timed, accepted and gated as it stands there.

Real processes and real times, so that nothing here may depend on how fast or how quiet this machine is: whatever the
gate decides, its exit code and what it says must agree.
"""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from scratch import ROOT, SMALL, TWO_LINES, Project, lines_with

from perfsuite import baseline
from perfsuite.records import Status

pytest_plugins = ["pytester"]

DOTS = "test_dots.py::dots::speed[rows256]"
FAST = "return (x * y).sum(-1)"


def example() -> str:
    """The file that the README tells a newcomer to write."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if "test_dots.py" in block]
    assert FAST in text
    return str(text)


FEWER = """
import sys
from perfsuite import cli, gate

gate.STAGES = (gate.Stage(1, 0.001, 0.005), gate.Stage(2, 0.002, 0.0075), gate.Stage(3, 0.002, 0.0075))
gate.SECOND_PROCESSES = gate.compare_look.__kwdefaults__["processes"] = 2
gate.STORED_PROCESSES = gate.stored_look.__kwdefaults__["processes"] = 4
cli.main(sys.argv[1:])
"""
"""`perfsuite` with fewer measuring processes in the second look: all that differs, and half a minute saved."""


def shortened(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    project.write(".fewer/perfsuite_of_few.py", FEWER)
    project.monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{project.path / '.fewer'}")
    return project.process("perfsuite_of_few", *arguments)


def verdict(project: Project, done: subprocess.CompletedProcess[str], id: str) -> Status:
    """The gate's verdict; the exit code and the terminal agree with it."""
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    report = json.loads((project.path / ".perfsuite/report/report.json").read_text())
    assert list(report["verdicts"]) == [id]
    status = Status(report["verdicts"][id]["status"])
    assert (done.returncode == 0) is status.green, done.stdout
    assert lines_with(done.stdout, f"1 {status}"), done.stdout
    return status


def test_the_readmes_example_from_proof_to_gate(project: Project) -> None:
    """In a plain folder, outside git."""
    project.write("test_dots.py", example())

    proven = project.process("pytest", "-m", "correctness")
    assert proven.returncode == 0, proven.stdout
    assert "3 passed, 1 deselected" in proven.stdout

    timed = project.process("pytest", "-m", "perf")
    assert timed.returncode == 0, timed.stdout
    assert "1 passed, 3 deselected" in timed.stdout
    assert lines_with(timed.stdout, "rows256", "×")

    accepted = project.process("perfsuite", "accept", "--reason", "first", "--processes", "3")
    assert accepted.returncode == 0, accepted.stdout
    assert lines_with(accepted.stdout, DOTS, "added at")
    (path,) = (project.path / "baselines").iterdir()
    entry = baseline.load(path).entries[DOTS]
    assert (entry.reason, entry.revision, entry.promises.speedup) == ("first", None, 5.0)
    assert [len(s.processes) for s in entry.sessions] == [3]

    status = verdict(project, shortened(project, "gate"), DOTS)
    assert status in (Status.PASS, Status.IMPROVED, Status.NOISY, Status.REGRESSED)
    assert sorted(p.name for p in project.path.iterdir() if not p.name.startswith((".", "__"))) == [
        "baselines",
        "test_dots.py",
    ]


def test_two_revisions_of_a_project_in_git(project: Project) -> None:
    project.write("test_scale.py", TWO_LINES)
    first = project.commit()
    project.replace("test_scale.py", "3 * x", "3.0 * x")
    done = shortened(project, "compare", "HEAD")
    assert verdict(project, done, SMALL) in (Status.PASS, Status.IMPROVED, Status.NOISY, Status.REGRESSED)
    assert lines_with(done.stdout, "the revision", first[:7]) or "PASS" in done.stdout
    assert project.git("status", "--porcelain", "--untracked-files=no") == "M test_scale.py"
    report = json.loads((project.path / ".perfsuite/report/report.json").read_text())
    assert [set(m["log_ratios"]) for m in report["measurements"][SMALL]] == [{"reference", "accepted"}] * 2


@pytest.mark.parametrize("name", ["check", "measure"])
def test_the_readmes_example_in_a_notebook(project: Project, name: str) -> None:
    import perfsuite

    namespace: dict[str, object] = {"__name__": "notebook"}
    exec(compile(example(), "notebook", "exec"), namespace)
    found, *_ = getattr(perfsuite, name)(namespace["dots"])
    assert found.pair
    if name == "check":
        assert found.worst < 1
        assert found.draws > 0
    else:
        assert set(found.log_ratios) == {"reference"}
        assert found.sides["optimized"].blocks_s
