"""Mean cosine distance without the matrix of distances (polychromic, technique 003.3)."""

import torch

from optimized.kernels import ceil_div, jit, launching, tl, triton, use_triton

MIN_NORM = 1e-12
# 1 / MIN_NORM, as float32 has it: the inverse length of a row whose length is clamped.
CLAMPED = tl.constexpr(999999995904.0)
# A row lies in one piece in the registers of a program.
MAX_WIDTH = 2048
ROWS = 8
NUM_WARPS = 8
# Rows of partial sums that the second launch adds at a time: with 4, its latency was most of the forward.
FINISH_ROWS = 32
FINISH_WARPS = 16
# Programs that share the forward; each leaves a partial sum of D values. One on each multiprocessor of an H200 keeps
# the second launch, which adds them up, as short as the first.
MAX_PROGRAMS = 132
# Up to this many rows one program is as quick as two launches.
SINGLE_ROWS = 16


def mean_pairwise_cosine(e: torch.Tensor) -> torch.Tensor:
    """The mean distance over all pairs i < j of rows of e [N, D], 0-d; NaN if there is no pair (N < 2).

    Linear in N: the sum of all entries of the matrix of cosines is the squared length of the sum of the unit
    rows, so that the mean is `1 - (|sum_i u_i|^2 - sum_i |u_i|^2) / (N (N - 1))`, where |u_i|^2 is 1 except for
    rows below the least length. float32 on CUDA with D <= 2048 takes Triton kernels, forward and backward,
    deterministic, without a second derivative; everything else the same form in PyTorch operations. From some 128
    rows on torch.compile of those operations is faster: on an H200 19 us against 24, forward and backward, at N = 1024.

    Source: polychromic, technique 003.3.
    """
    if e.shape[0] > 1 and 0 < e.shape[1] <= MAX_WIDTH and use_triton(e):
        return mean_pairwise_cosine_triton(e)
    return mean_pairwise_cosine_torch(e)


def mean_pairwise_cosine_torch(e: torch.Tensor) -> torch.Tensor:
    """`mean_pairwise_cosine` in PyTorch operations, on any device and dtype."""
    n = e.shape[0]
    if n < 2:
        # Through e, so that there is a gradient: 0, as the mean of nothing has.
        return e.sum() * 0 + float("nan")
    unit = e / torch.linalg.vector_norm(e, dim=-1, keepdim=True).clamp(min=MIN_NORM)
    return 1 - (unit.sum(0).square().sum() - unit.square().sum()) / (n * (n - 1))


def mean_pairwise_cosine_triton(e: torch.Tensor) -> torch.Tensor:
    """`mean_pairwise_cosine` as Triton kernels, float32: one launch up to 16 rows, two above, one backward."""
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
    e_ptr,
    inverse_ptr,
    partial_ptr,
    total_ptr,
    mean_ptr,
    n,
    width,
    pairs,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """The sum of this program's unit rows and of their squares; with SINGLE, the mean itself."""
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
    """Add up the partial sums, always in the same order."""
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
    """d_u = -2 (S - u) / (N (N - 1)) with S the sum of the unit rows; what lies along the row falls away."""
    k = tl.arange(0, WIDTH)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < n)[:, None] & (k < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + k[None, :]
    inverse = tl.load(inverse_ptr + row, mask=row < n, other=0.0)
    unit = tl.load(e_ptr + at, mask=inside, other=0.0).to(tl.float32) * inverse[:, None]
    total = tl.load(total_ptr + k, mask=k < width, other=0.0)
    d_unit = total[None, :] - unit
    along = tl.sum(d_unit * unit, axis=1)
    # Where the length is clamped it is a constant, and there is nothing to take away.
    along = tl.where(inverse >= CLAMPED, 0.0, along)
    scale = tl.load(grad_ptr).to(tl.float32) * (-2.0 / pairs)
    d_e = (d_unit - unit * along[:, None]) * (scale * inverse)[:, None]
    tl.store(d_ptr + at, d_e, mask=inside)
