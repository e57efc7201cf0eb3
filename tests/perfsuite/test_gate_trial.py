"""The trial of the gate: what counts as having ended as it must, and what is gated beside each plant."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression
from scratch import ROOT

from perfsuite.records import Status

sys.path.insert(0, str(ROOT / "tools"))
try:
    import gate_trial
finally:
    sys.path.remove(str(ROOT / "tools"))

OWN = "tests/geometry/test_lior_and_speed.py::lior_and_speed::speed[rows4m]"
OTHER = "tests/optimizers/test_fused_adamw.py::fused_adamw_cnn::speed[leak_cnn]"


def trial(planted: str, code: int, **verdicts: Status) -> Any:
    ids = {"own": OWN, "other": OTHER}
    return gate_trial.Trial(
        planted=planted, code=code, seconds=1.0, verdicts={ids[k]: v for k, v in verdicts.items()}, lines=()
    )


@pytest.mark.parametrize(
    ("planted", "code", "own", "other", "ends"),
    [
        ("", 0, Status.PASS, Status.PASS, True),
        ("", 0, Status.PASS, Status.IMPROVED, False),
        ("", 1, Status.NOISY, Status.PASS, False),
        ("", 1, Status.PASS, Status.PASS, False),
        ("lior_and_speed", 1, Status.REGRESSED, Status.PASS, True),
        ("lior_and_speed", 0, Status.REGRESSED, Status.PASS, False),
        ("lior_and_speed", 1, Status.NOISY, Status.PASS, False),
        ("lior_and_speed", 1, Status.REGRESSED, Status.NOISY, False),
        ("lior_and_speed", 1, Status.PASS, Status.REGRESSED, False),
        ("fused_adamw", 1, Status.REGRESSED, Status.PASS, False),
    ],
)
def test_how_a_trial_must_end(planted: str, code: int, own: Status, other: Status, ends: bool) -> None:
    assert trial(planted, code, own=own, other=other).as_it_must is ends


@pytest.mark.parametrize(
    ("planted", "code", "own", "other", "ends"),
    [
        ("", 0, Status.PASS, Status.PASS, True),
        ("", 1, Status.NOISY, Status.PASS, True),
        ("", 0, Status.NOISY, Status.PASS, False),
        ("", 0, Status.IMPROVED, Status.PASS, False),
        ("", 1, Status.PASS, Status.NOT_EQUIVALENT, False),
        ("lior_and_speed", 1, Status.NOISY, Status.NOISY, True),
        ("lior_and_speed", 1, Status.REGRESSED, Status.NOISY, True),
        ("lior_and_speed", 0, Status.PASS, Status.PASS, False),
        ("lior_and_speed", 1, Status.REGRESSED, Status.REGRESSED, False),
    ],
)
def test_beside_another_process_it_may_be_undecided_and_never_wrong(
    planted: str, code: int, own: Status, other: Status, ends: bool
) -> None:
    beside = dataclasses.replace(trial(planted, code, own=own, other=other), beside=True)
    assert beside.as_it_must is ends


def test_a_trial_without_both_workloads_proves_nothing() -> None:
    assert not trial("lior_and_speed", 1, own=Status.REGRESSED).as_it_must
    assert not trial("lior_and_speed", 1, other=Status.PASS).as_it_must
    assert not trial("", 0).as_it_must


def test_a_run_without_a_report_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 4)
    monkeypatch.setattr(gate_trial.subprocess, "run", lambda command, **options: done)
    found = gate_trial.gate(tmp_path, tmp_path, "gate1")
    assert (found.code, found.as_it_must) == (4, False)
    assert "cannot read" in found.lines[0]


def test_the_technique_and_another_are_gated() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "perf", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    items = [line for line in done.stdout.splitlines() if "::speed[" in line]
    assert set(gate_trial.BESIDE) == set(gate_trial.NAMES)
    for name, keyword in gate_trial.BESIDE.items():
        expression = Expression.compile(keyword)
        gated = {i for i in items if expression.evaluate(lambda word, i=i: word in i)}
        own = {i for i in gated if f"/test_{name}.py::" in i}
        assert own, done.stdout
        assert gated - own
