"""Baselines that were accepted separately can be merged."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from builders import MACHINE, entry, measurement, workload_id
from scratch import ROOT

from perfsuite.baseline import accepted_entries, storage


def accepted(number: int) -> accepted_entries.Entry:
    return entry([measurement(workload_id(number)) for _ in range(3)])


def merged(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "merge_baselines.py"), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_new_and_newer_entries_are_merged(tmp_path: Path) -> None:
    one, two, three = (accepted(number) for number in range(3))
    later = dataclasses.replace(two, reason="faster", accepted="2027-01-01T00:00:00+00:00")
    into, other = tmp_path / "into.json", tmp_path / "other.json"
    storage.save(into, accepted_entries.merge(None, [one, later], machine=MACHINE))
    storage.save(other, accepted_entries.merge(None, [two, three], machine=MACHINE))
    done = merged(into, other)
    assert (done.returncode, done.stdout.split()) == (0, [three.id])
    held = storage.load(into).entries
    assert {i: e.reason for i, e in held.items()} == {one.id: one.reason, two.id: "faster", three.id: three.reason}
    done = merged(other, into)
    assert done.stdout.split() == [one.id, two.id]
    assert storage.load(other).entries == held


def test_another_device_and_a_missing_file_are_refused_in_one_line(tmp_path: Path) -> None:
    into, other = tmp_path / "into.json", tmp_path / "other.json"
    storage.save(into, accepted_entries.merge(None, [accepted(0)], machine=MACHINE))
    before = into.read_bytes()
    storage.save(
        other, accepted_entries.merge(None, [accepted(0)], machine=dataclasses.replace(MACHINE, device="nvidia-x"))
    )
    for wrong in (other, tmp_path / "none.json"):
        done = merged(into, wrong)
        assert done.returncode == 2
        assert len([line for line in done.stderr.splitlines() if "error:" in line]) == 1
        assert "Traceback" not in done.stderr
        assert into.read_bytes() == before
