"""Mean pairwise cosine distance in linear time, without the distance matrix (polychromic, technique 003.3)."""

import torch

from optimized.kernels import ceil_div, jit, launching, tl, triton, use_triton

MIN_NORM = 1e-12
# 1 / MIN_NORM in float32: the inverse length of a row whose length is clamped.
CLAMPED = tl.constexpr(999999995904.0)
# A program holds whole rows in registers.
MAX_WIDTH = 2048
ROWS = 8
NUM_WARPS = 8
# Rows of partial sums that the second launch adds at a time; with 4, its latency dominated the forward.
FINISH_ROWS = 32
FINISH_WARPS = 16
# Maximum number of programs in the forward; each stores a partial sum of D values. With one per multiprocessor of an
# H200, the second launch, which adds them up, is as short as the first.
MAX_PROGRAMS = 132
# Up to this number of rows, one program is as fast as two launches.
SINGLE_ROWS = 16


def mean_pairwise_cosine(e: torch.Tensor) -> torch.Tensor:
    """Return the mean cosine distance over all pairs i < j of rows of e [N, D], 0-d; NaN if N < 2.

    The cost is linear in N. The entries of the cosine matrix sum to the squared length of the sum of the unit rows u_i,
    so the mean is `1 - (|sum_i u_i|^2 - sum_i |u_i|^2) / (N (N - 1))`. |u_i|^2 is 1, except for rows shorter than
    1e-12, whose length is clamped.

    float32 on CUDA with D <= 2048 uses Triton kernels, forward and backward, which are deterministic and have no second
    derivative. Any other input uses the same formula in PyTorch operations. From about 128 rows, torch.compile of these
    operations is faster than the kernels: on an H200 19 us instead of 24, forward and backward, at N = 1024.

    Source: polychromic, technique 003.3.
    """
    if e.shape[0] > 1 and 0 < e.shape[1] <= MAX_WIDTH and use_triton(e):
        return mean_pairwise_cosine_triton(e)
    return mean_pairwise_cosine_torch(e)


def mean_pairwise_cosine_torch(e: torch.Tensor) -> torch.Tensor:
    """Compute `mean_pairwise_cosine` with PyTorch operations, on any device and dtype."""
    n = e.shape[0]
    if n < 2:
        # Depend on e, so that a gradient exists: 0, as for the mean of an empty tensor.
        return e.sum() * 0 + float("nan")
    # In float16 a length, and the squared length of the sum, up to N^2, may overflow, and MIN_NORM is 0.
    wide = torch.promote_types(e.dtype, torch.float32)
    unit = e / torch.linalg.vector_norm(e, dim=-1, keepdim=True, dtype=wide).clamp(min=MIN_NORM)
    return (1 - (unit.sum(0).square().sum() - unit.square().sum()) / (n * (n - 1))).to(e.dtype)


def mean_pairwise_cosine_triton(e: torch.Tensor) -> torch.Tensor:
    """Compute `mean_pairwise_cosine` with Triton kernels, float32: one launch up to 16 rows, else two; one backward."""
    if e.shape[0] < 2 or not 0 < e.shape[1] <= MAX_WIDTH:
        return mean_pairwise_cosine_torch(e)
    return _MeanPairwiseCosine.apply(e)


class _MeanPairwiseCosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e):
        e = e.contiguous()
        n, width = e.shape
        programs = 1 if n <= SINGLE_ROWS else min(MAX_PROGRAMS, ceil_div(n, ROWS))
        mean = torch.empty((), dtype=e.dtype, device=e.device)
        total = torch.empty(width, dtype=e.dtype, device=e.device)
        inverse = torch.empty(n, dtype=e.dtype, device=e.device)
        partial = torch.empty((programs, width + 1), dtype=e.dtype, device=e.device) if programs > 1 else total
        ctx.save_for_backward(e, inverse, total)
        padded = triton.next_power_of_2(width)
        pairs = n * (n - 1)
        with launching(e):
            _sum_kernel[(programs,)](
                e,
                inverse,
                partial,
                total,
                mean,
                n,
                width,
                pairs,
                ROWS=ROWS,
                WIDTH=padded,
                SINGLE=programs == 1,
                num_warps=NUM_WARPS,
            )
            if programs > 1:
                _finish_kernel[(1,)](
                    partial,
                    total,
                    mean,
                    programs,
                    width,
                    pairs,
                    ROWS=FINISH_ROWS,
                    WIDTH=padded,
                    num_warps=FINISH_WARPS,
                )
        return mean

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        e, inverse, total = ctx.saved_tensors
        n, width = e.shape
        d_e = torch.empty_like(e)
        with launching(e):
            _gradient_kernel[(ceil_div(n, ROWS),)](
                e,
                inverse,
                total,
                grad,
                d_e,
                n,
                width,
                n * (n - 1),
                ROWS=ROWS,
                WIDTH=triton.next_power_of_2(width),
                num_warps=NUM_WARPS,
            )
        return d_e


