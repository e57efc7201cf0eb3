"""Assign tasks to lanes, which are slots for one worker process each: one lane for each GPU (or several that prepare
and then time one after another) while timing, and one for each core while proving."""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from perfsuite.records import Machine
from perfsuite.session import cores, preload
from perfsuite.session.tasks import ITEMS, TIME, Task
from perfsuite.session.worker_process import Lane, devices_of
from perfsuite.system.folders import own_folder
from perfsuite.system.machine import measured_devices

FILE = "durations.json"
USUAL_S = {"prove": 3.0, "time": 2.0, "items": 1.0, "alone": 0.5}
"""Estimated seconds of a task that has never run before, by kind, without its calls of the sides."""
CALLS = {"prove": 10.0, "time": 50.0, "items": 0.0, "alone": 20.0}
"""Estimated number of calls of a workload's sides in such a task, by kind."""
START_S = 6.0
"""Seconds from the start of a process until its first task: importing torch and the test modules."""
LONGEST_S = 1e6
"""Seconds above which a stored duration is invalid, because the file must be damaged."""
MOST_PROVERS, MOST_PROVERS_EACH = 12, 8
"""Most proving processes on a single GPU, and on each of several. A process uses GPU memory for a context and a cache,
and several gigabytes of host memory. 24 processes on two H200s with 32 cores were no faster than 12 on one of them."""

CONTEXT_BYTES, CONTEXTS_SHARE = 1 << 30, 0.125
"""Assumed memory of the CUDA context of each waiting process, and largest share of a GPU's memory for all contexts."""
MOST_TOGETHER, CORES_EACH = 12, 4 / 3
"""Most processes that prepare at the same time on a GPU, and cores for each. Prepared processes wait for each other and
time alone, so even a few workloads with several processes each are timed in one round."""
PEAKS_SPARE = 2.0
"""Factor on the peak memory of a call. A process may use more than one call: the inputs of all sides, and its
allocator's cache."""
MOST_AHEAD = 16
"""Most processes that are started ahead, over all GPUs. Each uses about 1 GB of host memory."""
SPARE_AHEAD = 2
"""Number of processes that are started ahead in addition to one per workload of a GPU, so that an undecided workload
gets another process at once."""
FEWEST_AHEAD = 12
"""Fewest processes that are useful ahead if there are few workloads. Each process times a workload once, and a workload
that is hard to decide needs this many."""


ALL_GPUS = Lane()
"""Lane for workloads that several processes call together. Its process sees every GPU, and nothing runs at the same
time."""


class Durations:
    """Seconds that each task took in its last run, stored in a file in perfsuite's own folder of the project."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.seconds: dict[str, float] = {}
        try:
            found = json.loads(self.path.read_text())
            self.seconds = {str(k): float(v) for k, v in found.items() if 0 <= float(v) < LONGEST_S}
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            pass  # only an estimate depends on it

    def of(self, task: Task, call_s: float = 0.0) -> float:
        """Return the estimated seconds of the task. `call_s` is the duration of a call of its slowest side."""
        if self.has(task):
            return self.seconds[f"{task.kind} {task.id}"]
        return USUAL_S[task.kind] + CALLS[task.kind] * call_s

    def has(self, task: Task) -> bool:
        """Return whether the duration of the task's last run is known."""
        return f"{task.kind} {task.id}" in self.seconds

    def note(self, kind: str, id: str, seconds: float) -> None:
        """Record the seconds that a task of this kind took."""
        self.seconds[f"{kind} {id}"] = round(seconds, 3)

    def save(self) -> None:
        """Write the file. Ignore an OSError, since only estimates depend on the file."""
        try:
            own_folder(self.path.parent)
            self.path.write_text(json.dumps(self.seconds, indent=0, sort_keys=True))
        except OSError:
            pass


def for_timing(machine: Machine, locks: Path | None = None, lanes_each: int = 1) -> list[Lane]:
    """Return one lane for each GPU, or one for the CPU. A timed workload runs alone on its device.

    With a folder for the `locks`, return `lanes_each` lanes for each GPU. Their processes prepare at the same time, and
    the GPU's lock lets one of them time. The locks are named by GPU, so that runs on other GPUs do not wait. If there
    are several GPUs, each has its own cores.
    """
    devices = _several_devices(machine)
    shares = _known_shares(cores.of_gpus, len(devices))
    lanes = [
        Lane(environment={"CUDA_VISIBLE_DEVICES": device}, cores=share)
        for device, share in zip(devices, shares, strict=True)
    ] or [Lane()]
    if locks is None:
        return lanes
    files = [str(locks / f"{name}.lock") for name in _devices()]
    return [replace(lane, lock=file) for _ in range(lanes_each) for lane, file in zip(lanes, files, strict=False)]


