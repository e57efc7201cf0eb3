"""A frozen linear layer of 4-bit weights and its low-rank adapter (polychromic, technique 003.6)."""

import torch

from optimized.generation.fused_lora import NARROW, TORCH, WIDE, Form, applied
from optimized.kernels import INTERPRETED, ceil_div, jit, launching, tl, use_triton
from suite.polychromic import nf4
from suite.polychromic.nf4 import BLOCK

# Bytes of codes that a program dequantises, and its warps; still to be swept on an H200.
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

    On CUDA, one kernel dequantises the weight into a buffer of x's dtype. It reads 0.56 bytes per weight and, in half
    precision, writes 2 bytes per weight, which the product reads. The backward pass dequantises again, and each buffer
    is freed after its product. The rest runs as in `fused_lora`. On other devices and in float64, PyTorch operations
    compute everything.

    codes   uint8 [outputs, inputs / 2]; each byte has two weights, the first in the upper four bits
    absmax  float32 [outputs, inputs / 64], the factor of each block of 64 weights

    The other arguments are those of `fused_lora`. The number of inputs is a multiple of 64.

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
    """`fused_lora_nf4` with Triton kernels, except PyTorch for the frozen products; not in float64."""
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
    """`fused_lora_nf4` with Triton kernels only, under the same conditions as `fused_lora_triton`."""
    return _with(WIDE, x, codes, absmax, a, b, scale, kept, keep)


def nf4_weight(codes: torch.Tensor, absmax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [outputs, inputs] in this dtype, computed by the kernel if it can run. It has no gradient."""
    by_kernel = use_triton(absmax) and not (INTERPRETED and dtype == torch.bfloat16)  # wrong in the interpreter
    with torch.no_grad():
        return dequantised(NARROW if by_kernel else TORCH, dtype, codes, absmax)


def _with(form, x, codes, absmax, a, b, scale, kept, keep):
    if form is None and not use_triton(absmax):
        form = TORCH
    return applied(form, dequantised, (codes, absmax), x, a, b, scale, kept, keep)


def dequantised(form: Form, dtype: torch.dtype, codes: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Return the weight [outputs, inputs] in this dtype. Its elements are products in absmax's dtype, rounded once."""
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
    """Compute weight = NF4[code] * absmax of its block, for each of the two codes in a byte.

    One program dequantises CODES consecutive bytes of the flattened codes into 2 CODES consecutive weights.
    """
    first = tl.program_id(0).to(tl.int64) * CODES
    at = first + tl.arange(0, CODES)
    both = tl.load(codes_ptr + at, mask=at < count, other=0).to(tl.int32)
    # A row is a whole number of blocks, so the index of a byte in all codes gives its block.
    factor = tl.load(absmax_ptr + at // (BLOCK // 2), mask=at < count, other=0.0)
    upper = tl.load(values_ptr + (both >> 4)) * factor
    lower = tl.load(values_ptr + (both & 15)) * factor
    place = 2 * first + tl.arange(0, 2 * CODES)
    weight = tl.interleave(upper, lower).to(weight_ptr.dtype.element_ty)
    tl.store(weight_ptr + place, weight, mask=place < 2 * count)
