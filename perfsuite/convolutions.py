"""float32 in a convolution: unless told otherwise, torch lets cuDNN round its factors to TF32, which have 10 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfsuite.pair import TF32


@contextmanager
def exact(precision: str | None) -> Iterator[None]:
    """Convolutions and recurrent layers of float32 are computed in float32.

    Where a pair declares the precision "tf32", the setting stays as it is.
    """
    if precision == TF32:
        yield
        return
    settings: Any = torch.backends.cudnn
    with (
        _set(settings, "allow_tf32", False) if _is_readable(settings) else _set(settings.conv, "fp32_precision", "ieee")
    ):
        yield


def _is_readable(settings: Any) -> bool:
    """Whether torch answers for both kinds together: not where a project has set them apart by their newer names."""
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