def together(memory_bytes: int | None, peaks: Collection[int | None], cores: int) -> int:
    """Return how many workloads with these memory peaks may be prepared at the same time on one GPU with this number of
    cores.

    A peak is None if it is not known. CONTEXTS_SHARE of the memory is reserved for the contexts of waiting processes.
    """
    known = sorted((p for p in peaks if p is not None), reverse=True)
    if memory_bytes is None or len(known) < len(peaks):
        return 1
    most = max(1, min(MOST_TOGETHER, int(cores / CORES_EACH), len(peaks)))
    free = (1 - CONTEXTS_SHARE) * memory_bytes
    return next(n for n in range(most, 0, -1) if n == 1 or PEAKS_SPARE * sum(known[:n]) <= free)


def for_proving(tasks: Collection[Task], machine: Machine) -> list[Lane]:
    """Return a lane for each core, up to a limit. Nothing is timed, so the processes may disturb each other."""
    devices = _several_devices(machine)
    most = MOST_PROVERS_EACH * len(devices) or MOST_PROVERS
    count = max(1, min(machine.cores, most, len(tasks)))
    each = str(max(1, machine.cores // count))
    # Outputs of a workload that will be timed must be bitwise equal in its proof and when it is timed. It is timed with
    # all threads, so its proof uses all of them, too.
    own_threads = all(t.kind == ITEMS for t in tasks) and "OMP_NUM_THREADS" not in os.environ
    forked = preload.is_useful() and not own_threads  # a fork keeps the thread count of its server
    lanes = []
    for number in range(count):
        environment: dict[str, str] = {}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        if preload.COMPILE_THREADS not in os.environ:  # each of these threads would be a process that imports torch
            environment[preload.COMPILE_THREADS] = each
        if own_threads:
            environment["OMP_NUM_THREADS"] = each
        lanes.append(Lane(environment=environment, forked=forked))
    return lanes


def started_ahead(machine: Machine, lanes: Sequence[Lane], memory_bytes: int | None, workloads: int) -> int:
    """Return how many processes are started ahead for each device, given its memory and the number of workloads to
    time.

    On a CPU it is 1, because a second process would import torch while the first times.
    """
    if not machine.count:
        return 1
    devices = len(devices_of(lanes))
    contexts = int((memory_bytes or 0) * CONTEXTS_SHARE / CONTEXT_BYTES)
    useful = max(math.ceil(workloads / devices) + SPARE_AHEAD, math.ceil(FEWEST_AHEAD / devices))
    return max(1, min(MOST_AHEAD // devices, contexts, useful))


def started_at_once(machine: Machine, busy: int) -> int:
    """Return how many processes may start at the same time while `busy` cores are busy. Each needs a core for seconds
    to import torch."""
    return machine.cores - busy


def _several_devices(machine: Machine) -> tuple[str, ...]:
    """Return the names of the GPUs as CUDA_VISIBLE_DEVICES accepts them; empty if there is only one, or if the names
    are not known."""
    devices = _devices() if machine.count > 1 else ()
    return devices if len(devices) > 1 else ()


def _devices() -> tuple[str, ...]:
    """Return the names of the visible GPUs. They are needed often, so the driver's answer is cached."""
    return _known_devices(measured_devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _known_shares(ask: Callable[[int], tuple[cores.Cores, ...]], count: int) -> tuple[cores.Cores, ...]:
    return ask(count) if count else ()


@functools.cache
def _known_devices(ask: Callable[[str], tuple[str, ...]], visible: str | None) -> tuple[str, ...]:
    return ask("cuda")


def ordered(tasks: Iterable[Task], lanes: Sequence[Lane], expected: Callable[[Task], float]) -> list[Task]:
    """Return the tasks in the order in which lanes start them. With several lanes, the longest group comes first.

    The first task of each group precedes the other tasks of all groups. A lane stays with its group, and takes a task
    of another group only when no group is left that has not begun. Tasks that need a child process come last.

    Tasks without another revision precede the others, because an operator that a revision registers by name when it is
    imported (`torch.library.custom_op`) would replace the one that the current side calls.
    """
    if len(lanes) < 2:
        return sorted(tasks, key=lambda task: task.accepted is not None)
    groups: dict[str | int, list[Task]] = {}
    for number, task in enumerate(tasks):
        # Tasks that time the same workload go to different processes.
        groups.setdefault(number if task.kind == TIME else task.group, []).append(task)
    longest = sorted(groups.values(), key=lambda group: sum(map(expected, group)), reverse=True)
    rest = sorted((task for group in longest for task in group[1:]), key=lambda task: task.needs_child)
    by_length = [group[0] for group in longest] + rest
    return sorted(by_length, key=lambda task: task.accepted is not None)


def seconds_of(tasks: Sequence[Task], lanes: Sequence[Lane], expected: Callable[[Task], float]) -> float:
    """Return the estimated seconds of the tasks in this order. On one device they run one after the other.

    Tasks that time the same workload go to different processes. If a device is shared, these are started ahead.
    """
    if not tasks:
        return 0.0
    shared = any(lane.lock for lane in lanes)
    lanes = devices_of(lanes) if shared else lanes
    loads = [0.0] * len(lanes)
    for task in tasks:
        loads[loads.index(min(loads))] += expected(task)
    most = max(Counter(task.id for task in tasks).values())
    return START_S * (1 if shared else most) + max(loads)
