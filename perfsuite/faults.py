"""Faults of a GPU kernel after which every later call of the process fails too, and device memory that runs out."""

from __future__ import annotations

import sys
from typing import Any

from perfsuite.errors import first_line


class DeviceFault(BaseException):
    """The GPU can no longer be used by this process; not an Exception, so that nothing repeats or swallows it."""


OF_THE_DEVICE = "CUDA"
"""Part of the messages of errors that a kernel has caused and that show at any later operation."""
LACKS_MEMORY = ("out of memory", "ALLOC_FAILED")
"""Parts of the messages of out-of-memory errors that libraries raise as a plain RuntimeError."""
CROWDED_SHARE = 0.05
"""Share of a GPU's memory held by other processes above which they may be the ones that left too little."""
KEPT_BYTES = 1 << 30
"""Most bytes of freed memory that a process keeps between two proofs, because others need it, too."""


def lacks_memory(error: BaseException) -> bool:
    """Return whether the error says that the memory of a device did not suffice."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LACKS_MEMORY)


def mentions_memory(error: BaseException) -> bool:
    """Return whether the error, or what a failed proof says of one, is that the memory of a device did not suffice."""
    return lacks_memory(error) or any(words in str(error) for words in LACKS_MEMORY)


def is_of_device(error: BaseException) -> bool:
    """Return whether a device is the cause of the error: an earlier kernel, or too little memory."""
    return lacks_memory(error) or OF_THE_DEVICE in str(error)


def is_crowded() -> bool:
    """Return whether other processes hold much of the GPU's memory."""
    return bool(crowd())


def crowd() -> str:
    """Return how much of the GPU's memory other processes hold, for a message; empty where that is little."""
    others, total = _held_by_others()
    if others <= CROWDED_SHARE * total:
        return ""
    return f"other processes hold {others / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB"


def _held_by_others() -> tuple[int, int]:
    """Return the bytes that other processes hold of the GPU's memory, and all its bytes; zeros where no GPU is in use
    here, or it does not answer."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return 0, 0
    return total - free - torch.cuda.memory_reserved(), total


def free_memory() -> None:
    """Release the freed memory that torch keeps, where it is much."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > KEPT_BYTES:
        torch.cuda.empty_cache()


def check() -> None:
    """Raise DeviceFault, with CUDA's first line, where the GPU cannot be used any more. Waits for the GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceFault(first_line(error) or "CUDA error") from None
