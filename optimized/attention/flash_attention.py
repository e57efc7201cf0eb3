"""Attention with a backend chosen by device, dtype, head width, padding and length (polychromic, technique 003.1)."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from optimized.autocasting import as_autocast

# Backends in half precision and in float32, in the order in which they are tried: PyTorch's own order. Not yet measured
# on an H200.
HALF = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
SINGLE = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
# cuDNN's backward may return NaN for lengths that are not a multiple of this: it multiplies memory past the last token
# by 0 (pytorch issue 196678).
WHOLE_TILES = 128
# With max_seqlen 1 flash-attn assumes that every sequence has exactly one token, and fails if one is empty.
LEAST_LONGEST = 2
# Kernels load 16 bytes at a time and fault on data that is not aligned to them.
ALIGNMENT = 16
WIDEST_HEAD = 256


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None = None, causal: bool = True
) -> torch.Tensor:
    """Return `softmax(q kᵀ / √d) v`, [B, H, T, d]; 0 past a row's length. The scores are not stored.

    On CUDA in half precision, cuDNN computes it if T is a multiple of 128. For other lengths, and for inputs that cuDNN
    does not support, FlashAttention or the memory-efficient kernel does; in float32, the memory-efficient kernel.
    Elsewhere PyTorch chooses the backend. Causal attention needs no mask for padding, since no token attends to later
    ones. The kernels fault on data that is not aligned to 16 bytes, so such inputs are copied. Under autocast, inputs
    are cast as PyTorch's own attention casts them. There is no second derivative on CUDA. Where
    scores are not finite, the result may be finite where the reference returns NaN. In float16 the scores of the
    reference overflow earlier.

    q        [B, H, T, d]
    k, v     [B, K, T, d]; H is a multiple of K, and each key head serves H / K query heads
    lengths  int64 [B], from 1 to T: tokens past it are padding, which no token attends to; None: no padding
    causal   whether a token attends only to itself and to earlier tokens

    Source: polychromic, technique 003.1.
    """
    q, k, v = as_autocast(q, k, v)
    if lengths is None:
        return _dense(q, k, v, None, causal)
    inside = torch.arange(q.shape[2], device=q.device) < lengths[:, None]
    mask = None if causal else inside[:, None, None]
    return _dense(q, k, v, mask, causal).masked_fill(~inside[:, None, :, None], 0.0)


def flash_attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    causal: bool = True,
    longest: int | None = None,
) -> torch.Tensor:
    """Return the attention within each of several concatenated sequences, [N, H, d].

    On CUDA in half precision, for heads up to 256 wide, this is one launch of flash-attn if it is installed, else of
    PyTorch's FlashAttention. Otherwise the host reads the offsets, and sequences of the same length are computed
    together. Under autocast, inputs are cast as PyTorch's own attention casts them.

    q        [N, H, d]
    k, v     [N, K, d]; H is a multiple of K
    offsets  int32 [sequences + 1], non-decreasing from 0 to N: the start of each sequence, and the end of the last one
    causal   whether a token attends only to itself and to earlier tokens
    longest  number of tokens of the longest sequence, or more; None: read from the offsets, and the host waits for it

    Source: polychromic, technique 003.1.
    """
    q, k, v = as_autocast(q, k, v)
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= WIDEST_HEAD and q.numel():
        longest = int(offsets.diff().max()) if longest is None else longest
        return _variable_length()(*map(_aligned, (q, k, v)), offsets, max(longest, LEAST_LONGEST), causal)
    ends = offsets.tolist()
    of_length: dict[int, list[int]] = {}
    for first, end in itertools.pairwise(ends):
        of_length.setdefault(end - first, []).append(first)
    places, found = [], []
    for length, firsts in of_length.items():
        rows = torch.tensor(firsts, device=q.device)[:, None] + torch.arange(length, device=q.device)
        given = (x[rows].transpose(1, 2) for x in (q, k, v))
        found.append(_dense(*given, None, causal).transpose(1, 2).flatten(0, 1))
        places.append(rows.flatten())
    return torch.cat(found)[torch.cat(places).argsort()] if found else torch.zeros_like(q)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    if not q.is_cuda or q.dtype == torch.float64:
        return _attend(q, k, v, mask, causal)
    q, k, v = map(_aligned, (q, k, v))
    half = q.dtype in (torch.float16, torch.bfloat16)
    if not half and k.shape[1] != q.shape[1]:  # the memory-efficient kernel does not support shared key heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    backends = HALF if half else SINGLE
    if q.shape[2] % WHOLE_TILES:
        backends = tuple(backend for backend in backends if backend != SDPBackend.CUDNN_ATTENTION)
    with sdpa_kernel(list(backends), set_priority=True):
        found = _attend(q, k, v, mask, causal)
    return _SameStrides.apply(found) if backends[0] == SDPBackend.CUDNN_ATTENTION else found


class _SameStrides(torch.autograd.Function):
    """Identity whose gradient gets the strides of its input.

    cuDNN's backward is wrong for a gradient that is a slice of a larger tensor, as the backward of a concatenation
    returns.
    """

    @staticmethod
    def forward(ctx, x):
        ctx.strides = x.stride()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if gradient.stride() == ctx.strides:
            return gradient
        return torch.empty_strided(gradient.shape, ctx.strides, dtype=gradient.dtype, device=gradient.device).copy_(
            gradient
        )


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    shared = k.shape[1] != q.shape[1]
    return scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, enable_gqa=shared)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a contiguous copy if its data or a row does not start at a multiple of 16 bytes."""
    size = x.element_size()
    starts = (x.data_ptr(), *(stride * size for stride in x.stride()[:-1]))
    if x.stride(-1) == 1 and not any(start % ALIGNMENT for start in starts):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.cache
def _variable_length() -> Callable[..., torch.Tensor]:
    """Return flash-attn's function for packed sequences if it is installed, else PyTorch's."""

    try:
        from flash_attn import flash_attn_varlen_func

        def by_package(q: Any, k: Any, v: Any, offsets: torch.Tensor, longest: int, causal: bool) -> torch.Tensor:
            return flash_attn_varlen_func(q, k, v, offsets, offsets, longest, longest, causal=causal)

        return by_package
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn

        def by_torch(q: Any, k: Any, v: Any, offsets: torch.Tensor, longest: int, causal: bool) -> torch.Tensor:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            return varlen_attn(q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0 if causal else -1))

        return by_torch
