"""Compute float32 convolutions in float32. By default PyTorch lets cuDNN round their inputs to TF32, which keeps only
10 bits of the mantissa."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from perfsuite.declare.workload import TF32


@contextmanager
def exact(precision: str | None) -> Iterator[None]:
    """Compute float32 convolutions and recurrent layers in float32 within the block.

    If a pair declares the precision "tf32", the setting is not changed.
    """
    if precision == TF32:
        yield
        return
    settings: Any = torch.backends.cudnn
    with ExitStack() as stack:
        if _is_readable(settings):
            stack.enter_context(changed(settings, "allow_tf32", False))
        for operator in (settings.conv, settings.rnn):
            if operator.fp32_precision == TF32:  # also where `torch.backends.fp32_precision` says so
                stack.enter_context(changed(operator, "fp32_precision", "ieee"))
        yield


def _is_readable(settings: Any) -> bool:
    """Return whether PyTorch can read the older setting. It raises where a newer one, such as
    `cudnn.conv.fp32_precision`, contradicts it. Otherwise the newer settings stay unset, so that the project can read
    the older one.
    """
    try:
        return isinstance(settings.allow_tf32, bool)
    except RuntimeError:
        return False


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute within the block, and restore its value afterwards."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
