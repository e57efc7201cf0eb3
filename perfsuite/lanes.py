"""Assign tasks to processes: a lane for each GPU while timing, one for each core while proving."""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from perfsuite import cores, preload
from perfsuite.folders import own_folder
from perfsuite.machine import measured_devices
from perfsuite.records import Machine
from perfsuite.tasks import ITEMS, TIME, Task
from perfsuite.worker_process import Lane, devices_of

FILE = "durations.json"
USUAL_S = {"prove": 3.0, "time": 2.0, "items": 1.0, "alone": 0.5}
"""Estimated seconds of a task that was never done before, by kind, besides its calls of the sides."""
CALLS = {"prove": 10.0, "time": 50.0, "items": 0.0, "alone": 20.0}
"""Estimated calls of a workload's sides in such a task, by kind."""
START_S = 6.0
"""Seconds that a process takes until its first task: importing torch and the test modules."""
LONGEST_S = 1e6
"""Seconds that no task takes: where the file says so, it is damaged."""
MOST_PROVERS, MOST_PROVERS_EACH = 12, 8
"""Most proving processes on one GPU, and on each of several. A process takes a context and a cache of the GPU's memory,
and several gigabytes of the host's. On two H200s with 32 cores, 24 processes did no more work a second than 12 had done
on one of them."""

CONTEXT_BYTES, CONTEXTS_SHARE = 1 << 30, 0.125
"""The memory counted for the CUDA context of each waiting process, and the largest share of a GPU's memory for all."""
MOST_TOGETHER, CORES_EACH = 12, 4 / 3
"""Most processes that prepare beside each other on a GPU, and the cores for each. All that are ready time one after the
other, so that few workloads with several processes each are timed in one round."""
PEAKS_SPARE = 2.0
"""A process may hold more than the peak of one call: inputs of all sides, and what its allocator keeps."""
MOST_AHEAD = 16
"""Processes that are started ahead, over all GPUs: each takes about a gigabyte of the host's memory."""
SPARE_AHEAD = 2
"""More processes than a GPU has workloads, so that a workload that is not decided has another process at once."""
FEWEST_AHEAD = 12
"""Fewest processes that are started ahead where there are few workloads: each process times a workload once, and one
that is hard to decide takes this many."""


ALL_GPUS = Lane()
"""Lane for workloads that several processes call together: its process sees every GPU, and nothing runs beside it."""


class Durations:
    """Seconds that each task took the last time, in a file of perfsuite's own folder in the project."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.seconds: dict[str, float] = {}
        try:
            found = json.loads(self.path.read_text())
            self.seconds = {str(k): float(v) for k, v in found.items() if 0 <= float(v) < LONGEST_S}
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            pass  # only an estimate depends on it

    def of(self, task: Task, call_s: float = 0.0) -> float:
        """Return the estimated seconds of the task; `call_s` is the seconds of a call of its slowest side."""
        if self.has(task):
            return self.seconds[f"{task.kind} {task.id}"]
        return USUAL_S[task.kind] + CALLS[task.kind] * call_s

    def has(self, task: Task) -> bool:
        """Return whether it is known what the task took the last time."""
        return f"{task.kind} {task.id}" in self.seconds

    def note(self, kind: str, id: str, seconds: float) -> None:
        """Note the seconds that a task of this kind took."""
        self.seconds[f"{kind} {id}"] = round(seconds, 3)

    def save(self) -> None:
        """Write the file. Where that cannot be done, the next estimate is a guess."""
        try:
            own_folder(self.path.parent)
            self.path.write_text(json.dumps(self.seconds, indent=0, sort_keys=True))
        except OSError:
            pass


def for_timing(machine: Machine, locks: Path | None = None, beside: int = 1) -> list[Lane]:
    """Return one lane for each GPU, or one for the CPU: a timed workload runs alone on its device.

    With a folder for the `locks`, return `beside` lanes for each GPU, whose processes prepare beside each other. The
    locks are named by GPU, so that runs on other GPUs are not held up. Of several GPUs each has cores of its own.
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
    return [replace(lane, lock=file) for _ in range(beside) for lane, file in zip(lanes, files, strict=False)]


def together(memory_bytes: int | None, peaks: Collection[int | None], cores: int) -> int:
    """Return how many workloads with these peaks of memory may be prepared beside each other on one GPU with this many
    cores.

    None is a peak that is not known. CONTEXTS_SHARE of the memory is left for the contexts of waiting processes.
    """
    known = sorted((p for p in peaks if p is not None), reverse=True)
    if memory_bytes is None or len(known) < len(peaks):
        return 1
    most = max(1, min(MOST_TOGETHER, int(cores / CORES_EACH), len(peaks)))
    free = (1 - CONTEXTS_SHARE) * memory_bytes
    return next(n for n in range(most, 0, -1) if n == 1 or PEAKS_SPARE * sum(known[:n]) <= free)


def for_proving(tasks: Collection[Task], machine: Machine) -> list[Lane]:
    """Return a lane for each core. Nothing is timed, so that the processes may disturb each other."""
    devices = _several_devices(machine)
    most = MOST_PROVERS_EACH * len(devices) or MOST_PROVERS
    count = max(1, min(machine.cores, most, len(tasks)))
    each = str(max(1, machine.cores // count))
    # Not for what will be timed, with all threads: its outputs must have the same bits then.
    own_threads = all(t.kind == ITEMS for t in tasks) and "OMP_NUM_THREADS" not in os.environ
    forked = preload.is_useful() and not own_threads  # a fork has the threads with which its server imported torch
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

    On a CPU it is one: a second would import torch while the first times.
    """
    if not machine.count:
        return 1
    devices = len(devices_of(lanes))
    contexts = int((memory_bytes or 0) * CONTEXTS_SHARE / CONTEXT_BYTES)
    useful = max(math.ceil(workloads / devices) + SPARE_AHEAD, math.ceil(FEWEST_AHEAD / devices))
    return max(1, min(MOST_AHEAD // devices, contexts, useful))


def started_at_once(machine: Machine, busy: int) -> int:
    """Return how many processes may start at the same time while `busy` cores are busy: each imports torch for
    seconds."""
    return machine.cores - busy


def _several_devices(machine: Machine) -> tuple[str, ...]:
    """Return the GPUs by the names that CUDA_VISIBLE_DEVICES takes; empty where there is only one, or where they have
    no names."""
    devices = _devices() if machine.count > 1 else ()
    return devices if len(devices) > 1 else ()


def _devices() -> tuple[str, ...]:
    """Return the visible GPUs' names. They are needed at each turn, so the driver's answer is cached."""
    return _known_devices(measured_devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _known_shares(ask: Callable[[int], tuple[cores.Cores, ...]], count: int) -> tuple[cores.Cores, ...]:
    return ask(count) if count else ()


@functools.cache
def _known_devices(ask: Callable[[str], tuple[str, ...]], visible: str | None) -> tuple[str, ...]:
    return ask("cuda")


def ordered(tasks: Iterable[Task], lanes: Sequence[Lane], expected: Callable[[Task], float]) -> list[Task]:
    """Return the order in which lanes take the tasks: among several lanes the longest group first.

    The first task of each group goes before the rest of any: a lane keeps to its group, and takes from another's only
    when none is left that has not begun, one that needs a child process last.

    Tasks without another revision go before the others: an operator that a revision registers by name when it is
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
    """Return the seconds that the tasks will take in this order; on one device they run one after the other.

    Tasks that time the same workload go to different processes. Where a device is shared, these start ahead.
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
