"""Validation of the arguments of `parallel_sampling`, for the reference and the optimized implementation."""

from __future__ import annotations

import math

import torch

LEAST = torch.finfo(torch.float32).tiny
"""Smallest temperature: the smallest normal float32 number. Smaller numbers lose precision."""


def check_options(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_p: float) -> None:
    """Raise ValueError if the shapes, the temperature or top_p define no distribution to sample from."""
    if logits.dim() != 2 or logits.shape[1] == 0 or uniforms.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {list(logits.shape)}, uniforms {list(uniforms.shape)}: give [rows, vocabulary], one token or "
            f"more, and [rows]"
        )
    if not LEAST <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: it must be finite, and {LEAST:.2g} at least")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: it must be above 0, and 1 at most")
