"""Parts of the file-level leak detection that the reference and the optimized evaluation share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from perfsuite.errors import PerfsuiteError

THRESHOLD = 0.5
"""Default threshold on the leak probability of a long window."""

Forward = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Segments [N, 1, mels, frames] → (class logits [N, classes], leak logits [N])."""


def windows_needed(long_windows: int) -> int:
    """Return the number of long windows of a file that must reach the threshold: half of them, rounded up."""
    return -(-long_windows // 2)


def check_mels(mels: torch.Tensor) -> None:
    """Raise PerfsuiteError unless `mels` has shape [files, long windows, short windows, mels, frames].

    Both numbers of windows must be 1 or more.
    """
    if mels.ndim != 5 or not all(mels.shape[1:3]):
        raise PerfsuiteError(
            f"mels: the shape is {list(mels.shape)}; give [files, long windows, short windows, mels, frames], with one "
            "window or more of each"
        )
