"""Control kernels are timed with every workload, and stored in the baseline."""

from __future__ import annotations

import pytest
import torch
from builders import MACHINE, entry, measurement

from perfsuite.baseline.accepted_entries import merge
from perfsuite.baseline.storage import load, save
from perfsuite.errors import BaselineError
from perfsuite.timing import control_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_each_control_kernel_has_a_positive_time() -> None:
    found = control_kernels.measure(DEVICE)
    assert list(found) == ["copy", "matmul", "launch"]
    assert all(0 < seconds < 10 for seconds in found.values())


def test_baseline_stores_control_kernel_times_of_each_process(tmp_path: object) -> None:
    made = entry(
        [measurement(anchors={"copy": 1e-4 * i, "launch": 3e-6}) for i in (1, 2, 4)] + [measurement()]  # none stored
    )
    path = f"{tmp_path}/device.json"
    save(path, merge(None, [made], machine=MACHINE))
    kept = load(path).entries[made.id]
    assert kept == made
    assert kept.anchors() == {"copy": 2e-4, "launch": 3e-6}
    assert entry([measurement()]).anchors() == {}


def test_control_kernel_time_of_zero_is_refused(tmp_path: object) -> None:
    made = entry([measurement(anchors={"copy": 0.0})])
    path = f"{tmp_path}/device.json"
    save(path, merge(None, [made], machine=MACHINE))
    with pytest.raises(BaselineError, match="a control kernel's time that is not above 0"):
        load(path)
