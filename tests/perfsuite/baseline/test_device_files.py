"""A device has one baseline file for each number of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import MACHINE
from scratch import Project, times

from perfsuite import Workload
from perfsuite.baseline import storage
from perfsuite.baseline.accepted_entries import Baseline
from perfsuite.baseline.device_files import Baselines
from perfsuite.session import lanes
from perfsuite.session.modes.run import Run
from perfsuite.session.tasks import Task

pytest_plugins = ["pytester"]
TWO = replace(MACHINE, count=2)


def stored(folder: Path, *numbers: int) -> None:
    for number in numbers:
        storage.save(Baselines(folder, lambda: TWO).path(number), Baseline(machine=TWO))


def machine_with(folder: Path, **fields: Any) -> Baselines:
    return Baselines(folder, lambda: replace(TWO, **fields))


def test_each_number_of_processes_has_its_own_file(tmp_path: Path) -> None:
    paths = [Baselines(tmp_path, lambda: TWO).path(number) for number in (1, 2, 12)]
    assert [path.name.removeprefix(TWO.device) for path in paths] == [".json", "-x2.json", "-x12.json"]


def test_machine_loads_only_files_for_at_most_its_number_of_devices(tmp_path: Path) -> None:
    stored(tmp_path, 1, 2, 4)
    (tmp_path / f"{TWO.device}-x2-old.json").write_text("no baseline")
    for count, numbers in ((1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (0, [1, 2, 4])):
        found = machine_with(tmp_path, count=count)
        found.load()
        assert sorted(found.files) == numbers


def test_every_loaded_file_is_compared_with_the_machine(tmp_path: Path) -> None:
    stored(tmp_path, 1, 2)
    other = machine_with(tmp_path, device_name="another", torch="9")
    other.load()
    errors, notes = other.compared()
    assert len(errors) == 1
    assert "device name was" in errors[0]
    assert [note for note in notes if note.startswith("torch was")]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a run on a machine with two GPUs, with workloads for one, two and four GPUs and a proof for two."""
    made: Any = Run.__new__(Run)
    made.isolated = {"c::ranks[2]": SimpleNamespace(pair=SimpleNamespace(at_ranks=2))}
    made.items = {
        name: SimpleNamespace(workload=Workload(name, ranks=ranks), iter_markers=lambda name: [])
        for name, ranks in (("a", 1), ("b", 2), ("d", 4))
    }
    monkeypatch.setattr(Run, "machine", TWO)
    monkeypatch.setattr(Run, "device", "cuda")
    monkeypatch.setattr(lanes, "measured_devices", lambda device: ("GPU-a", "GPU-b"))
    return made


def test_tasks_for_all_gpus_run_last_in_their_own_lane(run: Any) -> None:
    tasks = [Task(id=id) for id in ("b", "a", "c::ranks[2]", "a")]
    parts = run.parts(tasks)
    assert [[task.id for task in part] for part in parts] == [["a", "a"], ["b", "c::ranks[2]"]]
    assert run.lanes_for(parts[1]) == run.lanes_for(parts[1], everywhere=True) == [lanes.ALL_GPUS]
    assert lanes.ALL_GPUS not in run.lanes_for(parts[0])


def test_tasks_are_not_split_on_a_cpu(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "device", "cpu")
    assert run.parts([Task(id="b"), Task(id="a")]) == [[Task(id="b"), Task(id="a")]]


def test_workload_for_more_gpus_than_the_machine_has_is_inapplicable(run: Any) -> None:
    found = {name: run.inapplicable(item) for name, item in run.items.items()}
    assert found == {"a": None, "b": None, "d": "the workload is for 4 GPUs; this machine has 2"}


PAIRS = """
import torch
from perfsuite import Pair, Workload, tensor

def three(x):
    return 3 * x

def total(x):
    return x + x + x

scale = Pair(
    reference=three,
    optimized=total,
    inputs={"x": tensor("ranks * n", by_rank=0)},
    gradients=False,
    ranks=(2,),
    workloads=[Workload("one", n=3, clock="wall"), Workload("two", n=3, ranks=2, clock="wall")],
)
"""
ONE, TWO_RANKS = (f"test_scale.py::scale::speed[{name}]" for name in ("one", "two"))


@pytest.fixture
def scale(project: Project) -> Project:
    project.write("test_scale.py", PAIRS)
    project.measured(times())
    project.commit()
    return project


def files(project: Project) -> dict[str, str]:
    paths = sorted((project.path / "baselines").glob("*.json"))
    return {"x2" if "-x2" in path.stem else "x1": path.read_text() for path in paths}


def test_workload_is_accepted_into_the_file_of_its_number_of_ranks(scale: Project) -> None:
    assert scale.cli("accept", "--reason", "first").exit_code == 0
    found = files(scale)
    assert ONE in found["x1"]
    assert TWO_RANKS not in found["x1"]
    assert TWO_RANKS in found["x2"]
    assert ONE not in found["x2"]
    done = scale.cli("gate")
    assert done.exit_code == 0, done.output


def test_workload_with_another_number_of_ranks_moves_to_another_file(scale: Project) -> None:
    scale.cli("accept", "--reason", "first")
    scale.replace("test_scale.py", 'Workload("two", n=3, ranks=2', 'Workload("two", n=3, ranks=1')
    scale.commit()
    done = scale.cli("accept", "-k", "two", "--reason", "one process")
    assert done.exit_code == 0, done.output
    found = files(scale)
    assert TWO_RANKS in found["x1"]
    assert TWO_RANKS not in found["x2"]


def test_no_baseline_message_names_the_file_that_lacks_the_workload(scale: Project) -> None:
    scale.cli("accept", "-k", "one", "--reason", "first")
    done = scale.cli("gate")
    assert done.exit_code == 10
    line = next(line for line in done.output.splitlines() if "NO_BASELINE" in line and "two" in line)
    assert "-x2.json" in line
