"""Named ranges of a window, e.g. generation and optimizer, in a trace and as NVTX ranges for Nsight Systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

PREFIX = "window: "
"""Prefix of the ranges' names in a trace; it distinguishes them from PyTorch's own ranges."""
OUTER = ("data", "train")
"""Ranges of the training loop, which contain a trainer's own ranges."""
_traced = False


def phase(name: str) -> AbstractContextManager[None]:
    """Return a context that names its block in a trace. Without a trace it does nothing."""
    return _named(name) if _traced else nullcontext()


@contextmanager
def _named(name: str) -> Iterator[None]:
    with torch.profiler.record_function(PREFIX + name):
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def set_traced(on: bool) -> None:
    """Switch the naming of ranges on or off."""
    global _traced
    _traced = on
