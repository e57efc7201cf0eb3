"""Weights that are drawn on the CPU from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded_on_cpu(seed: int) -> Iterator[None]:
    """Seed the CPU's generator in the block; afterwards it is as before.

    The GPUs' generators stay as they are, which `torch.manual_seed` would seed, too.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
