"""Dropout by a counter: the mask of a step follows from the seed and the step's number alone (leak_cnn).

No generator has a state: a run that is resumed, another device, a CUDA graph and a compiled function all drop the same.
"""

from __future__ import annotations

import torch

from suite.batching import STEP, WORD, hashed, mixed, signed

LANES = 4
"""Decisions from one hash of 64 bits: each from 16 of them."""
SHARES = 1 << 16
STREAM = 0x64726F70  # "drop"
"""Keeps the masks apart from the order of the segments, which is hashed from the same seed."""
STRIDE = signed(STEP)
"""SplitMix64's own, from which no two of a run's 2^30 steps have a word in common."""


def dropout_counter(seed: int, step: int) -> int:
    """What the mask of a step, from 0, is hashed from; the next step's is `STRIDE` more, in int64 with overflow."""
    return signed(mixed(mixed(seed & WORD) ^ STREAM) + step * STEP & WORD)


def dropout_mask(counter: torch.Tensor, rows: int, width: int, p: float, dtype: torch.dtype) -> torch.Tensor | None:
    """What to multiply the features by, [rows, width] on the counter's device: 0, or 1 / (1 - p); None for p = 0.

    An element is dropped with a probability of p, rounded to 1/65536. Nothing waits for the device.

    counter  int64 0-d, `dropout_counter`
    width    a multiple of 4
    """
    cut = round(p * SHARES)
    if not cut:
        return None
    words = width // LANES
    index = torch.arange(rows * words, dtype=torch.int64, device=counter.device).view(rows, words)
    # Not by multiples of STRIDE, as the steps are: torch.compile would take the product for an address, and overflow.
    hashes = hashed(counter + index)
    kept = torch.cat([((hashes >> 16 * lane) & (SHARES - 1)) >= cut for lane in range(LANES)], 1)
    return kept.to(dtype) * (1 / (1 - p))
