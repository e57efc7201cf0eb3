"""Cross-entropy of some rows' logits at a time, which are never all there (eigenstate_lm, technique 004.11)."""

from collections.abc import Iterator
from typing import Any

import torch

IGNORED = -100
ROWS = 4096
"""At a time. A vocabulary of 50,257 then has logits of 0.4 GB in bfloat16, and products that are large enough."""


def chunked_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, rows: int = ROWS
) -> torch.Tensor:
    """The mean cross-entropy of `hidden @ weight.T` against the labels, 0-d; a label of −100 does not count.

    Logits are made for some rows at a time, once. While they are there the gradients that are wanted are made too, but
    for the factor that the backward brings: to make the logits again there, as the source does, would be a fourth
    product of their size. They are added up in float32 at least, and so is the weight's gradient. Without a label that
    counts it is NaN. There is no second derivative.

    hidden  [N, D]
    weight  [V, D]
    labels  [N] int64, below V
    rows    at a time

    ValueError for fewer rows than one at a time.

    Source: eigenstate_lm, technique 004.11, which expects 13 to 26 GB less.
    """
    if rows < 1:
        raise ValueError(f"rows={rows}: at least one row is looked at at a time")
    # As functional.linear would; float64 is left alone by autocast.
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, rows)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, rows: int) -> torch.Tensor:
        counted = (labels != IGNORED)[:, None]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _parts(len(hidden), rows):
                place = labels[part].clamp(min=0)[:, None]
                logits = (hidden[part] @ weight.T).to(wide)
                logits -= logits.amax(1, keepdim=True)
                own = logits.gather(1, place)
                sums = logits.exp_().sum(1, keepdim=True)
                total += torch.where(counted[part], sums.log() - own, 0.0).sum()
                if d_hidden is None and d_weight is None:
                    continue
                d_logits = logits.div_(sums).scatter_add_(1, place, torch.full_like(own, -1.0))
                low = d_logits.masked_fill_(~counted[part], 0.0).to(hidden.dtype)
                if d_hidden is not None:
                    torch.mm(low, weight, out=d_hidden[part])
                if d_weight is not None:
                    d_weight += low.T @ hidden[part]
        count = counted.sum()
        ctx.save_for_backward(d_hidden, d_weight, count)
        ctx.dtypes = hidden.dtype, weight.dtype
        return (total / count).to(wide)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *found, count = ctx.saved_tensors
        share = torch.where(count > 0, grad / count, 0.0)
        # Widened: in a lower precision the share itself would be rounded, or nothing.
        scaled = [
            None if d is None else (d.to(share.dtype) * share).to(dtype)
            for d, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def _parts(count: int, rows: int) -> Iterator[slice]:
    """Slices of at most so many rows."""
    for start in range(0, count, rows):
        yield slice(start, start + rows)
