"""Emptying the allocator's cache only where it gives memory back that somebody needs (trainer2, 000.6)."""

from collections.abc import Callable
from typing import Any

import torch

# How often the allocator is asked. It answers from the host's memory, in microseconds.
EVERY = 10
# Below this share of the device's memory still free, another process (or a library beside the allocator) may fail.
SCARCE = 0.1
# Share of the device's memory: returning less is not worth the stall that it costs.
WORTH = 0.05


def adaptive_cleanup(step: Callable[..., Any], every: int = EVERY) -> Callable[..., Any]:
    """The step, with the CUDA allocator's cache emptied where that helps; asked every `every` calls, 0 never.

    Emptying helps where little of the device is free *and* the allocator holds much that nothing uses: see
    `can_return_memory`. The source emptied it where nearly all that was reserved was in use, when there is next to
    nothing to give back. On a device that one process has to itself the cache is best left alone.

    Source: trainer2, technique 000.6; eigenstate_lm, technique 004.4.
    """
    calls = 0

    def cleaned(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = step(*args, **kwargs)
        calls += 1
        if every and calls % every == 0 and torch.cuda.is_initialized() and not _capturing() and _should_empty():
            torch.cuda.empty_cache()
        return result

    return cleaned


def can_return_memory(reserved: int, allocated: int, free: int, total: int) -> bool:
    """Whether emptying the cache gives back memory that is wanted; all in bytes.

    reserved   held by the allocator
    allocated  of it, in use by tensors
    free       of the device, held by nobody
    total      of the device
    """
    return free < SCARCE * total and reserved - allocated > WORTH * total


def _should_empty() -> bool:
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    return can_return_memory(torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device), free, total)


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()
