"""tools/gate_trial.py: which outcomes of a trial count as correct."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scratch import ROOT

from perfsuite.records import Status

sys.path.insert(0, str(ROOT / "tools"))
try:
    import gate_trial
finally:
    sys.path.remove(str(ROOT / "tools"))

FORWARD, LOOP = gate_trial.PLANTS["forward"], gate_trial.PLANTS["loop_bound"]
OWN, OTHERS, SEEN = FORWARD.red, FORWARD.green, LOOP.seen


def trial(planted: str, code: int, own: Status, other: Status) -> Any:
    verdicts = {**dict.fromkeys(OWN, own), **dict.fromkeys(OTHERS, other)}
    return gate_trial.Trial(planted=planted, code=code, seconds=1.0, verdicts=verdicts, lines=())


@pytest.mark.parametrize(
    ("planted", "code", "own", "other", "ends"),
    [
        ("", 0, Status.PASS, Status.PASS, True),
        ("", 0, Status.PASS, Status.IMPROVED, True),
        ("", 10, Status.NOISY, Status.PASS, False),
        ("", 1, Status.PASS, Status.PASS, False),
        ("forward", 1, Status.REGRESSED, Status.PASS, True),
        ("forward", 1, Status.BELOW_FLOOR, Status.PASS, True),
        ("forward", 1, Status.REGRESSED, Status.IMPROVED, True),
        ("forward", 0, Status.REGRESSED, Status.PASS, False),
        ("forward", 10, Status.NOISY, Status.PASS, False),
        ("forward", 1, Status.REGRESSED, Status.NOISY, False),
        ("forward", 1, Status.REGRESSED, Status.REGRESSED, False),
        ("forward", 1, Status.PASS, Status.REGRESSED, False),
        ("backward", 1, Status.REGRESSED, Status.PASS, False),
    ],
)
def test_trial_must_blame_exactly_the_planted_workloads(
    planted: str, code: int, own: Status, other: Status, ends: bool
) -> None:
    assert trial(planted, code, own, other).as_it_must is ends


@pytest.mark.parametrize(
    ("planted", "code", "own", "other", "ends"),
    [
        ("", 0, Status.PASS, Status.PASS, True),
        ("", 10, Status.NOISY, Status.PASS, True),
        ("", 0, Status.NOISY, Status.PASS, False),
        ("", 1, Status.PASS, Status.NOT_EQUIVALENT, False),
        ("forward", 10, Status.NOISY, Status.NOISY, True),
        ("forward", 1, Status.REGRESSED, Status.NOISY, True),
        ("forward", 0, Status.PASS, Status.PASS, False),
        ("forward", 1, Status.REGRESSED, Status.REGRESSED, False),
    ],
)
def test_trial_beside_another_process_may_be_undecided_but_not_wrong(
    planted: str, code: int, own: Status, other: Status, ends: bool
) -> None:
    beside = dataclasses.replace(trial(planted, code, own, other), beside=True)
    assert beside.as_it_must is ends


@pytest.mark.parametrize(
    ("code", "status", "ends"),
    [
        (0, Status.UNCHANGED, False),
        (0, Status.PASS, True),
        (1, Status.REGRESSED, True),
        (1, Status.NOT_EQUIVALENT, True),
        (0, Status.REGRESSED, False),
    ],
)
def test_planted_change_may_have_any_verdict_except_unchanged(code: int, status: Status, ends: bool) -> None:
    found = gate_trial.Trial(
        planted="loop_bound", code=code, seconds=1.0, verdicts=dict.fromkeys(SEEN, status), lines=()
    )
    assert found.as_it_must is ends


def test_trial_without_its_workloads_is_not_correct() -> None:
    whole = trial("forward", 1, Status.REGRESSED, Status.PASS)
    for ids in (OWN, OTHERS, ()):
        some = dataclasses.replace(whole, verdicts={i: whole.verdicts[i] for i in ids}, code=int(ids == OWN))
        assert not some.as_it_must
    assert not dataclasses.replace(whole, planted="", verdicts={}, code=0).as_it_must
    assert not dataclasses.replace(whole, planted="loop_bound").as_it_must


def test_a_run_without_a_report_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 4)
    monkeypatch.setattr(gate_trial.subprocess, "run", lambda command, **options: done)
    found = gate_trial.gate(tmp_path, tmp_path, "gate1")
    assert (found.code, found.as_it_must) == (4, False)
    assert "cannot read" in found.lines[0]
