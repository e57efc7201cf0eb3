"""Sizes and settings at which the claims of leak_cnn are measured, and the figures that its source claims."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from suite.leak_cnn.costs import BATCH
from suite.leak_cnn.epochs import Data

EPOCH = 60.0
"""Seconds of an epoch, as the source gives them."""
STEPS = 7
"""Steps of an epoch, as the source counts them."""
VALIDATION = 10_000
"""Segments of the validation set, as the source counts them."""
TOGETHER = 20
"""Steps that are timed in a row."""
TOLERANCE = 0.1
"""A measured figure may differ by this share from one that is claimed without a range."""
MB = 1e6
FEW = Data(train_files=10, validation_files=5)
FEW_BATCH = 112
"""Batch size for the 800 segments of ten files: seven batches and a remainder, as 5632 gives for 40,000 segments."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device and sizes of the measurements; the network always has the source's size."""

    device: torch.device
    batch_size: int = BATCH
    workers: int = 8
    compiled: bool = True
    """True if compiled forms are measured too."""
    rounds: int = 7
    data: Data = dataclasses.field(default_factory=Data)
    """Data of the epochs that are timed."""
    few: Data = FEW
    """Data of the epochs whose steps or syncs are counted."""


def setting(device: torch.device) -> Setting:
    """Return the source's size on a GPU, and elsewhere small batches that need neither a compiler nor GPU timing."""
    if device.type == "cuda":
        return Setting(device=device)
    return Setting(device=device, batch_size=32, workers=0, compiled=False, rounds=3)
