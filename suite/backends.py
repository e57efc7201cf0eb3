"""Context managers for torch's global settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def tf32_products(*, allowed: bool) -> Iterator[None]:
    """Set whether float32 matrix products and convolutions may use TF32 (10-bit mantissa) on tensor cores."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def deterministic_convolutions() -> AbstractContextManager[None]:
    """Restrict cuDNN to algorithms with a fixed summation order, so that every run gives the same bits."""
    return _cudnn("deterministic", True)


def cudnn_benchmark(*, on: bool) -> AbstractContextManager[None]:
    """Set whether cuDNN times its algorithms at the first call of each shape and then uses the fastest."""
    return _cudnn("benchmark", on)


@contextmanager
def _cudnn(name: str, value: bool) -> Iterator[None]:
    before = getattr(torch.backends.cudnn, name)
    setattr(torch.backends.cudnn, name, value)
    try:
        yield
    finally:
        setattr(torch.backends.cudnn, name, before)
