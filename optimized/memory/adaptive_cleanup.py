"""Emptying of the CUDA allocator's cache, only when it returns memory that is needed (trainer2, technique 000.6)."""

from collections.abc import Callable
from typing import Any

import torch

# Calls between two checks. A check takes microseconds.
EVERY = 10
# Share of the device's memory. With less free memory, allocations of other processes, or of libraries that do not use
# the allocator, may fail.
SCARCE = 0.1
# Share of the device's memory. Returning less is not worth the stall of emptying the cache.
WORTH = 0.05


def adaptive_cleanup(step: Callable[..., Any], every: int = EVERY) -> Callable[..., Any]:
    """Wrap the step: every `every` calls, empty the CUDA allocator's cache if that helps; 0: never.

    It helps if little memory of the device is free *and* the allocator holds much unused memory, see
    `can_return_memory`. The source empties the cache when nearly all reserved memory is in use, and then there is
    almost nothing to return. If one process uses the device alone, it is best not to empty the cache.

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
    """Return whether free memory is scarce and emptying the cache would return enough of it. All in bytes.

    reserved   memory that the allocator holds
    allocated  part of it that tensors use
    free       memory of the device that no process holds
    total      memory of the device
    """
    return free < SCARCE * total and reserved - allocated > WORTH * total


def _should_empty() -> bool:
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    return can_return_memory(torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device), free, total)


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()
