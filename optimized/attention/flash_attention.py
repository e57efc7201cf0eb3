"""Attention by the fastest backend for device, dtype, head width, padding and length (polychromic, technique 003.1)."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from optimized.autocasting import as_autocast

# Backends in the order in which they are tried, in half precision and in float32: PyTorch's own order. To be measured
# on an H200.
HALF = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
SINGLE = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
# cuDNN's backward may give NaN for lengths that are no multiple of this: it multiplies what lies behind the last token
# by 0 (pytorch issue 196678).
WHOLE_TILES = 128
# With max_seqlen 1 flash-attn assumes that every sequence has exactly one token, and fails if one is empty.
LEAST_LONGEST = 2
# Kernels load so many bytes at once, and fault where data begin elsewhere.
ALIGNMENT = 16
WIDEST_HEAD = 256


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None = None, causal: bool = True
) -> torch.Tensor:
    """Return `softmax(q kᵀ / √d) v`, [B, H, T, d]; 0 for tokens behind a row's length. No scores are kept.

    On CUDA in half precision cuDNN computes it for lengths that are multiples of 128, and FlashAttention or the
    memory-efficient kernel for others and where cuDNN does not take the inputs; in float32 the memory-efficient kernel
    does. Elsewhere it is PyTorch's choice. Where attention is causal, padding needs no mask, since no token attends to
    what is behind it. Inputs whose data are not aligned to 16 bytes are copied: these kernels fault on them. Under
    autocast inputs are cast as PyTorch's own attention casts them. There is no second derivative on CUDA.

    q        [B, H, T, d]
    k, v     [B, K, T, d]; H is a multiple of K: so many query heads share each key head
    lengths  int64 [B], from 1 to T: tokens behind it are padding, which no token attends to; None: there is none
    causal   whether a token attends to those before it and itself alone

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
    """Return the attention of each of several sequences that lie behind each other, [N, H, d].

    On CUDA in half precision it is one launch of flash-attn where that is installed, else of PyTorch's FlashAttention.
    Elsewhere sequences of the same length are computed together, and the host reads the offsets. Under autocast inputs
    are cast as PyTorch's own attention casts them.

    q        [N, H, d]
    k, v     [N, K, d]; H is a multiple of K
    offsets  int32 [sequences + 1], from 0 to N: where each sequence begins, and the last one's end; they do not fall
    causal   whether a token attends to those before it and itself alone
    longest  tokens of the longest sequence, or more; None: the host waits for the device to find it out

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
    if not half and k.shape[1] != q.shape[1]:  # the memory-efficient kernel has no key heads that are shared
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    backends = HALF if half else SINGLE
    if q.shape[2] % WHOLE_TILES:
        backends = tuple(backend for backend in backends if backend != SDPBackend.CUDNN_ATTENTION)
    with sdpa_kernel(list(backends), set_priority=True):
        found = _attend(q, k, v, mask, causal)
    return _SameStrides.apply(found) if backends[0] == SDPBackend.CUDNN_ATTENTION else found


class _SameStrides(torch.autograd.Function):
    """Identity whose gradient has the strides of its input. cuDNN's backward is wrong for a gradient that is a slice of
    a larger tensor, as it is behind a concatenation."""

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
    """The tensor, or a copy where its data or rows begin elsewhere than at multiples of 16 bytes."""
    size = x.element_size()
    starts = (x.data_ptr(), *(stride * size for stride in x.stride()[:-1]))
    if x.stride(-1) == 1 and not any(start % ALIGNMENT for start in starts):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.cache
def _variable_length() -> Callable[..., torch.Tensor]:
    """flash-attn's kernel for packed sequences, or PyTorch's."""

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
