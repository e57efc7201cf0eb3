"""The memory-bound kernel in Triton. Each import of `workloads` loads its own copy, with code at another address."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _twice(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    # y[i] = 2 x[i] for i < n. Program p computes elements [p · BLOCK, (p + 1) · BLOCK); the last one is masked.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(y + at, tl.load(x + at, mask=inside) * 2.0, mask=inside)


def twice(x: torch.Tensor, y: torch.Tensor, n: int) -> None:
    """Write 2 x[:n] to y[:n]."""
    _twice[(triton.cdiv(n, BLOCK),)](x, y, n, BLOCK=BLOCK, num_warps=8)
