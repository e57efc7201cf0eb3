"""Coordinate the processes that time a workload together, so that all make the same decisions.

The number of calls of a side depends on times, which differ between processes. A side that calls collectives waits for
all ranks, so an additional call in one rank would wait forever. Every value that affects the number of calls therefore
comes from a `Peers`, which returns the same value in all ranks.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Peers:
    """A process that times alone. Subclasses serve several processes, which must call each method at the same point."""

    def bits(self, count: int) -> int:
        """Return a random number of `count` bits."""
        return secrets.randbits(count)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the largest value over all processes, at each position."""
        return list(seconds)

    def work(self, seconds: list[float], calls: int) -> list[float]:
        """Return the result of `slowest` for the seconds of those of the `calls` that were not interrupted."""
        return seconds

    def all(self, flag: bool) -> bool:
        """Return whether the flag is true in all processes."""
        return flag

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true in any process."""
        return flag

    def same(self, value: T) -> T:
        """Return the value of rank 0."""
        return value

    def meet(self) -> None:
        """Wait until all processes have called this."""

    def line_up(self) -> None:
        """Enqueue a barrier: the device waits, before later work, until all processes' devices have reached it."""

    def part(self, specs: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Return this process's part of the inputs."""
        return values


ALONE = Peers()