@jit
def _sum_kernel(
    e_ptr, inverse_ptr, partial_ptr, total_ptr, mean_ptr,
    n, width, pairs,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """S = sum_i u_i and Q = sum_i |u_i|^2, where u_i = e_i / max(|e_i|, 1e-12).

    Program p sums blocks p, p + programs, ... of ROWS whole rows and stores its part of S and Q in row p of `partial`.
    It also stores the inverse length of each row for the backward. With SINGLE, one program sums all rows and stores S
    and the mean, 1 - (|S|^2 - Q) / pairs.
    """
    k = tl.arange(0, WIDTH)
    sums = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    squares = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & (k < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + k[None, :]
        e = tl.load(e_ptr + at, mask=inside, other=0.0).to(tl.float32)
        length = tl.sqrt_rn(tl.sum(e * e, axis=1))
        length = tl.where(length < 1e-12, 1e-12, length)
        inverse = tl.div_rn(tl.full((ROWS,), 1.0, dtype=tl.float32), length)
        tl.store(inverse_ptr + row, inverse, mask=row < n)
        unit = e * inverse[:, None]
        sums += unit
        squares += unit * unit
    total = tl.sum(sums, axis=0)
    square = tl.sum(tl.sum(squares, axis=1), axis=0)
    if SINGLE:
        tl.store(total_ptr + k, total, mask=k < width)
        tl.store(mean_ptr, 1.0 - (tl.sum(total * total, axis=0) - square) / pairs)
    else:
        own = partial_ptr + tl.program_id(0) * (width + 1)
        tl.store(own + k, total, mask=k < width)
        tl.store(own + width, square)


@jit
def _finish_kernel(partial_ptr, total_ptr, mean_ptr, programs, width, pairs, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """mean = 1 - (|S|^2 - Q) / pairs: one program adds the partial sums, ROWS at a time, always in the same order."""
    k = tl.arange(0, WIDTH)
    sums = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < programs)[:, None] & (k < width)[None, :]
        sums += tl.load(partial_ptr + row[:, None] * (width + 1) + k[None, :], mask=inside, other=0.0)
        squares += tl.load(partial_ptr + row * (width + 1) + width, mask=row < programs, other=0.0)
    total = tl.sum(sums, axis=0)
    tl.store(total_ptr + k, total, mask=k < width)
    tl.store(mean_ptr, 1.0 - (tl.sum(total * total, axis=0) - tl.sum(squares, axis=0)) / pairs)


@jit
def _gradient_kernel(
    e_ptr, inverse_ptr, total_ptr, grad_ptr, d_ptr, n, width, pairs, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """d_u_i = -2 grad (S - u_i) / (N (N - 1)), and d_e_i = (d_u_i - (d_u_i . u_i) u_i) / |e_i|.

    S is the sum of the unit rows u_i. The part of the gradient along u_i is removed, because it only changes the row's
    length. Each program computes ROWS whole rows.
    """
    k = tl.arange(0, WIDTH)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < n)[:, None] & (k < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + k[None, :]
    inverse = tl.load(inverse_ptr + row, mask=row < n, other=0.0)
    unit = tl.load(e_ptr + at, mask=inside, other=0.0).to(tl.float32) * inverse[:, None]
    total = tl.load(total_ptr + k, mask=k < width, other=0.0)
    d_unit = total[None, :] - unit
    along = tl.sum(d_unit * unit, axis=1)
    # A clamped length is a constant, so the gradient keeps its part along the row.
    along = tl.where(inverse >= CLAMPED, 0.0, along)
    scale = tl.load(grad_ptr).to(tl.float32) * (-2.0 / pairs)
    d_e = (d_unit - unit * along[:, None]) * (scale * inverse)[:, None]
    tl.store(d_ptr + at, d_e, mask=inside)
