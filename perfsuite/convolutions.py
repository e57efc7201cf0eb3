"""Compute float32 convolutions in float32. By default PyTorch lets cuDNN round their inputs to TF32, which keeps only
10 bits of the mantissa."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfsuite.workload import TF32


@contextmanager
def exact(precision: str | None) -> Iterator[None]:
    """Compute float32 convolutions and recurrent layers in float32 within the block.

    If a pair declares the precision "tf32", the setting is not changed.
    """
    if precision == TF32:
        yield
        return
    settings: Any = torch.backends.cudnn
    if _is_readable(settings):
        with _set(settings, "allow_tf32", False):
            yield
    else:
        with _set(settings.conv, "fp32_precision", "ieee"), _set(settings.rnn, "fp32_precision", "ieee"):
            yield


def _is_readable(settings: Any) -> bool:
    """Return whether PyTorch can read the older setting. It raises once a project has set a newer one, such as
    `cudnn.conv.fp32_precision`. Until then the newer settings stay unset, so that the project can read the older one.
    """
    try:
        return isinstance(settings.allow_tf32, bool)
    except RuntimeError:
        return False


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
