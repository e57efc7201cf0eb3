"""The processes that time a workload together, which must all decide alike.

How often a side is called follows from times, which differ between processes. A side that calls collectives waits for
all ranks, so that one call more in one rank would wait for ever. Everything that decides about calls is therefore
asked of a `Peers`: of the ranks it answers each the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Peers:
    """A process that times alone. Subclasses answer for several processes, each of which asks at the same point."""

    def bits(self, count: int) -> int:
        """A random number of so many bits."""
        return secrets.randbits(count)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The largest of all processes' values at each place."""
        return list(seconds)

    def work(self, seconds: list[float], calls: int) -> list[float]:
        """The same of the seconds of calls that were not interrupted, of so many `calls`."""
        return seconds

    def all(self, flag: bool) -> bool:
        """Whether it is so in all processes."""
        return flag

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return flag

    def same(self, value: T) -> T:
        """The value of rank 0."""
        return value

    def meet(self) -> None:
        """Wait until all processes are here."""

    def line_up(self) -> None:
        """Have the device wait, before what is enqueued next, until all processes' devices are here."""

    def part(self, specs: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """This process's part of inputs."""
        return values


ALONE = Peers()
