"""Detect faults of a GPU kernel after which every later call of the process fails, and a lack of device memory."""

from __future__ import annotations

import sys
from typing import Any

from perfsuite.errors import first_line


class DeviceFault(BaseException):
    """This process can no longer use the GPU. Not a subclass of Exception, so that no handler swallows it."""


OF_THE_DEVICE = "CUDA"
"""Part of the messages of errors that a kernel has caused and that any later operation may raise."""
LACKS_MEMORY = ("out of memory", "ALLOC_FAILED")
"""Parts of the messages of out-of-memory errors that libraries raise as a plain RuntimeError."""
OUT_OF_MEMORY = "runs out of device memory"
"""Part of the message of a workload that failed for a lack of memory."""
OF_THE_TRUTH = "while the float64 truth was computed"
"""Note of an out-of-memory error."""
CROWDED_SHARE = 0.05
"""Share of a GPU's memory above which other processes that hold it may be the reason for a lack of memory."""
KEPT_BYTES = 1 << 30
"""Most bytes of freed memory that a process keeps between two proofs, because other processes need memory too."""


def lacks_memory(error: BaseException) -> bool:
    """Return whether the error is an out-of-memory error of a device."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LACKS_MEMORY)


def mentions_memory(error: BaseException) -> bool:
    """Return whether the error is an out-of-memory error of a device, or a failed proof whose message mentions one."""
    return lacks_memory(error) or any(words in str(error) for words in LACKS_MEMORY)


def says_out_of_memory(message: str) -> bool:
    """Return whether a failed workload's message is that of a lack of device memory, also in a side's own words."""
    return OUT_OF_MEMORY in message or any(words in message for words in LACKS_MEMORY)


def is_of_device(error: BaseException) -> bool:
    """Return whether a device is the cause of the error: an earlier kernel, or too little memory."""
    return lacks_memory(error) or OF_THE_DEVICE in str(error)


def is_crowded() -> bool:
    """Return whether other processes hold much of the GPU's memory."""
    return bool(crowd())


def crowd() -> str:
    """Return how much of the GPU's memory other processes hold, for a message; empty if it is little."""
    others, total = _held_by_others()
    if others <= CROWDED_SHARE * total:
        return ""
    return f"other processes hold {others / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB"


def _held_by_others() -> tuple[int, int]:
    """Return (bytes of the GPU's memory that other processes hold, its total bytes); zeros if this process does not use
    a GPU, or the GPU does not answer."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return 0, 0
    return total - free - torch.cuda.memory_reserved(), total


def free_memory() -> None:
    """Release the freed memory in torch's caching allocator if it is more than KEPT_BYTES."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > KEPT_BYTES:
        torch.cuda.empty_cache()


def check() -> None:
    """Wait for the GPU, and raise DeviceFault with the first line of CUDA's message if it can no longer be used."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceFault(first_line(error) or "CUDA error") from None
