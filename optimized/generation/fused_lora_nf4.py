"""A frozen linear layer of 4-bit weights and its low-rank adapter (polychromic, technique 003.6)."""

import torch

from optimized.generation.fused_lora import NARROW, TORCH, WIDE, Form, applied
from optimized.kernels import INTERPRETED, ceil_div, jit, launching, tl, use_triton
from suite.polychromic import nf4
from suite.polychromic.nf4 import BLOCK

# Bytes of codes that a program unpacks, and warps; to be swept on an H200.
CODES, NUM_WARPS = 2048, 4


def fused_lora_nf4(
    x: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """`fused_lora` with a weight in NF4. There is no second derivative.

    On CUDA one kernel dequantises the weight into a buffer of x's dtype: it reads 0.56 bytes a weight, and in half
    precision writes 2, which the product reads. The backward pass does so again; no buffer outlives its product.
    Then the kernels of `fused_lora` do as with any weight. Elsewhere, and in float64, PyTorch's operations do.

    codes   uint8 [outputs, inputs / 2], the first of two weights in the upper four bits
    absmax  float32 [outputs, inputs / 64], the factor of each block of 64 weights

    The other arguments are those of `fused_lora`; inputs are a multiple of 64.

    Source: polychromic, technique 003.6.
    """
    return _with(None, x, codes, absmax, a, b, scale, kept, keep)


def fused_lora_nf4_torch(
    x: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """`fused_lora_nf4` in PyTorch operations."""
    return _with(TORCH, x, codes, absmax, a, b, scale, kept, keep)


def fused_lora_nf4_narrow(
    x: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """`fused_lora_nf4` by kernels, and PyTorch's frozen products; not in float64."""
    return _with(NARROW, x, codes, absmax, a, b, scale, kept, keep)


def fused_lora_nf4_triton(
    x: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """`fused_lora_nf4` by kernels alone, where `fused_lora_triton` uses them alone."""
    return _with(WIDE, x, codes, absmax, a, b, scale, kept, keep)


def nf4_weight(codes: torch.Tensor, absmax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [outputs, inputs] in this dtype, by the kernel where it runs. It has no gradient."""
    by_kernel = use_triton(absmax) and not (INTERPRETED and dtype == torch.bfloat16)  # the interpreter is wrong in it
    with torch.no_grad():
        return dequantised(NARROW if by_kernel else TORCH, dtype, codes, absmax)


def _with(form, x, codes, absmax, a, b, scale, kept, keep):
    if form is None and not use_triton(absmax):
        form = TORCH
    return applied(form, dequantised, (codes, absmax), x, a, b, scale, kept, keep)


def dequantised(form: Form, dtype: torch.dtype, codes: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """The weight [outputs, inputs] in this dtype. Products with absmax are rounded once."""
    if form.narrow:
        return _dequantised_triton(dtype, codes.contiguous(), absmax.contiguous())
    return nf4.dequantised(codes, absmax).to(dtype)


def _dequantised_triton(dtype, codes, absmax):
    values = nf4.values_in(absmax.dtype, absmax.device)
    outputs, half = codes.shape
    weight = torch.empty((outputs, 2 * half), dtype=dtype, device=codes.device)
    with launching(codes):
        _dequantise_kernel[(ceil_div(codes.numel(), CODES),)](
            codes, absmax, values, weight, codes.numel(), BLOCK=BLOCK, CODES=CODES, num_warps=NUM_WARPS
        )
    return weight


@jit
def _dequantise_kernel(codes_ptr, absmax_ptr, values_ptr, weight_ptr, count, BLOCK: tl.constexpr, CODES: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * CODES
    at = first + tl.arange(0, CODES)
    both = tl.load(codes_ptr + at, mask=at < count, other=0).to(tl.int32)
    # Blocks end where rows do.
    factor = tl.load(absmax_ptr + at // (BLOCK // 2), mask=at < count, other=0.0)
    upper = tl.load(values_ptr + (both >> 4)) * factor
    lower = tl.load(values_ptr + (both & 15)) * factor
    place = 2 * first + tl.arange(0, 2 * CODES)
    weight = tl.interleave(upper, lower).to(weight_ptr.dtype.element_ty)
    tl.store(weight_ptr + place, weight, mask=place < 2 * count)
