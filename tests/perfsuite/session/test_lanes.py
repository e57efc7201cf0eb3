"""Assignment of tasks to processes, and their expected durations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import MACHINE

from perfsuite.baseline.device_files import Baselines
from perfsuite.revisions.revision import Tree
from perfsuite.session import lanes
from perfsuite.session.lanes import Durations, for_proving, for_timing, ordered, seconds_of
from perfsuite.session.modes.run import Run
from perfsuite.session.tasks import ITEMS, OUTSIDE_CHILDREN, PROVE, TIME, Task
from perfsuite.session.worker_process import Lane, devices_of

CPU = replace(MACHINE, count=0, cores=4)
TWO = replace(MACHINE, count=2, cores=16)


def tasks(*seconds: float, kind: str = PROVE) -> list[Task]:
    """Return a task for each of these durations."""
    return [Task(id=f"{n}", kind=kind, limit_s=s) for n, s in enumerate(seconds)]


def expected(task: Task) -> float:
    return task.limit_s


def ids(some: list[Task]) -> list[str]:
    return [t.id for t in some]


def test_longest_tasks_come_first_with_several_lanes() -> None:
    given = tasks(1, 5, 2, 4, 3)
    assert ids(ordered(given, [Lane(), Lane()], expected)) == ["1", "3", "4", "2", "0"]
    assert ids(ordered(given, [Lane()], expected)) == ["0", "1", "2", "3", "4"]


def test_tasks_without_another_revision_precede_those_with_one() -> None:
    tree = Tree(revision="r", folder="f", package="p", top="t")
    given = [replace(tasks(9)[0], accepted=tree), *tasks(1, 2)]
    for count in (1, 2):
        assert [t.accepted for t in ordered(given, [Lane()] * count, expected)] == [None, None, tree]


def test_first_item_of_each_pair_precedes_all_other_items() -> None:
    """A lane stays with its pair and leaves the other pairs to the other lanes."""
    given = [Task(id=f"t.py::{n}", kind=ITEMS, limit_s=1.0) for n in ("a::x", "a::y", "a::z", "b::x", "c::x", "c::y")]
    assert [t.id.removeprefix("t.py::") for t in ordered(given, [Lane(), Lane()], expected)] == [
        "a::x", "c::x", "b::x", "a::y", "a::z", "c::y",
    ]  # fmt: skip
    assert len({t.group for t in given}) == 3
    assert len({t.group for t in tasks(1, 2)}) == 2


def test_items_that_need_a_child_process_share_a_few_groups_and_come_last() -> None:
    given = [Task(id=f"t.py::p{n}::{name}", kind=ITEMS, limit_s=1.0) for n in range(30) for name in ("outside", "x")]
    children = {t.group for t in given if t.needs_child}
    assert len(children) == OUTSIDE_CHILDREN
    assert len({t.group for t in given} - children) == 30
    order = ordered(given, [Lane(), Lane()], expected)
    first, rest = order[: 30 + OUTSIDE_CHILDREN], order[30 + OUTSIDE_CHILDREN :]
    assert len({t.group for t in first}) == len(first)
    assert rest
    assert all(t.needs_child for t in rest)


def test_seconds_of_tasks_are_those_of_the_lane_that_ends_last() -> None:
    assert seconds_of(tasks(5, 4, 3, 2, 1), [Lane(), Lane()], expected) == lanes.START_S + 8
    assert seconds_of([], [Lane()], expected) == 0


def test_timing_uses_one_lane_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in (CPU, replace(MACHINE, count=1)):
        assert for_timing(machine) == [Lane()]
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("GPU-a", "GPU-b"))
    assert [lane.environment for lane in for_timing(TWO)] == [{"CUDA_VISIBLE_DEVICES": d} for d in ("GPU-a", "GPU-b")]


def test_each_of_several_gpus_has_its_own_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("GPU-a", "GPU-b"))
    low, high = frozenset({0, 1}), frozenset({2, 3})
    monkeypatch.setattr(lanes.cores, "of_gpus", lambda count: (low, high))
    assert [lane.cores for lane in for_timing(TWO)] == [low, high]
    assert [lane.cores for lane in for_timing(TWO, tmp_path, 2)] == [low, high, low, high]
    assert for_timing(replace(MACHINE, count=1))[0].cores == lanes.cores.ANY


def test_devices_without_names_share_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """If NVML gives no names, one lane has all devices; a name that CUDA does not know would hide all of them."""
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("gpu",))
    assert for_timing(TWO) == [Lane()]
    assert all("CUDA_VISIBLE_DEVICES" not in lane.environment for lane in for_proving(tasks(1, 2), TWO))


def test_proofs_use_every_core_and_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(for_proving(tasks(*[1] * 9), CPU)) == 4
    assert len(for_proving(tasks(1, 1), CPU)) == 2
    assert len(for_proving(tasks(1), CPU)) == 1
    assert len(for_proving(tasks(*[1] * 99), replace(CPU, cores=64))) == lanes.MOST_PROVERS
    monkeypatch.setattr(lanes, "measured_devices", lambda kind: ("GPU-1", "GPU-2", "GPU-3"))
    several = for_proving(tasks(*[1] * 99), replace(MACHINE, cores=64, count=3))
    assert len(several) == 3 * lanes.MOST_PROVERS_EACH
    assert len({lane.environment["CUDA_VISIBLE_DEVICES"] for lane in several[:3]}) == 3
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("GPU-a", "GPU-b"))
    split = for_proving(tasks(1, 1, 1), TWO)
    assert [lane.environment["CUDA_VISIBLE_DEVICES"] for lane in split] == ["GPU-a", "GPU-b", "GPU-a"]


def test_omp_threads_are_divided_among_lanes_only_for_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload's outputs must have the same bits when it is timed with all threads; compiling changes no bits."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(lanes.preload.COMPILE_THREADS, raising=False)
    compiling = {lanes.preload.COMPILE_THREADS: "2"}
    items = for_proving(tasks(1, 1, kind=ITEMS), CPU)
    assert [lane.environment for lane in items] == [{"OMP_NUM_THREADS": "2", **compiling}] * 2
    assert [lane.environment for lane in for_proving(tasks(1, 1), CPU)] == [compiling] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(lanes.preload.COMPILE_THREADS, "3")
    assert [lane.environment for lane in for_proving(tasks(1, 1, kind=ITEMS), CPU)] == [{}] * 2


@pytest.mark.parametrize(
    ("gpus", "devices", "gibibytes", "workloads", "each"),
    [
        (0, 1, None, 70, 1),
        (1, 1, 144, 70, 16),
        (1, 1, 80, 70, 10),
        (1, 1, 16, 70, 2),
        (1, 1, 4, 70, 1),
        (1, 1, None, 70, 1),
        (2, 2, 144, 70, 8),
        (8, 8, 144, 70, 2),
        (32, 32, 144, 70, 1),
        (1, 1, 144, 11, 13),
        (1, 1, 144, 3, 12),
        (2, 2, 144, 13, 8),
        (2, 2, 144, 9, 7),
        (2, 2, 144, 7, 6),
    ],
)
def test_started_ahead_is_limited_by_workloads_and_by_memory_for_contexts(
    gpus: int, devices: int, gibibytes: int | None, workloads: int, each: int
) -> None:
    some = [Lane(lock=str(n)) for n in range(devices)]
    memory = None if gibibytes is None else gibibytes << 30
    assert lanes.started_ahead(replace(MACHINE, count=gpus), some * 3, memory, workloads) == each


@pytest.mark.parametrize(
    ("cores", "busy", "at_once"),
    [(32, 16, 16), (32, 32, 0), (16, 12, 4), (2, 1, 1), (1, 0, 1)],
)
def test_as_many_processes_start_at_once_as_cores_are_free(cores: int, busy: int, at_once: int) -> None:
    assert lanes.started_at_once(replace(MACHINE, cores=cores), busy) == at_once


def test_driver_is_queried_once_per_value_of_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(lanes, "measured_devices", lambda kind: (asked.append(kind), ("GPU-1",))[1])
    for visible in ("0", "0", "1", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert lanes._devices() == ("GPU-1",)
    assert asked == ["cuda", "cuda"]


def test_several_devices_is_empty_for_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "measured_devices", lambda kind: ("GPU-1", "GPU-2"))
    assert lanes._several_devices(replace(MACHINE, count=1)) == ()
    assert lanes._several_devices(replace(MACHINE, count=2)) == ("GPU-1", "GPU-2")


@pytest.mark.parametrize(
    ("useful", "kind", "forked"), [(True, PROVE, True), (True, ITEMS, False), (False, PROVE, False)]
)
def test_proofs_of_workloads_are_forked_if_preloading_is_useful(
    monkeypatch: pytest.MonkeyPatch, useful: bool, kind: str, forked: bool
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(lanes.preload, "is_useful", lambda: useful)
    assert {lane.forked for lane in for_proving([Task(id="a", kind=kind)], MACHINE)} == {forked}


def test_lanes_on_the_same_gpu_share_a_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("GPU-a",))
    one = for_timing(replace(MACHINE, count=1), tmp_path, 3)
    assert one == [Lane(lock=str(tmp_path / "GPU-a.lock"))] * 3
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("GPU-a", "GPU-b"))
    two = for_timing(TWO, tmp_path, 2)
    assert [(lane.environment["CUDA_VISIBLE_DEVICES"], Path(lane.lock).name) for lane in two] == [
        ("GPU-a", "GPU-a.lock"), ("GPU-b", "GPU-b.lock"), ("GPU-a", "GPU-a.lock"), ("GPU-b", "GPU-b.lock"),
    ]  # fmt: skip
    assert devices_of(two) == two[:2]
    # Timing tasks run one after another, even if several processes prepare.
    assert seconds_of(tasks(5, 4, 3), one, expected) == lanes.START_S + 12


@pytest.mark.parametrize(
    ("memory", "peaks", "count"),
    [
        (100, [5] * 70, 8),
        (1000, [5] * 70, 12),
        (100, [10] * 70, 4),
        (100, [15] * 70, 2),
        (80, [5] * 70, 7),
        (100, [10] * 2, 2),
        (100, [10], 1),
        (100, [], 1),
        (100, [20, 20, *[1] * 68], 5),
        (99, [20, 20, 10, *[1] * 67], 2),
        (79, [20, 20, 10, *[1] * 67], 1),
        (100, [10, None, *[1] * 68], 1),
        (None, [1] * 70, 1),
    ],
)
def test_together_is_limited_by_the_known_memory_peaks(memory: int | None, peaks: list[int | None], count: int) -> None:
    assert lanes.together(memory, peaks, 16) == count


@pytest.mark.parametrize(("cores", "count"), [(32, 12), (16, 12), (8, 6), (4, 3), (2, 1), (1, 1)])
def test_together_is_limited_by_the_cores(cores: int, count: int) -> None:
    assert lanes.together(1000, [5] * 70, cores) == count


# --- durations ------------------------------------------------------------------------------------------------------


def test_duration_of_the_last_run_is_the_estimate_for_the_next(tmp_path: Path) -> None:
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
def test_a_damaged_durations_file_is_ignored(tmp_path: Path, text: bytes) -> None:
    (tmp_path / lanes.FILE).write_bytes(text)
    durations = Durations(tmp_path)
    assert [durations.of(Task(id=i, kind=PROVE)) for i in "abcd"] == [lanes.USUAL_S["prove"]] * 4
    durations.note(PROVE, "a", 1.0)
    durations.save()
    assert json.loads((tmp_path / lanes.FILE).read_text()) == {"prove a": 1.0}


def test_proofs_before_timing_are_ordered_by_proving_plus_timing_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durations = Durations(tmp_path)
    for kind, seconds in ((PROVE, {"a": 1.0, "b": 5.0, "c": 2.0}), (TIME, {"a": 9.0, "b": 1.0, "c": 7.0})):
        for id, took in seconds.items():
            durations.note(kind, id, took)
    run: Any = Run.__new__(Run)
    run.durations, run.runs, run.items, run.isolated = durations, {}, {}, {}
    run.baselines = Baselines(tmp_path, lambda: TWO)
    monkeypatch.setattr(Run, "machine", TWO)
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("GPU-a", "GPU-b"))
    for kind, everywhere, order in ((PROVE, True, "acb"), (TIME, False, "acb"), (PROVE, False, "bca")):
        planned, _ = run._planned([Task(id=i, kind=kind) for i in "abc"], everywhere)
        assert ids(planned) == list(order)


def test_processes_of_one_workload_are_ordered_independently() -> None:
    given = [Task(id=i, kind=TIME, limit_s=s) for i, s in (("a", 3.0), ("b", 5.0), ("a", 3.0), ("b", 5.0), ("c", 4.0))]
    assert ids(ordered(given, [Lane(), Lane()], expected)) == ["b", "b", "c", "a", "a"]


def test_a_folder_that_cannot_be_written_raises_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    durations = Durations(tmp_path / "file")
    durations.note(PROVE, "a", 1.0)
    durations.save()
    assert durations.of(Task(id="a", kind=PROVE)) == 1.0


def test_proofs_of_a_pair_that_took_long_to_time_are_expected_to_take_long(tmp_path: Path) -> None:
    durations = Durations(tmp_path)
    durations.note(ITEMS, "a.py::known::equivalence", 7.0)
    timed = {"a.py::slow::speed[cpu]": [SimpleNamespace(seconds=9.0), SimpleNamespace(seconds=4.0)]}
    run: Any = Run.__new__(Run)
    run.durations, run.runs, run.baselines = durations, timed, Baselines(tmp_path, lambda: TWO)
    quick, slow, known = (Task(id=f"a.py::{n}::equivalence", kind=ITEMS) for n in ("quick", "slow", "known"))
    usual = lanes.USUAL_S["items"]
    assert [run.expected_s(t) for t in (quick, slow, known)] == [usual, usual + 9.0, 7.0]


def test_announced_seconds_say_what_they_leave_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs that never ran may compile code, and those that need all GPUs follow the others, one at a time."""
    said: list[str] = []
    run: Any = Run.__new__(Run)
    run.durations, run.runs, run.isolated = Durations(tmp_path), {}, {}
    run.items = {id: SimpleNamespace(workload=SimpleNamespace(ranks=n)) for id, n in (("a", 1), ("b", 2), ("c", 2))}
    run.baselines = Baselines(tmp_path, lambda: TWO)
    run._progress = SimpleNamespace(expect=lambda text, total: said.append(text))
    monkeypatch.setattr(Run, "machine", TWO)
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("GPU-a", "GPU-b"))
    for id in "abc":
        run.announce([Task(id=i, kind=PROVE) for i in "abc"], proving=True)
        run.durations.note(PROVE, id, 10.0)
    run.announce([Task(id=i, kind=PROVE) for i in "abc"], proving=True)
    assert [text.endswith(", longer if code is compiled for the first time") for text in said] == [True] * 3 + [False]
    assert said[-1] == "3 proofs on 3 cores: about 42 s"
