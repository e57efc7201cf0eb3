"""Triton kernels for a block's norms, rotary embeddings and gates: one launch each, forward and backward.

In PyTorch operations, the forward of a norm takes 8 launches, that of a rotation 6 and that of a gate 2; the backward
takes more. Each launch reads and writes the whole tensor. The weights are frozen and get no gradient, and there is no
second derivative.
"""

import torch
from torch.nn import functional

from optimized.kernels import INTERPRETED, ceil_div, jit, launching, tl, use_triton
from suite.polychromic.llama import RMSNorm, rotated

DTYPES = (torch.float32, torch.bfloat16)
# Elements per program of the gate's kernels, and warps per program of all kernels.
GATED, NUM_WARPS = 1024, 4
# Most elements of a row: one program holds a whole row of a norm, or all heads of a token.
LARGEST_ROW = 1 << 14


def normed(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Return `norm(x)` for x [..., width]. The kernels compute no gradient for the norm's weight."""
    return (normed_triton if _is_served(x, x.shape[-1]) else normed_torch)(norm, x)


def normed_torch(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Compute `normed` in PyTorch operations."""
    return norm(x)


def normed_triton(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Compute `normed` with the kernel."""
    return _Normed.apply(x, norm.weight.detach().contiguous(), norm.eps) if _can_launch(x) else normed_torch(norm, x)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [B, T, heads, D] to their positions, as `suite.polychromic.llama.rotated` does.

    cos, sin  [T, D], with the same value for both elements of a pair
    """
    return (turned_triton if _is_served(x, x.shape[-2] * x.shape[-1]) else turned_torch)(x, cos, sin)


def turned_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute `turned` in PyTorch operations."""
    return rotated(x.transpose(1, 2), cos, sin).transpose(1, 2)


def turned_triton(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Compute `turned` with the kernel."""
    return _Turned.apply(x, cos.contiguous(), sin.contiguous()) if _can_launch(x) else turned_torch(x, cos, sin)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`."""
    return (gated_triton if _is_served(gate) and up.dtype == gate.dtype else gated_torch)(gate, up)


def gated_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `gated` in PyTorch operations."""
    return functional.silu(gate) * up


def gated_triton(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute `gated` with the kernels."""
    return _Gated.apply(gate, up) if _can_launch(gate) else gated_torch(gate, up)


def _is_served(x, row=0):
    """Return whether the kernels support x, if one program holds `row` elements."""
    # Under autocast, PyTorch's operations choose the dtypes themselves.
    return use_triton(x, dtypes=DTYPES) and row <= LARGEST_ROW and not torch.is_autocast_enabled(x.device.type)


def _can_launch(x):
    """Return whether x has elements that a kernel computes correctly: Triton's interpreter is wrong in bfloat16."""
    return x.numel() > 0 and not (INTERPRETED and x.dtype == torch.bfloat16)


def _block(size):
    return 1 << (size - 1).bit_length()


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out, width = torch.empty_like(x), x.shape[-1]
        with launching(x):
            _norm_kernel[(x.numel() // width,)](
                x, weight, x, out, width, eps, BACKWARD=False, WIDTH=_block(width), num_warps=NUM_WARPS
            )
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        with launching(x):
            _norm_kernel[(x.numel() // width,)](
                x, weight, gradient, out, width, ctx.eps, BACKWARD=True, WIDTH=_block(width), num_warps=NUM_WARPS
            )
        return out, None, None


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return _turn(gradient, *ctx.saved_tensors, -1.0), None, None


def _turn(x, cos, sin, direction):
    x = x.contiguous()
    tokens, (heads, width), out = len(cos), x.shape[-2:], torch.empty_like(x)
    with launching(x):
        _turn_kernel[(x.numel() // (heads * width),)](
            x, cos, sin, out, tokens, heads * width, direction, WIDTH=width, ROW=_block(heads * width),
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        with launching(gate):
            _gate_kernel[(ceil_div(out.numel(), GATED),)](gate, up, out, out.numel(), BLOCK=GATED, num_warps=NUM_WARPS)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        gradient = gradient.contiguous()
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        with launching(gate):
            _gate_backward_kernel[(ceil_div(gate.numel(), GATED),)](
                gate, up, gradient, d_gate, d_up, gate.numel(), BLOCK=GATED, num_warps=NUM_WARPS
            )
        return d_gate, d_up


@jit
def _norm_kernel(x_ptr, weight_ptr, gradient_ptr, out_ptr, width, eps, BACKWARD: tl.constexpr, WIDTH: tl.constexpr):
    """Compute out = x * factor * weight with factor = 1 / sqrt(mean(x^2) + eps), or with BACKWARD the gradient of x.

    The gradient is factor * (w - s * mean(w * s)) with w = gradient * weight and s = x * factor. One program computes
    one row, in float32; WIDTH is `width` rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64) * width
    i = tl.arange(0, WIDTH)
    inside = i < width
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row + i, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    scaled = x * factor
    if BACKWARD:
        weighted = tl.load(gradient_ptr + row + i, mask=inside, other=0.0).to(tl.float32) * weight
        out = factor * (weighted - scaled * (tl.sum(weighted * scaled, 0) / width))
    else:
        out = scaled.to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row + i, out.to(dtype), mask=inside)


@jit
def _turn_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, tokens, columns, direction, WIDTH: tl.constexpr, ROW: tl.constexpr):
    """Compute out = x * cos + (-x_2, x_1) * sin for the halves x_1, x_2 of each head; direction = -1 rotates back.

    One program computes all heads of one token, in float32; ROW is `columns` rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROW)
    inside = i < columns
    d = i % WIDTH
    is_first = d < WIDTH // 2
    other = tl.where(is_first, i + WIDTH // 2, i - WIDTH // 2)
    x = tl.load(x_ptr + token * columns + i, mask=inside, other=0.0).to(tl.float32)
    beside = tl.load(x_ptr + token * columns + other, mask=inside, other=0.0).to(tl.float32)
    at = token % tokens * WIDTH + d
    cos = tl.load(cos_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=inside, other=0.0).to(tl.float32) * direction
    out = x * cos + tl.where(is_first, -beside, beside) * sin
    tl.store(out_ptr + token * columns + i, out.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _gate_kernel(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """Compute out = silu(gate) * up with silu(x) = x * sigmoid(x), rounded to the dtype; BLOCK elements per program."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + i, ((gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up).to(dtype), mask=i < count)


@jit
def _gate_backward_kernel(gate_ptr, up_ptr, gradient_ptr, d_gate_ptr, d_up_ptr, count, BLOCK: tl.constexpr):
    """Compute d_up = gradient * gate * share and d_gate = gradient * up * share * (1 + gate * (1 - share)).

    share = sigmoid(gate). A program computes BLOCK elements.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    dtype = d_gate_ptr.dtype.element_ty
    share = tl.sigmoid(gate)
    tl.store(d_up_ptr + i, (gradient * gate * share).to(dtype), mask=i < count)
    tl.store(d_gate_ptr + i, (gradient * up * share * (1 + gate * (1 - share))).to(dtype), mask=i < count)
