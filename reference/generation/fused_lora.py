"""A frozen linear layer with a low-rank adapter, operation by operation (polychromic, technique 003.6)."""

import torch
from torch.nn import functional


def fused_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """Compute `x @ weight.T + scale * (dropout(x) @ a.T) @ b.T`, [..., tokens, outputs], in PEFT's order of operations.

    x       [..., tokens, inputs]
    weight  [outputs, inputs], frozen: it gets no gradient
    a       [rank, inputs]
    b       [outputs, rank]
    kept    bool or uint8 [..., tokens, inputs]: 1 where dropout keeps the element, 0 elsewhere; None: no dropout
    keep    probability that an element is kept; dropout divides by it

    Source: polychromic, technique 003.6.
    """
    dropped = x if kept is None else x * kept / keep
    adapted = functional.linear(functional.linear(dropped, a), b)
    return functional.linear(x, weight.detach()) + scale * adapted
