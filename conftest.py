"""Top-level pytest configuration: the sides' packages are found from the root, wherever pytest is started."""

from __future__ import annotations

import os

import pytest

MOST_WORKERS = 8
"""Each takes a gigabyte of memory or two, and on a GPU a context of it."""

pytest_plugins = ["perfsuite.plugin"]


def pytest_configure() -> None:
    """float32 is float32 in a convolution, too: torch lets cuDNN round it to TF32 by default."""
    import torch

    torch.backends.cudnn.allow_tf32 = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for `-n auto`: one per usable core, and another because many tests wait.

    On two cores three workers leave a fortieth of the cores' time unused. Each worker imports and collects everything,
    which takes a core ten seconds or more.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, cores + 1)
