"""Emptying the allocator's cache every so many windows (trainer2, technique 000.6; eigenstate_lm, 004.4)."""

from collections.abc import Callable
from typing import Any

import torch

EVERY = 10


def adaptive_cleanup(step: Callable[..., Any], every: int = EVERY) -> Callable[..., Any]:
    """The step, with the CUDA allocator's cache emptied after every `every` calls; 0 never empties it.

    Source: trainer2, technique 000.6; eigenstate_lm, technique 004.4.
    """
    calls = 0

    def cleaned(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = step(*args, **kwargs)
        calls += 1
        if every and calls % every == 0:
            torch.cuda.empty_cache()
        return result

    return cleaned
