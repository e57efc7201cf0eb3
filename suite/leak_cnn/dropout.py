"""Counter-based dropout: the mask of a step depends only on the seed and the step's number (leak_cnn).

There is no generator state: a resumed run, another device, a CUDA graph and a compiled function drop the same elements.
"""

from __future__ import annotations

import torch

from suite.batching import STEP, WORD, hashed, mixed, signed

LANES = 4
"""Elements decided by one 64-bit hash: each takes 16 bits."""
SHARES = 1 << 16
STREAM = 0x64726F70  # "drop"
"""Makes the masks independent of the order of the segments, which is hashed from the same seed."""
STRIDE = signed(STEP)
"""SplitMix64's increment. With it, no two of a run's 2^30 steps share a word."""


def dropout_counter(seed: int, step: int) -> int:
    """Return the counter of a step, from 0, that its mask is hashed from.

    The next step's counter is larger by `STRIDE`, in int64 arithmetic that wraps around.
    """
    return signed(mixed(mixed(seed & WORD) ^ STREAM) + step * STEP & WORD)


def dropout_mask(counter: torch.Tensor, rows: int, width: int, p: float, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the factors of the features, [rows, width] on the counter's device: 0 or 1 / (1 - p); None for p = 0.

    An element is dropped with probability p, rounded to 1/65536. The function does not wait for the device.

    counter  int64 0-d, `dropout_counter`
    width    a multiple of 4
    """
    cut = round(p * SHARES)
    if not cut:
        return None
    words = width // LANES
    index = torch.arange(rows * words, dtype=torch.int64, device=counter.device).view(rows, words)
    # No multiples of STRIDE, unlike the steps: torch.compile would treat the product as an address, and overflow.
    hashes = hashed(counter + index)
    kept = torch.cat([((hashes >> 16 * lane) & (SHARES - 1)) >= cut for lane in range(LANES)], 1)
    return kept.to(dtype) * (1 / (1 - p))
