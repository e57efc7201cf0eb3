"""Named ranges of a window, e.g. generation and optimizer: in a trace, and as NVTX ranges for Nsight Systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

PREFIX = "window: "
"""Of the ranges' names in a trace, by which they are told from PyTorch's own."""
OUTER = ("data", "train")
"""Those that the loop names, in which a trainer's own ones lie."""
_traced = False


def phase(name: str) -> AbstractContextManager[None]:
    """Name what is done within, while a trace is made; otherwise it costs nothing."""
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
    """Whether ranges are named from now on."""
    global _traced
    _traced = on
