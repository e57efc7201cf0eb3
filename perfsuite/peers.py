"""The processes that time a workload together, which must all decide alike.

How often a side is called follows from times, which differ between processes. A side that calls collectives waits for
all ranks, so that one call more in one rank would wait for ever. Everything that decides about calls is therefore asked
of a `Peers`, which gives all ranks the same answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Peers:
    """A process that times alone. Subclasses answer for several processes, each of which asks at the same point."""

    def bits(self, count: int) -> int:
        """Return a random number of `count` bits."""
        return secrets.randbits(count)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return the largest of all processes' values at each place."""
        return list(seconds)

    def work(self, seconds: list[float], calls: int) -> list[float]:
        """Return the same for the seconds of those of the `calls` that were not interrupted."""
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
        """Wait until all processes are here."""

    def line_up(self) -> None:
        """Have the device wait, before what is enqueued next, until all processes' devices are here."""

    def part(self, specs: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """Return this process's part of inputs."""
        return values


ALONE = Peers()
