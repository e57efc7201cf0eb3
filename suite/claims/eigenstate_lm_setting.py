"""Sizes and settings at which the claims of eigenstate_lm are measured, and the figures that its source claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from suite.eigenstate_lm.config import TrainConfig
from suite.eigenstate_lm.model import VOCABULARY

SOURCE = TrainConfig(accumulation=1)
"""The source's network and its batch, with one micro-batch per step."""
STEP, STEP_BEFORE = 0.37, 17.0
"""Seconds of a step, as the source gives them."""
RATE, RATE_BEFORE = 22_089, 50
"""Tokens per second, as the source gives them."""
HOURS, HOURS_BEFORE = 1.7, 92.0
"""Hours of a run, as the source gives them."""
TIMES = 53.9
CACHED = 256
"""Chunks in the source's cache."""
EVERY = 10
"""Steps between two calls that empty the allocator's cache."""
PREFETCH, PREFETCH_MORE = 2, (4, 8)
CHUNKS = (1, 16, 64, 256)
TOLERANCE = 0.1
"""A measured figure may differ from the claimed one by this share."""
NOTHING = 0.05
"""A gain below this share counts as none."""
QUALITY = 0.01
"""A loss that is higher by more than this share is worse."""
ROUNDING = 1e-5
"""Largest relative error, against float64, that counts as rounding of float32 sums over thousands of steps."""
EPS = torch.finfo(torch.float32).eps
MB, GB = 1e6, 1e9
PRECISIONS: Mapping[str, Mapping[str, bool]] = {
    "float32": {},
    "TF32": {"tf32": True},
    "bfloat16": {"autocast_bf16": True},
    "float16": {"autocast_fp16": True},
}
TINY = TrainConfig(
    width=64,
    layers=2,
    eigenstates=16,
    sequence_length=64,
    batch_size=4,
    accumulation=2,
    steps=200,
    learning_rate=3e-3,
    dropout=0.0,
    use_compile=False,
)
"""The settings of configs/eigenstate_lm/tiny.yaml, but uncompiled: torch.compile does not pay off for small kernels."""
TINY_VOCABULARY = 2048
ENDS = 8
"""Number of last steps whose mean loss is the final loss of a run."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device and sizes of the measurements."""

    device: torch.device
    config: TrainConfig = SOURCE
    """Configuration of the timed steps."""
    vocabulary: int = VOCABULARY
    cached: int = CACHED
    """Number of sequences in the text."""
    rounds: int = 4
    reference: tuple[int, int] = (512, 2048)
    """Sequence lengths at which the reference trainer is timed."""
    loop: tuple[int, ...] = (512, 1024, 2048)
    """Sequence lengths at which the recurrence runs step by step, with a gradient."""
    scanned: int = 32768
    """Sequence length of the scan."""
    reach: int = 32768
    """Number of tokens over which a gradient is followed back."""
    rows: int = 131072
    """Rows for which the loss is computed, or fewer if these do not fit into memory."""
    trained: TrainConfig = TINY
    """Configuration of the runs whose losses are compared."""
    trained_vocabulary: int = TINY_VOCABULARY
    seeds: int = 3
    workers: int = 4


def setting(device: torch.device) -> Setting:
    """Return the source's size on a GPU, and elsewhere a size that takes seconds."""
    if device.type == "cuda":
        return Setting(device=device)
    small = TrainConfig(
        width=16,
        layers=2,
        eigenstates=4,
        sequence_length=32,
        batch_size=2,
        accumulation=1,
        num_workers=1,
        use_compile=False,
    )
    return Setting(
        device=device,
        config=small,
        vocabulary=500,
        cached=16,
        rounds=3,
        reference=(16, 32),
        loop=(64, 128, 256),
        scanned=1024,
        reach=4096,
        rows=1024,
        trained=dataclasses.replace(TINY, width=16, eigenstates=4, sequence_length=16, steps=20),
        trained_vocabulary=60,
        seeds=2,
        workers=1,
    )
