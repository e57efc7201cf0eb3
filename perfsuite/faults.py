"""Faults of a GPU kernel after which every later call of the same process fails too."""

from __future__ import annotations

import sys
from typing import Any

from perfsuite.errors import first_line


class DeviceFault(BaseException):
    """The GPU can no longer be used by this process; not an Exception, so that nothing repeats or swallows it."""


def check() -> None:
    """DeviceFault, with CUDA's first line, where the GPU cannot be used any more. Waits for the GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceFault(first_line(error) or "CUDA error") from None
