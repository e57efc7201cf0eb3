"""Which process does which task."""

from __future__ import annotations

import pytest

from perfsuite import lanes
from perfsuite.workers import ITEMS, Lane, Task


def tasks(**seconds: float) -> tuple[list[Task], dict[str, float]]:
    """A task for each name, `pair_proof`, and what each takes."""
    expected = {f"test_file.py::{name.replace('_', '::')}": s for name, s in seconds.items()}
    return [Task(id=id, kind=ITEMS, limit_s=1.0) for id in expected], expected


def test_the_longest_tasks_go_first_to_the_lane_that_would_be_done_first() -> None:
    given, expected = tasks(a_x=1.0, b_x=5.0, c_x=3.0, d_x=2.0)
    split = lanes.balanced(given, [Lane(), Lane()], lambda task: expected[task.id])
    assert [[t.id.split("::")[1] for t in some] for _, some in split] == [["a", "b"], ["c", "d"]]


def test_the_proofs_of_a_pair_stay_together_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given, expected = tasks(a_x=1.0, a_y=1.0, a_z=1.0, b_x=2.0, b_y=2.5, c_x=1.0)
    machine = type("TwoCores", (), {"cores": 2, "count": 0})()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    split = lanes.for_proving(given, machine, lambda task: expected[task.id])
    assert [[t.id.removeprefix("test_file.py::") for t in some] for _, some in split] == [
        ["b::x", "b::y"],
        ["a::x", "a::y", "a::z", "c::x"],
    ]
