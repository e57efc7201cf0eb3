"""Size of the heavy tests: a modest number of trials in `make test`, all of them in `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

SCALE = "PERFSUITE_TEST_SCALE"
FULL = os.environ.get(SCALE) == "full"
"""True if this run is `make test-all`."""


def count(*, quick: int, full: int) -> int:
    """Return the number of trials: `full` in `make test-all`, `quick` otherwise."""
    return full if FULL else quick


def in_full() -> bool:
    """Return whether pairs are tested in full: in `make test-all`, and wherever there is a GPU."""
    return FULL or torch.cuda.is_available()


def draws(*, cpu: int, otherwise: int | None = None) -> int | None:
    """Return the limit on a pair's draws: `cpu` in `make test` without a GPU, and `otherwise` in all other runs.

    A pair with a limit uses only random draws. Without a limit, the default of `otherwise`, it also uses draws that
    cover every kind of input, and large sizes.
    """
    return otherwise if in_full() else cpu


def steps(*, cpu: tuple[int, ...], otherwise: tuple[int, ...]) -> tuple[int, ...]:
    """Return the step counts after which a pair's states are compared: `cpu` in `make test` without a GPU."""
    return otherwise if in_full() else cpu


def ranks(*numbers: int) -> tuple[int, ...]:
    """Return the numbers of processes that a pair is tested in: only the first in `make test` without a GPU. On two
    cores, four processes take long to start."""
    return numbers if in_full() else numbers[:1]


FULLY = pytest.mark.skipif(not FULL, reason="runs in make test-all")
"""Mark of a case that a normal run skips."""


def some(cases: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """Return parameters for these cases; only make test-all runs those that are not `usual`.

    Raises ValueError for a usual case that is not among the cases.
    """
    cases = list(cases)
    if absent := [case for case in usual if case not in cases]:
        raise ValueError(f"no such case: {absent[0]!r}")
    return [pytest.param(case, marks=[] if case in usual else FULLY) for case in cases]
