"""A linear layer whose operands are rounded to FP8 (an extension of eigenstate_lm, whose source uses float16)."""

from typing import Any

import torch

LARGEST = 448.0
"""Largest number of float8_e4m3fn, 0.875 · 2⁹."""


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T + bias`, [..., N], with operands of float8_e4m3fn (3 bits of mantissa, up to 448).

    Each row of x and of the weight is multiplied by the largest power of two with which it fits into FP8, and rounded.
    The products of the rounded numbers are accumulated in float32. In the backward pass the gradient of x is computed
    likewise, from the rows of the incoming gradient and the columns of the weight. The gradients of weight and bias
    are computed without rounding to FP8, in the dtype of x. Rounding itself has the gradient 1.

    x       [..., K]
    weight  [N, K]
    bias    [N]

    A row with NaN or infinity gives NaN.
    """
    found: torch.Tensor = _Linear.apply(x.flatten(0, -2), weight, bias)
    return found.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (rounded(x) @ rounded(weight).T + bias).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        d_x = (rounded(grad) @ rounded(weight.T).T).to(x.dtype)
        return d_x, grad.T @ x, grad.sum(0)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Round each row of a matrix to FP8, and return the result in float32, or in float64 for a matrix in float64."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    largest = rows.abs().amax(1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # 0.5 ≤ mantissa < 1, or 0
    shift = (torch.where(mantissa <= LARGEST / 512, 9, 8) - exponent).clamp(-126, 126)
    scale = torch.ldexp(torch.ones_like(mantissa), shift)
    found = (rows * scale).to(torch.float8_e4m3fn).to(rows.dtype) / scale
    return found.where(largest.isfinite(), torch.nan)
