"""Validation of a batch of mel spectrograms."""

from __future__ import annotations

import torch

from perfsuite.errors import PerfsuiteError


def check_mel(mel: torch.Tensor) -> None:
    """Raise PerfsuiteError unless `mel` has shape [B, mels, frames] and a floating-point dtype."""
    if mel.ndim != 3 or not mel.is_floating_point():
        raise PerfsuiteError(
            f"mel: {list(mel.shape)} of {mel.dtype}; give [B, mels, frames] of a floating dtype, as the data set has it"
        )
