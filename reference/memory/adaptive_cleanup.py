"""Emptying of the CUDA allocator's cache at fixed intervals (trainer2, technique 000.6; eigenstate_lm, 004.4)."""

from collections.abc import Callable
from typing import Any

import torch

EVERY = 10


def adaptive_cleanup(step: Callable[..., Any], every: int = EVERY) -> Callable[..., Any]:
    """Wrap the step: after every `every` calls, empty the CUDA allocator's cache; 0: never.

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
