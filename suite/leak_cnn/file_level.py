"""File-level detection of LEAK: the parts that the reference and the optimized evaluation share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from perfsuite.errors import PerfsuiteError

THRESHOLD = 0.5

Forward = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Segments [N, 1, mels, frames] → logits of the classes [N, classes] and of a leak [N]."""


def windows_needed(long_windows: int) -> int:
    """Return how many long windows of a file must reach the threshold: half of them, rounded up."""
    return -(-long_windows // 2)


def check_mels(mels: torch.Tensor) -> None:
    """Raise PerfsuiteError unless `mels` is [files, long windows, short windows, mels, frames], with windows."""
    if mels.ndim != 5 or not all(mels.shape[1:3]):
        raise PerfsuiteError(
            f"mels: the shape is {list(mels.shape)}; give [files, long windows, short windows, mels, frames], with one "
            "window or more of each"
        )
