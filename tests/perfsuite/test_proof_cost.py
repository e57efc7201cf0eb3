"""The table of the seconds that proofs take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scale import FULLY
from scratch import ROOT, Project

pytest_plugins = ["pytester"]

PAIR = """
    import torch
    from perfsuite import Pair, Workload, tensor

    one = Pair(
        reference=torch.sin, optimized=torch.sin, inputs={"x": tensor("n")}, workloads=[Workload("w", n=8)],
        max_examples=1,
    )
"""


def cost(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/proof_cost.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@FULLY
def test_seconds_of_each_pair_are_printed_and_logged(project: Project, tmp_path: Path) -> None:
    project.write("test_one.py", PAIR)
    log = tmp_path / "log"
    profile = tmp_path / "profile"
    done = cost(
        "--log", str(log), "--profile", str(profile), "test_one.py", "-k", "equivalence or effects", cwd=project.path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "| pair: seconds | all | effects | equivalence |" in lines
    assert lines[-1].startswith("Pairs: 1, median: ")
    assert profile.exists()
    again = cost("--read", str(log), cwd=tmp_path)
    assert again.stdout.splitlines() == lines[-len(again.stdout.splitlines()) :]


def test_the_median_is_taken_over_pairs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"{n}.0\ttest_a.py::pair{n}::equivalence[float32]\n" for n in (1, 2, 9)))
    assert cost("--read", str(log), cwd=tmp_path).stdout.splitlines()[-1] == "Pairs: 3, median: 2.00 s, together: 12 s."


def test_a_pair_that_has_not_ended_is_not_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ids = [f"test_a.py::{pair}::{item}" for pair in ("one", "two") for item in ("effects", "equivalence[float32]")]
    log.write_text("".join(f"selected\t{id}\n" for id in ids) + "".join(f"2.0\t{id}\n" for id in ids[:3]))
    assert cost("--read", str(log), cwd=tmp_path).stdout.splitlines()[-1] == "Pairs: 1, median: 4.00 s, together: 4 s."


@FULLY
def test_caches_are_filled_by_processes_that_share_the_pairs(project: Project, tmp_path: Path) -> None:
    pairs = PAIR.replace("one = Pair(", "one, two, three = (Pair(").rstrip() + " for _ in range(3))\n"
    noted = f"""
    import os, pytest

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_setup(item):
        with open({str(tmp_path / "noted")!r}, "a") as file:
            print(os.getpid(), item.nodeid.split("::")[1], file=file)
    """
    project.write("conftest.py", noted)
    project.write("test_one.py", pairs)
    done = cost("--fill", "2", "test_one.py", "-k", "equivalence or effects", cwd=project.path)
    assert done.stdout.splitlines()[-1].startswith("Pairs: 3, median: "), done.stdout + done.stderr
    pairs_of: dict[str, set[str]] = {}
    for line in (tmp_path / "noted").read_text().splitlines():
        pid, pair = line.split()
        pairs_of.setdefault(pid, set()).add(pair)
    shares = sorted(sorted(found) for found in pairs_of.values())
    assert shares == [["one", "three"], ["one", "three"], ["one", "three", "two"], ["two"], ["two"]]


def test_a_missing_log_is_named_in_one_line(tmp_path: Path) -> None:
    done = cost("--read", str(tmp_path / "none"), cwd=tmp_path)
    assert done.returncode == 4
    assert len(done.stderr.splitlines()) == 1
    assert "none" in done.stderr
