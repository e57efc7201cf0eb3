"""Size of the heavy tests: a modest number of trials in `make test`, all of them in `make test-all`."""

from __future__ import annotations

import os

import pytest
import torch

SCALE = "PERFSUITE_TEST_SCALE"
FULL = os.environ.get(SCALE) == "full"
"""True if this run is `make test-all`."""


def count(*, quick: int, full: int) -> int:
    """Return the number of trials: `full` in `make test-all`, `quick` otherwise."""
    return full if FULL else quick


MOST_DRAWS = 500


def draws(*, cpu: int) -> int:
    """Most draws of a pair's proof: `cpu` in `make test` without a GPU, as many as are asked for otherwise."""
    return MOST_DRAWS if FULL or torch.cuda.is_available() else cpu


FULLY = pytest.mark.skipif(not FULL, reason="runs in make test-all")
"""Mark of a case that a normal run leaves out."""
