"""Counter-based dropout for leak_cnn: the mask of a step depends only on the seed and the number of the step.

There is no generator state. Resumed runs, other devices, CUDA graphs and compiled functions drop the same elements.
"""

from __future__ import annotations

import torch

from suite.batching import STEP, WORD, hashed, mixed, signed

LANES = 4
"""Number of elements per 64-bit hash. Each element uses 16 bits of it."""
SHARES = 1 << 16
"""Number of values that 16 bits can have."""
STREAM = 0x64726F70  # "drop"
"""Constant that makes the masks independent of the order of the segments, which is hashed from the same seed."""
STRIDE = signed(STEP)
"""Increment of SplitMix64, as int64. With it, no two steps of a run of 2^30 steps share a hash input."""


def dropout_counter(seed: int, step: int) -> int:
    """Return the counter from which the mask of a step is hashed. Steps are counted from 0.

    The counter of the next step is larger by `STRIDE`, in int64 arithmetic that wraps around.
    """
    return signed(mixed(mixed(seed & WORD) ^ STREAM) + step * STEP & WORD)


def dropout_mask(counter: torch.Tensor, rows: int, width: int, p: float, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the dropout factors, each 0 or 1 / (1 - p), [rows, width] on the counter's device; None if p rounds to 0.

    An element is dropped with probability p, rounded to a multiple of 1/65536. The host does not wait for the device.

    counter  int64 0-d, as returned by `dropout_counter`
    width    a multiple of 4
    """
    cut = round(p * SHARES)
    if not cut:
        return None
    words = width // LANES
    index = torch.arange(rows * words, dtype=torch.int64, device=counter.device).view(rows, words)
    # The index is not multiplied by STRIDE: torch.compile would treat the product as an address, and overflow.
    hashes = hashed(counter + index)
    kept = torch.cat([((hashes >> 16 * lane) & (SHARES - 1)) >= cut for lane in range(LANES)], 1)
    return kept.to(dtype) * (1 / (1 - p))
