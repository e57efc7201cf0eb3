"""Attention by PyTorch's FlexAttention, compiled to one Triton kernel (ups, technique 002.8b)."""

import functools
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

from optimized.compilation.compiled_function import compile_if_possible

LEAST_HEAD_WIDTH = 16
"""FlexAttention's kernels take no narrower heads. Widths that are no power of two, as 48, are padded inside them."""
LEAST_SIZE = 2
"""torch.compile makes a graph of its own for sizes of 1, and compiles at most eight."""


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return `softmax(q kᵀ / √d) v`, [B, heads, T, d]; not causal.

    On CUDA FlexAttention is compiled at the first call, for any batch and number of tokens; a caller that is compiled
    itself has it in its own graph. Elsewhere, in float64, for heads narrower than 16 and where a size is below 2
    PyTorch's `scaled_dot_product_attention` runs: on a CPU FlexAttention has no backward. There is no second derivative
    on CUDA. Tensors that are not contiguous are copied: each new arrangement of strides would be compiled.

    Without a mask or a change of the scores FlexAttention computes what `scaled_dot_product_attention` does with its
    flash backend. The source names no gain.

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
    """Whether FlexAttention has a kernel for it."""
    fits = min(q.shape) >= LEAST_SIZE and q.shape[-1] >= LEAST_HEAD_WIDTH
    return q.is_cuda and q.dtype != torch.float64 and fits


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = flex.flex_attention(q, k, v)
    assert isinstance(out, torch.Tensor)  # it is a tuple where more than the output is asked for
    return out


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    return compile_if_possible(_plain, "flex_attention", quiet_calls=True, fullgraph=True, dynamic=True)
