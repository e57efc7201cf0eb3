"""Assign cores to the processes of each GPU if there are several GPUs.

Otherwise the processes of one GPU slow the host code of workloads that are timed on another. The threads of an operator
wait for each other: if one of them loses its core, an operator of 2 ms takes 150 ms. Also, a process might run on cores
that are far from its GPU.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from perfsuite.system.machine import cores_near_gpus

FEWEST = 4
"""With fewer cores per GPU than this, no process is confined, because they need each other's cores while they
prepare."""
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

Cores = frozenset[int]
ANY: Cores = frozenset()
"""Value for a process that is not confined to any cores."""


def of_gpus(count: int) -> tuple[Cores, ...]:
    """Return, for each of `count` visible GPUs, its share of the cores that this process may use; ANY for all if
    processes are not confined.

    GPUs that are near the same cores get equal shares of them. Both threads of a physical core are in one share.
    """
    try:
        usable = frozenset(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return (ANY,) * count
    near = [usable.intersection(cores) or usable for cores in cores_near_gpus()]
    if len(near) != count or any(a != b and a & b for a in near for b in near):
        near = [usable] * count
    shares = tuple(_share(near[n], near[:n].count(near[n]), near.count(near[n])) for n in range(count))
    return shares if all(len(share) >= FEWEST for share in shares) else (ANY,) * count


def _share(cores: Collection[int], number: int, count: int) -> Cores:
    """Divide the physical cores among these into `count` parts, and return the threads of one part."""
    physical = sorted({_threads(core).intersection(cores) for core in cores}, key=min)
    return frozenset().union(*physical[number * len(physical) // count : (number + 1) * len(physical) // count])


def _threads(core: int) -> Cores:
    """Return all hardware threads of the core's physical core; the core alone if the system does not list them."""
    try:
        return _numbers(Path(SIBLINGS.format(core)).read_text()) | {core}
    except (OSError, ValueError):
        return frozenset({core})


def _numbers(text: str) -> Cores:
    """Parse a list of numbers in the Linux kernel's format: "0-2,8" is 0, 1, 2, 8."""
    ends: Iterator[Sequence[str]] = (part.strip().split("-") for part in text.split(","))
    return frozenset(n for part in ends for n in range(int(part[0]), int(part[-1]) + 1))


@contextmanager
def confined(cores: Cores) -> Iterator[None]:
    """Confine the processes that this thread starts in the block to these cores."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
