"""Count compilations by torch.compile and Triton, to detect whether a call has compiled anything.

This module also keeps torch from writing traces of compilations.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Compiled:
    """Numbers of graphs and kernels that this process has compiled."""

    graphs: int = 0
    """Graphs compiled by torch.compile, and frames in which it failed."""
    kernels: int = 0
    """Kernels compiled by Triton."""
    read: int = 0
    """Compiled kernels that Triton found in its cache on disk."""


class _Kernels:
    """Listener that counts the compilations that Triton reports, and forwards each report to the previous listener."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.made = self.read = 0

    def __call__(self, **said: Any) -> None:
        if said.get("cache_hit"):
            self.read += 1
        else:
            self.made += 1
        if self.before is not None:
            self.before(**said)


def graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process, plus frames in which it failed."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return 0
    frames, graphs = dynamo.utils.counters["frames"], dynamo.utils.counters["stats"]
    # With fullgraph=True, frames are not counted.
    return int(graphs["unique_graphs"] + frames["total"] - frames["ok"])


def so_far() -> Compiled:
    """Return the compilations of this process so far. Triton kernels are counted since the first call of this
    function."""
    kernels = _listener()
    return Compiled(
        graphs=graphs(),
        kernels=kernels.made if kernels else 0,
        read=kernels.read if kernels else 0,
    )


@contextmanager
def untraced() -> Iterator[None]:
    """Keep torch from writing traces of what it compiles in the block.

    It writes traces if the trace logger has a handler, and pytest adds a handler to each logger that does not
    propagate.
    """
    logger = logging.getLogger("torch.__trace")
    handlers, logger.handlers = logger.handlers, []
    try:
        yield
    finally:
        logger.handlers = handlers


def _listener() -> _Kernels | None:
    """Return perfsuite's listener, installing it if needed; None if Triton is not imported or too old to have one."""
    knobs: Any = sys.modules.get("triton.knobs")
    if knobs is None or not hasattr(knobs.compilation, "listener"):
        return None
    current = knobs.compilation.listener
    if not isinstance(current, _Kernels):
        current = knobs.compilation.listener = _Kernels(current)
    return current
