"""The CPU cores on which the processes of each GPU run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfsuite.session import cores
from perfsuite.session.cores import ANY, of_gpus

EVERY = frozenset(range(16))
Shares = Callable[..., tuple[frozenset[int], ...]]


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shares:
    """Return the shares of a machine with these usable cores, threads per physical core, and cores near each GPU."""

    def found(
        near: tuple[frozenset[int], ...], threads: Callable[[int], str] = str, usable: frozenset[int] = EVERY
    ) -> tuple[frozenset[int], ...]:
        for core in usable:
            (tmp_path / str(core)).write_text(threads(core))
        monkeypatch.setattr(cores, "SIBLINGS", str(tmp_path / "{}"))
        monkeypatch.setattr(cores, "cores_near_gpus", lambda: near)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(usable), raising=False)
        return of_gpus(2)

    return found


def test_gpus_near_the_same_cores_share_them_evenly(shares: Shares) -> None:
    assert shares((EVERY, EVERY)) == (frozenset(range(8)), frozenset(range(8, 16)))
    assert shares((ANY, ANY)) == (frozenset(range(8)), frozenset(range(8, 16)))  # NVML does not say
    assert shares(()) == (frozenset(range(8)), frozenset(range(8, 16)))


def test_both_threads_of_a_physical_core_are_in_one_share(shares: Shares) -> None:
    first, second = shares((EVERY, EVERY), lambda core: f"{core % 8},{core % 8 + 8}")
    assert first == {0, 1, 2, 3, 8, 9, 10, 11}
    assert first | second == EVERY
    assert not first & second
    assert shares((EVERY, EVERY), lambda core: f"{core - core % 2}-{core - core % 2 + 1}")[0] == set(range(8))


def test_a_gpu_gets_the_cores_near_it(shares: Shares) -> None:
    low, high = frozenset(range(10)), frozenset(range(10, 16))
    assert shares((high, low)) == (high, low)
    assert shares((high, low), usable=frozenset(range(4, 16))) == (high, frozenset(range(4, 10)))
    # Unusable cores do not count, and neither do nodes that overlap only in part.
    assert shares((low, frozenset(range(100, 110)))) == (frozenset(range(8)), frozenset(range(8, 16)))
    assert shares((low, frozenset(range(5, 16)))) == (frozenset(range(8)), frozenset(range(8, 16)))


def test_unreadable_siblings_file_counts_each_core_separately(shares: Shares) -> None:
    assert shares((EVERY, EVERY), lambda core: "none") == (frozenset(range(8)), frozenset(range(8, 16)))


def test_processes_are_not_confined_on_few_cores(shares: Shares, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares((EVERY, EVERY), usable=frozenset(range(7))) == (ANY, ANY)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert of_gpus(2) == (ANY, ANY)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot confine processes")
def test_child_processes_are_confined_to_the_given_cores() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({max(before)})

    def started(confined_to: Any) -> set[int]:
        with cores.confined(confined_to):
            command = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
            return {int(n) for n in subprocess.check_output(command, text=True).split()}

    assert started(one) == one
    assert started(ANY) == before
    assert os.sched_getaffinity(0) == before
