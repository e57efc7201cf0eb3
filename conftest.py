"""Top-level pytest configuration: the sides' packages are found from the root, wherever pytest is started."""

from __future__ import annotations

import gc
import os

import pytest

MOST_WORKERS = 8
"""Each takes a gigabyte of memory or two, and on a GPU a context of it."""

last_file = ""

pytest_plugins = ["perfsuite.plugin"]


def pytest_configure() -> None:
    """float32 is float32 in a convolution, too: torch lets cuDNN round it to TF32 unless told otherwise."""
    import torch

    torch.backends.cudnn.allow_tf32 = False


def pytest_collection_finish() -> None:
    """Collect garbage rarely: each full collection looks through torch's modules, which a tenth of all time went to."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """After each file, exclude all live objects from garbage collection: later tests collect often, and need not look
    through torch's compiler and Hypothesis' records each time."""
    global last_file
    file = nodeid.partition("::")[0]
    if file != last_file:
        gc.collect()
        gc.freeze()
        last_file = file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: a worker for each core that this process may use."""
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
