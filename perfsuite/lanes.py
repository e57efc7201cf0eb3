"""Which process does which task: a lane for each GPU while timing, one for each core while proving."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from perfsuite.folders import own_folder
from perfsuite.machine import measured_devices
from perfsuite.records import Machine
from perfsuite.workers import ITEMS, Lane, Task

FILE = "durations.json"
USUAL_S = {"prove": 3.0, "time": 2.0, "items": 2.0, "trace": 2.0}
"""What a task takes that was never done before."""
START_S = 6.0
"""What a process takes until its first task: importing torch and the test modules."""
LONGEST_S = 1e6
"""No task takes that long: the file is damaged."""
MOST_PROVERS = 12
"""Each takes a context and a cache of the GPU's memory, and several gigabytes of the host's."""

Split = list[tuple[Lane, list[Task]]]


class Durations:
    """What each task took the last time, in a file of the project's folder for such things."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.seconds: dict[str, float] = {}
        try:
            found = json.loads(self.path.read_text())
            self.seconds = {str(k): float(v) for k, v in found.items() if 0 <= float(v) < LONGEST_S}
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            pass  # only an estimate depends on it

    def of(self, task: Task) -> float:
        """What the task will take, as far as is known."""
        return self.seconds.get(f"{task.kind} {task.id}", USUAL_S[task.kind])

    def note(self, kind: str, id: str, seconds: float) -> None:
        """A task of this kind took so long."""
        self.seconds[f"{kind} {id}"] = round(seconds, 3)

    def save(self) -> None:
        """Write the file; where that cannot be done, the next estimate is a guess."""
        try:
            own_folder(self.path.parent)
            self.path.write_text(json.dumps(self.seconds, indent=0, sort_keys=True))
        except OSError:
            pass


def for_timing(tasks: Sequence[Task], machine: Machine, expected: Callable[[Task], float]) -> Split:
    """One lane for each GPU, or one for the CPU: what is timed runs alone on its device."""
    lanes = [Lane(environment={"CUDA_VISIBLE_DEVICES": device}) for device in _several_devices(machine)]
    return balanced(tasks, lanes or [Lane()], expected)


def for_proving(tasks: Sequence[Task], machine: Machine, expected: Callable[[Task], float]) -> Split:
    """A lane for each core; nothing is timed, so that they may disturb each other.

    The proofs of one pair go to one lane, where they share the truths of their draws.
    """
    count = max(1, min(machine.cores, MOST_PROVERS, len(tasks)))
    devices = _several_devices(machine)
    lanes = []
    for number in range(count):
        environment: dict[str, str] = {}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        if all(t.kind == ITEMS for t in tasks) and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, machine.cores // count))
        lanes.append(Lane(environment=environment))
    return balanced(tasks, lanes, expected, together=lambda task: task.id.rpartition("::")[0])


def _several_devices(machine: Machine) -> tuple[str, ...]:
    """The GPUs by the names that CUDA_VISIBLE_DEVICES takes; empty where there is one, or where they have none."""
    devices = measured_devices("cuda") if machine.count > 1 else ()
    return devices if len(devices) > 1 else ()


def balanced(
    tasks: Sequence[Task],
    lanes: Sequence[Lane],
    expected: Callable[[Task], float],
    together: Callable[[Task], str] = lambda task: task.id,
) -> Split:
    """Each task to the lane that would be done first, the longest tasks first; within a lane in the given order.

    Tasks for which `together` gives the same are not parted.
    """
    order = {task.id: n for n, task in enumerate(tasks)}
    split: Split = [(lane, []) for lane in lanes]
    loads = [0.0] * len(lanes)
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(together(task), []).append(task)
    for group in sorted(groups.values(), key=lambda group: sum(map(expected, group)), reverse=True):
        least = loads.index(min(loads))
        split[least][1].extend(group)
        loads[least] += sum(map(expected, group))
    for _, some in split:
        some.sort(key=lambda task: order[task.id])
    return [(lane, some) for lane, some in split if some]


def seconds_of(split: Split, expected: Callable[[Task], float]) -> float:
    """How long the split will take."""
    return max((START_S + sum(map(expected, tasks)) for _, tasks in split), default=0.0)
