"""Attention with PyTorch's FlexAttention, compiled to one Triton kernel (ups, technique 002.8b)."""

import functools
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from optimized.compilation.compiled_function import compile_if_possible

LEAST_HEAD_WIDTH = 16
"""Minimum head width of FlexAttention's kernels. They pad widths that are not a power of two, such as 48."""
LEAST_SIZE = 2
"""torch.compile compiles a separate graph for each size of 1."""


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return `softmax(q kᵀ / √d) v`, [B, heads, T, d]; not causal.

    On CUDA, FlexAttention is compiled at the first call, for any batch size and number of tokens. In a caller that is
    compiled itself, it becomes part of the caller's graph. On a CPU, where FlexAttention has no backward, in float64,
    for heads narrower than 16 and for sizes below 2, PyTorch's `scaled_dot_product_attention` runs instead. There is no
    second derivative on CUDA. Tensors that are not contiguous are copied, because each new stride pattern would be
    compiled.

    Without a mask or a score modification, FlexAttention computes the same as the flash backend of
    `scaled_dot_product_attention`. The source states no speedup.

    q, k, v  [B, heads, T, d]

    Source: ups, technique 002.8b.
    """
    if not _takes(q):
        return functional.scaled_dot_product_attention(q, k, v)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if torch.compiler.is_compiling():
        return _plain(q, k, v)
    return _compiled()(q.contiguous(), k.contiguous(), v.contiguous())


def _takes(q: torch.Tensor) -> bool:
    """Return whether FlexAttention has a kernel for this tensor."""
    fits = min(q.shape) >= LEAST_SIZE and q.shape[-1] >= LEAST_HEAD_WIDTH
    return q.is_cuda and q.dtype != torch.float64 and fits


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = flex.flex_attention(q, k, v)
    assert isinstance(out, torch.Tensor)  # a tuple only if more than the output is requested
    return out


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    return compile_if_possible(_plain, "flex_attention", quiet_calls=True, fullgraph=True, dynamic=True)
