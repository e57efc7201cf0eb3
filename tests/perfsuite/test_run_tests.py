"""Which runs of pytest `make test` makes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from scratch import ROOT

from tools.run_tests import passes, worst

BESIDE = ("-n", "auto", "--dist", "worksteal")


@pytest.mark.parametrize(
    ("arguments", "marks"), [([], "not perf"), (["-m", "correctness"], "correctness"), (["-mperf"], "perf")]
)
def test_without_a_gpu_all_tests_run_beside_each_other(arguments: list[str], marks: str) -> None:
    assert passes([*arguments, "-k", "x"], on_gpu=False, beside=BESIDE) == [["-m", marks, *BESIDE, "-k", "x"]]


def test_on_a_gpu_proofs_run_first_and_without_xdist() -> None:
    assert passes(["-k", "x", "-n", "0"], on_gpu=True, beside=BESIDE) == [
        ["-m", "(not perf) and correctness", "-k", "x", "-n", "0"],
        ["-m", "(not perf) and not correctness", *BESIDE, "-k", "x", "-n", "0"],
    ]


@pytest.mark.parametrize(("codes", "code"), [([0], 0), ([5], 5), ([0, 5], 0), ([5, 1], 1), ([5, 5], 5), ([1, 0], 1)])
def test_a_run_without_tests_counts_only_where_none_has_any(codes: list[int], code: int) -> None:
    assert worst(codes) == code


def test_the_arguments_reach_pytest() -> None:
    command = [sys.executable, "-m", "tools.run_tests", "-q", "-n", "0", "-k", "reach_pytest", "--collect-only"]
    file = "tests/perfsuite/test_run_tests.py"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run([*command, file], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{file}::test_the_arguments_reach_pytest" in done.stdout
