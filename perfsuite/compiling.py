"""Counts compilations by torch.compile and Triton, to see whether a call has compiled.

It also keeps torch from writing traces of them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from perfsuite import scrutiny


@dataclass(frozen=True, slots=True)
class Compiled:
    """The numbers of graphs and kernels that this process has compiled."""

    graphs: int = 0
    """By torch.compile, and frames in which it failed."""
    kernels: int = 0
    """By Triton."""
    read: int = 0
    """Kernels that Triton found compiled in its cache on disk."""


class _Kernels:
    """Counts what Triton says that it compiles, and hands it on to the listener before."""

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


def so_far() -> Compiled:
    """Count the compilations of this process, of Triton kernels since the first call."""
    kernels = _listener()
    return Compiled(
        graphs=scrutiny.compilations(),
        kernels=kernels.made if kernels else 0,
        read=kernels.read if kernels else 0,
    )


@contextmanager
def untraced() -> Iterator[None]:
    """Inside, torch writes no trace of what it compiles.

    It writes one where the logger of traces has a handler, and pytest adds one to each logger that does not propagate.
    """
    logger = logging.getLogger("torch.__trace")
    handlers, logger.handlers = logger.handlers, []
    try:
        yield
    finally:
        logger.handlers = handlers


def _listener() -> _Kernels | None:
    """Ours, set where it is not yet; None where Triton is not loaded or too old to have one."""
    knobs: Any = sys.modules.get("triton.knobs")
    if knobs is None or not hasattr(knobs.compilation, "listener"):
        return None
    current = knobs.compilation.listener
    if not isinstance(current, _Kernels):
        current = knobs.compilation.listener = _Kernels(current)
    return current
