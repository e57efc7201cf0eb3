"""tools/gate_cost.py prints tables of the seconds that a gate spends in each part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from builders import MACHINE, measurement
from scratch import ROOT

from perfsuite.report import RunReport, jsonfile

FIRST = {"warm-up": 1.0, "timing": 0.5, "checks": 0.25, "waiting": 9.0}


def cost(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/gate_cost.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})


def test_seconds_of_a_run_are_listed_by_part_workload_and_phase(tmp_path: Path) -> None:
    ids = [f"tests/test_a.py::pair{n}::speed[w]" for n in range(3)]
    runs = {i: tuple(measurement(i, seconds=2.0, phases=FIRST) for _ in range(n + 1)) for n, i in enumerate(ids)}
    report = RunReport(
        machine=MACHINE,
        revision=None,
        started="2027-01-01T00:00:00+00:00",
        seconds=20.0,
        measurements=runs,
        spent={"proofs": 6.0, "timing": 12.0},
        proofs={ids[2]: {"proof": 3.0, "accepted side": 1.0}},
    )
    path = tmp_path / "report.json"
    jsonfile.write(report, path)
    lines = cost(str(path), "--most", "1").stdout.splitlines()
    assert lines[2:5] == ["| proofs | 6 |", "| timing | 12 |", "| start and report | 2 |"]
    assert lines[6] == "Workloads by the number of processes: 1 in 1, 1 in 2, 1 in 3."
    assert lines[-2:] == [
        "| pair2[w] | 4.0 | 2.0 | 1.0 | 0.5 | 0.0 | 0.2 | 3 | 6.0 |",
        "| the other 2 together | 0.0 | 4.0 | 2.0 | 1.0 | 0.0 | 0.5 | 3 | 6.0 |",
    ]


def test_a_report_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    done = cost(str(tmp_path / "none.json"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "cannot read" in done.stderr
