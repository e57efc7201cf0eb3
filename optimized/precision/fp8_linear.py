"""A linear layer whose products are in FP8 on the tensor cores (an extension of eigenstate_lm)."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from optimized.compilation.compiled_function import compile_if_possible

MULTIPLE = 16
"""PyTorch's FP8 products need both sizes of a weight to be multiples of this number."""
MANTISSA, QUARTERS, INFINITE = (1 << 23) - 1, 3 << 21, 255 << 23
"""Bits of float32: the mantissa, that of 1.75 (since FP8's largest number is 448 = 1.75 · 2⁸), and infinity."""


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T + bias`, [..., N], with operands of float8_e4m3fn, in bfloat16.

    Each row of x and of the weight is multiplied by the largest power of two with which it fits into FP8, and rounded.
    A power of two rounds nothing itself, and the row's scale is applied to the product. The gradient of x is computed
    likewise, from the rows of the incoming gradient and the columns of the weight. The gradients of weight and bias
    are computed in bfloat16: in FP8 both operands would have to be rounded again along their other dimension.

    x       [..., K] bfloat16
    weight  [N, K] bfloat16; K and N multiples of 16
    bias    [N] bfloat16

    A row with NaN or infinity gives NaN. Another dtype or size: ValueError.
    """
    if not x.dtype == weight.dtype == bias.dtype == torch.bfloat16:
        raise ValueError(
            f"fp8_linear: x, weight and bias must be bfloat16, not {x.dtype}, {weight.dtype}, {bias.dtype}"
        )
    if any(size % MULTIPLE for size in weight.shape):
        raise ValueError(f"fp8_linear: both sizes of the weight must be multiples of 16, not {list(weight.shape)}")
    found: torch.Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)
    return found.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        return _product(grad, weight.T), grad.T @ x, grad.sum(0)


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `a @ b.T + bias` from the rounded rows of both matrices, in bfloat16."""
    rounded = _rounded if a.device.type == "cpu" or torch.compiler.is_compiling() else _compiled()
    (a, of_a), (b, of_b) = rounded(a), rounded(b)
    if bias is not None:  # PyTorch's product ignores its stride, and refuses an address that is not a multiple of 16.
        bias = bias.clone(memory_format=torch.contiguous_format)
    return torch._scaled_mm(a, b.T, of_a, of_b.T, bias, out_dtype=torch.bfloat16, use_fast_accum=True)


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the rows in FP8, contiguous, the reciprocal of each row's scale, [M, 1] float32).

    The reciprocal is NaN for a row with NaN or infinity, which PyTorch may round to FP8's largest number.
    """
    bits = rows.abs().amax(1, keepdim=True).float().view(torch.int32)
    exponent = (bits >> 23) - 127 + ((bits & MANTISSA) > QUARTERS).int()
    shift = (8 - exponent).clamp(-126, 126)
    scaled = rows.float() * _power(shift)
    reciprocal = torch.where(bits < INFINITE, _power(-shift), math.nan)
    return scaled.to(torch.float8_e4m3fn).contiguous(), reciprocal


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Compute 2 to the power of int32 exponents from -126 to 127, exactly."""
    return ((exponent + 127) << 23).view(torch.float32)


@functools.cache
def _compiled() -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return compile_if_possible(_rounded, "fp8_linear's rounding", quiet_calls=True, fullgraph=True, dynamic=True)
