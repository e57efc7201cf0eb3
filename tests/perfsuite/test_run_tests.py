"""The runs of pytest that `make test` starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from scale import FULLY
from scratch import ROOT

from tools.run_tests import compile_modules, merge_junit, passes, worst

BESIDE = ("-n", "auto", "--dist", "worksteal")


@pytest.mark.parametrize(
    ("arguments", "marks"), [([], "not perf"), (["-m", "correctness"], "correctness"), (["-mperf"], "perf")]
)
def test_without_a_gpu_all_tests_run_in_parallel(arguments: list[str], marks: str) -> None:
    assert passes([*arguments, "-k", "x"], on_gpu=False, beside=BESIDE) == [["-m", marks, *BESIDE, "-k", "x"]]


def test_on_a_gpu_proofs_run_first_and_without_xdist() -> None:
    assert passes(["-k", "x", "-n", "0"], on_gpu=True, beside=BESIDE) == [
        ["-m", "(not perf) and correctness", "-k", "x", "-n", "0"],
        ["-m", "(not perf) and not correctness", *BESIDE, "-k", "x", "-n", "0"],
    ]


@pytest.mark.parametrize(("codes", "code"), [([0], 0), ([5], 5), ([0, 5], 0), ([5, 1], 1), ([5, 5], 5), ([1, 0], 1)])
def test_exit_code_5_is_returned_only_if_no_run_has_tests(codes: list[int], code: int) -> None:
    assert worst(codes) == code


def test_modules_are_compiled_before_the_workers_start_unless_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[str] = []

    class Collects:
        def __init__(self, command: list[str], **options: object) -> None:
            parts.append(command[-1])

        def wait(self) -> None:
            parts.append("waited")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", Collects)
    (tmp_path / "test_x.py").touch()
    compile_modules(["-q", "test_x.py::test_y"])
    assert not parts
    compile_modules(["-k", "y"])
    assert parts == ["tests/perfsuite", "--ignore=tests/perfsuite", "waited", "waited"]
    (tmp_path / "tests/__pycache__").mkdir(parents=True)
    (tmp_path / "tests/__pycache__/test_x.cpython-311-pytest-9.2.0.pyc").touch()
    compile_modules([])
    assert len(parts) == 4


@FULLY  # it collects in a separate process
def test_the_arguments_reach_pytest(tmp_path: Path) -> None:
    file, report = "tests/perfsuite/test_run_tests.py", tmp_path / "tests.xml"
    command = [sys.executable, "-m", "tools.run_tests", "-q", "-n", "0", "-k", "reach_pytest", "--collect-only"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, file, "--junitxml", str(report)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{file}::test_the_arguments_reach_pytest" in done.stdout
    assert {suite.get("name") for suite in ElementTree.parse(report).iter("testsuite")} == {"pytest"}


def test_one_junit_file_holds_the_tests_of_all_runs(tmp_path: Path) -> None:
    for name in ("first", "second"):
        suite = f'<testsuite name="{name}" tests="1"><testcase name="of {name}" /></testsuite>'
        (tmp_path / f"{name}.xml").write_text(f"<testsuites>{suite}</testsuites>")
    merged = tmp_path / "made" / "all.xml"
    merge_junit([tmp_path / "first.xml", tmp_path / "none.xml", tmp_path / "second.xml"], merged)
    assert [case.get("name") for case in ElementTree.parse(merged).iter("testcase")] == ["of first", "of second"]
