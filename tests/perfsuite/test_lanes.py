"""Which process does which task, and how long it is expected to take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import MACHINE

from perfsuite import lanes
from perfsuite.lanes import Durations, balanced, for_proving, for_timing, seconds_of
from perfsuite.workers import ITEMS, PROVE, Lane, Task

CPU = replace(MACHINE, count=0, cores=4)
TWO = replace(MACHINE, count=2, cores=16)


def tasks(*seconds: float, kind: str = PROVE) -> list[Task]:
    """A task that takes so long, for each."""
    return [Task(id=f"{n}", kind=kind, limit_s=s) for n, s in enumerate(seconds)]


def expected(task: Task) -> float:
    return task.limit_s


def ids(split: lanes.Split) -> list[list[str]]:
    return [[t.id for t in some] for _, some in split]


def test_the_lane_that_would_be_done_first_gets_the_next_longest() -> None:
    split = balanced(tasks(1, 5, 2, 4, 3), [Lane(), Lane()], expected)
    assert ids(split) == [["0", "1", "2"], ["3", "4"]]  # 8 s and 7 s; each in the given order
    assert seconds_of(split, expected) == lanes.START_S + 8


def test_no_lane_is_without_a_task() -> None:
    assert ids(balanced(tasks(1, 1), [Lane(), Lane(), Lane()], expected)) == [["0"], ["1"]]
    assert balanced([], [Lane()], expected) == []
    assert seconds_of([], expected) == 0


@pytest.mark.parametrize("count", [1, 3, 7])
def test_each_task_is_done_once(count: int) -> None:
    split = balanced(tasks(*range(1, 30)), [Lane()] * count, expected)
    assert sorted(int(i) for some in ids(split) for i in some) == list(range(29))
    loads = [sum(map(expected, some)) for _, some in split]
    assert max(loads) - min(loads) <= 29


def test_what_is_timed_runs_alone_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in (CPU, replace(MACHINE, count=1)):
        assert for_timing(tasks(1, 2), machine, expected) == [(Lane(), tasks(1, 2))]
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("GPU-a", "GPU-b"))
    split = for_timing(tasks(1, 2), TWO, expected)
    assert [lane.environment for lane, _ in split] == [{"CUDA_VISIBLE_DEVICES": d} for d in ("GPU-a", "GPU-b")]


def test_devices_without_a_name_are_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NVML says nothing; a name that CUDA does not know would hide all of them."""
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("gpu",))
    assert for_timing(tasks(1, 2), TWO, expected) == [(Lane(), tasks(1, 2))]
    assert all("CUDA_VISIBLE_DEVICES" not in lane.environment for lane, _ in for_proving(tasks(1, 2), TWO, expected))


def test_proofs_use_every_core_and_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(for_proving(tasks(*[1] * 9), CPU, expected)) == 4
    assert len(for_proving(tasks(1, 1), CPU, expected)) == 2
    assert len(for_proving(tasks(*[1] * 99), replace(CPU, cores=64), expected)) == lanes.MOST_PROVERS
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("GPU-a", "GPU-b"))
    split = for_proving(tasks(1, 1, 1), TWO, expected)
    assert [lane.environment["CUDA_VISIBLE_DEVICES"] for lane, _ in split] == ["GPU-a", "GPU-b", "GPU-a"]


def test_threads_are_divided_where_no_result_depends_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload's outputs must have the same bits when it is timed, with all threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    items = for_proving(tasks(1, 1, kind=ITEMS), CPU, expected)
    assert [lane.environment for lane, _ in items] == [{"OMP_NUM_THREADS": "2"}] * 2
    assert [lane.environment for lane, _ in for_proving(tasks(1, 1), CPU, expected)] == [{}] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [lane.environment for lane, _ in for_proving(tasks(1, 1, kind=ITEMS), CPU, expected)] == [{}] * 2


# --- durations ------------------------------------------------------------------------------------------------------


def test_what_a_task_took_is_what_it_will_take(tmp_path: Path) -> None:
    durations = Durations(tmp_path / ".perfsuite")
    assert durations.of(Task(id="a", kind=PROVE)) == lanes.USUAL_S["prove"]
    durations.note(PROVE, "a", 12.3456)
    durations.save()
    again = Durations(tmp_path / ".perfsuite")
    assert again.of(Task(id="a", kind=PROVE)) == 12.346
    assert again.of(Task(id="a")) == lanes.USUAL_S["time"]
    assert (tmp_path / ".perfsuite/.gitignore").read_text() == "*\n"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"3",
        b'{"prove a": "soon"}',
        b'{"prove a": null}',
        b'{"prove a": [1]}',
        b'{"prove a": NaN, "prove b": Infinity, "prove c": -1, "prove d": 1e300}',
        b'{"prove a": 1' + b"0" * 400 + b"}",
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
    ids=lambda text: repr(text[:16]),
)
def test_a_damaged_file_costs_an_estimate(tmp_path: Path, text: bytes) -> None:
    (tmp_path / lanes.FILE).write_bytes(text)
    durations = Durations(tmp_path)
    assert [durations.of(Task(id=i, kind=PROVE)) for i in "abcd"] == [lanes.USUAL_S["prove"]] * 4
    durations.note(PROVE, "a", 1.0)
    durations.save()
    assert json.loads((tmp_path / lanes.FILE).read_text()) == {"prove a": 1.0}


def test_a_folder_that_cannot_be_written_costs_an_estimate(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    durations = Durations(tmp_path / "file")
    durations.note(PROVE, "a", 1.0)
    durations.save()
    assert durations.of(Task(id="a", kind=PROVE)) == 1.0
