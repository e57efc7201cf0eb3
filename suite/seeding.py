"""Seeded random weights, drawn on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded_on_cpu(seed: int) -> Iterator[None]:
    """Seed the CPU's generator for the block, then restore its state.

    Unlike `torch.manual_seed`, this does not seed the GPUs' generators.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
