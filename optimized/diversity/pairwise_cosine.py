"""Cosine distances of all pairs as one tiled kernel (polychromic, technique 003.3)."""

import torch

from optimized.kernels import ceil_div, jit, launching, tl, use_triton

MIN_NORM = 1e-12

# (largest N, tile edge, columns in a step, steps unrolled, warps, pipeline stages), by a sweep at D = 384 on an H200.
# Up to some 500 rows a call is bound by latency: small tiles for many programs, with the loads of two steps under way.
# Later 64 x 64 and then 128 x 128, for the reuse that keeps the tensor cores fed.
FORWARD_CONFIGS = (
    (256, 16, 32, 2, 2, 3),
    (512, 16, 32, 2, 1, 4),
    (3072, 64, 32, 1, 4, 4),
    (None, 128, 32, 1, 8, 3),
)
# (largest N, rows of e, columns of e, rows in a step, warps, stages) of the gradient's matrix product.
BACKWARD_CONFIGS = (
    (256, 16, 32, 32, 4, 3),
    (768, 32, 64, 64, 4, 4),
    (None, 32, 128, 64, 8, 3),
)
# Above, the gradient is one float32 product by cuBLAS: TF32 tensor cores want both operands contiguous along the sum,
# which the rows of e are not here, and without them three products cost more than one in float32.
BACKWARD_KERNEL_MAX = 1536
# 1 / MIN_NORM, as float32 has it: the inverse length of a row whose length is clamped.
CLAMPED_LENGTH = 999999995904.0
CLAMPED = tl.constexpr(CLAMPED_LENGTH)
# Rows of up to this many columns are projected in one piece.
PROJECT_BLOCK = 512
# Three TF32 products (high x high, high x low, low x high) drop only what lies below 2^-22 of each product. The tensor
# cores truncate what they add up, so their partial sums are added in float32 after every step of at most 64: the
# error stays that of a float32 matrix product. Plain TF32 (2^-11) would not do.
PRECISION = tl.constexpr("tf32x3")


def pairwise_cosine(e: torch.Tensor) -> torch.Tensor:
    """`1 - cos(e_i, e_j)` of every two rows, [N, N] from [N, D].

    Rows are divided by max(length, 1e-12), so that a row of zeros is at distance 1 from all, itself included.
    float32 on CUDA takes the Triton kernels, forward and backward, deterministic, on the tensor cores at
    float32's accuracy; everything else the matrix-product form. The kernels have no second derivative.

    Source: polychromic, technique 003.3.
    """
    return pairwise_cosine_triton(e) if use_triton(e) else pairwise_cosine_vectorised(e)


def pairwise_cosine_vectorised(e: torch.Tensor) -> torch.Tensor:
    """`pairwise_cosine` as one matrix product, on any device and dtype."""
    length = torch.linalg.vector_norm(e, dim=-1, keepdim=True)
    unit = e / length.clamp(min=MIN_NORM)
    # The reference multiplies and adds element by element, which autocast leaves in float32.
    with torch.autocast(e.device.type, enabled=False):
        distances = 1 - unit @ unit.t()
    # A row with a direction is at distance 0 from itself, exactly: 1 - 1 is where a product's rounding shows most.
    directed = ((length > MIN_NORM) & (length < torch.inf)).squeeze(-1)
    distances.diagonal().masked_fill_(directed, 0)
    return distances


def pairwise_cosine_triton(e: torch.Tensor) -> torch.Tensor:
    """`pairwise_cosine` as one Triton kernel, with its own backward, float32."""
    return _PairwiseCosine.apply(e)


def _choose(configs: tuple[tuple, ...], n: int) -> tuple[int, ...]:
    return next(config[1:] for config in configs if config[0] is None or n <= config[0])


class _PairwiseCosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e):
        e = e.contiguous()
        n, width = e.shape
        distances = torch.empty((n, n), dtype=e.dtype, device=e.device)
        # 1 / max(length, 1e-12) of each row, for the backward.
        inverse = torch.empty(n, dtype=e.dtype, device=e.device)
        ctx.save_for_backward(e, inverse)
        if n:
            block, depth, unroll, warps, stages = _choose(FORWARD_CONFIGS, n)
            tiles = ceil_div(n, block)
            with launching(e):
                _forward_kernel[(tiles * (tiles + 1) // 2,)](
                    e,
                    distances,
                    inverse,
                    n,
                    width,
                    BLOCK=block,
                    DEPTH=depth,
                    UNROLL=unroll,
                    num_warps=warps,
                    num_stages=stages,
                )
        return distances

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        e, inverse = ctx.saved_tensors
        n, width = e.shape
        d_e = torch.empty_like(e)
        if not e.numel():
            return d_e
        if n > BACKWARD_KERNEL_MAX:
            return _backward_product(e, inverse, grad)
        rows, columns, depth, warps, stages = _choose(BACKWARD_CONFIGS, n)
        with launching(e):
            _backward_kernel[(ceil_div(n, rows), ceil_div(width, columns))](
                e,
                inverse,
                grad,
                d_e,
                n,
                width,
                grad.stride(0),
                grad.stride(1),
                ROWS=rows,
                COLUMNS=columns,
                DEPTH=depth,
                num_warps=warps,
                num_stages=stages,
            )
            # A row's projection needs all its columns: a kernel of its own, over the N x D result.
            _project_kernel[(n,)](e, inverse, d_e, width, BLOCK=PROJECT_BLOCK, num_warps=4)
        return d_e


def _backward_product(e: torch.Tensor, inverse: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The same gradient with one matrix product of float32."""
    unit = e * inverse[:, None]
    both = grad + grad.t()
    # A row's distance from itself is constant, except where its length is clamped.
    both.diagonal().masked_fill_(inverse < CLAMPED_LENGTH, 0)
    d_e = torch.mm(both, unit).neg_()
    with launching(e):
        _project_kernel[(e.shape[0],)](e, inverse, d_e, e.shape[1], BLOCK=PROJECT_BLOCK, num_warps=4)
    return d_e


@jit
def _length(squares):
    length = tl.sqrt_rn(squares)
    return tl.where(length < 1e-12, 1e-12, length)


@jit
def _tile(number):
    """Row and column of a tile of the upper triangle, counted column by column."""
    column = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # float32 may be one off where the number has more than 21 bits.
    column = tl.where(column * (column + 1) // 2 > number, column - 1, column)
    column = tl.where((column + 1) * (column + 2) // 2 <= number, column + 1, column)
    return number - column * (column + 1) // 2, column


@jit
def _forward_kernel(
    e_ptr, distances_ptr, inverse_ptr, n, width, BLOCK: tl.constexpr, DEPTH: tl.constexpr, UNROLL: tl.constexpr
):
    # Symmetric: only the tiles on and above the diagonal are launched, and mirrored. In a square grid the programs with
    # nothing to do would leave some SMs with twice the work of others.
    tile_i, tile_j = _tile(tl.program_id(0))
    i = tile_i * BLOCK + tl.arange(0, BLOCK)
    j = tile_j * BLOCK + tl.arange(0, BLOCK)
    product = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    # Summed along the row after the loop: a reduction in every step costs more than the registers.
    squares_a = tl.zeros((BLOCK, DEPTH), dtype=tl.float32)
    squares_b = tl.zeros((BLOCK, DEPTH), dtype=tl.float32)
    row_i = e_ptr + i.to(tl.int64)[:, None] * width
    row_j = e_ptr + j.to(tl.int64)[:, None] * width
    for start in tl.range(0, width, DEPTH, loop_unroll_factor=UNROLL):
        k = start + tl.arange(0, DEPTH)
        a = tl.load(row_i + k[None, :], mask=(i < n)[:, None] & (k < width)[None, :], other=0.0).to(tl.float32)
        b = tl.load(row_j + k[None, :], mask=(j < n)[:, None] & (k < width)[None, :], other=0.0).to(tl.float32)
        squares_a += a * a
        squares_b += b * b
        product += tl.dot(a, tl.trans(b), input_precision=PRECISION)
    squares_i = tl.sum(squares_a, axis=1)
    squares_j = tl.sum(squares_b, axis=1)
    length_i = _length(squares_i)
    length_j = _length(squares_j)
    infinity = float("inf")
    if tl.max(tl.where((squares_i == infinity) | (squares_j == infinity), 1, 0), axis=0) > 0:
        # Rare: squares that overflow. A finite row counts as infinitely long; one with an infinity is NaN throughout.
        for start in range(0, width, DEPTH):
            k = start + tl.arange(0, DEPTH)
            a = tl.load(row_i + k[None, :], mask=(i < n)[:, None] & (k < width)[None, :], other=0.0).to(tl.float32)
            b = tl.load(row_j + k[None, :], mask=(j < n)[:, None] & (k < width)[None, :], other=0.0).to(tl.float32)
            length_i += tl.sum(a * 0.0, axis=1)
            length_j += tl.sum(b * 0.0, axis=1)
    inverse_i = tl.div_rn(tl.full((BLOCK,), 1.0, dtype=tl.float32), length_i)
    inverse_j = tl.div_rn(tl.full((BLOCK,), 1.0, dtype=tl.float32), length_j)
    # Beside an infinitely long row the cosine is 0 (or NaN), whatever the product overflowed to.
    endless = (length_i == infinity)[:, None] | (length_j == infinity)[None, :]
    cosine = product * inverse_i[:, None] * inverse_j[None, :]
    distance = 1.0 - tl.where(endless, inverse_i[:, None] * inverse_j[None, :], cosine)
    # A row with a direction is at distance 0 from itself, exactly.
    itself = i[:, None] == j[None, :]
    directed = (length_i > 1e-12) & (length_i < infinity)
    distance = tl.where(itself & directed[:, None], 0.0, distance)
    mask = (i < n)[:, None] & (j < n)[None, :]
    i64 = i.to(tl.int64)
    j64 = j.to(tl.int64)
    tl.store(distances_ptr + i64[:, None] * n + j64[None, :], distance, mask=mask)
    if tile_i == tile_j:
        tl.store(inverse_ptr + i, inverse_i, mask=i < n)
    else:
        mirrored = (j < n)[:, None] & (i < n)[None, :]
        tl.store(distances_ptr + j64[:, None] * n + i64[None, :], tl.trans(distance), mask=mirrored)


@jit
def _backward_kernel(
    e_ptr,
    inverse_ptr,
    grad_ptr,
    d_unit_ptr,
    n,
    width,
    stride_i,
    stride_j,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The gradient of the unit rows: d_u_i = -sum_j (G_ij + G_ji) u_j."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i64 = i.to(tl.int64)
    # A row's distance from itself is constant, except where its length is clamped.
    directed = tl.load(inverse_ptr + i, mask=i < n, other=0.0) < CLAMPED
    d_unit = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, n, DEPTH):
        j = start + tl.arange(0, DEPTH)
        j64 = j.to(tl.int64)
        along = grad_ptr + i64[:, None] * stride_i + j64[None, :] * stride_j
        across = grad_ptr + j64[:, None] * stride_i + i64[None, :] * stride_j
        g = tl.load(along, mask=(i < n)[:, None] & (j < n)[None, :], other=0.0).to(tl.float32)
        g_t = tl.load(across, mask=(j < n)[:, None] & (i < n)[None, :], other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + j, mask=j < n, other=0.0)
        inside = (j < n)[:, None] & (k < width)[None, :]
        e = tl.load(e_ptr + j64[:, None] * width + k[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.where((i[:, None] == j[None, :]) & directed[:, None], 0.0, g + tl.trans(g_t))
        d_unit -= tl.dot(g, e * inverse[:, None], input_precision=PRECISION)
    mask = (i < n)[:, None] & (k < width)[None, :]
    tl.store(d_unit_ptr + i64[:, None] * width + k[None, :], d_unit, mask=mask)


@jit
def _project_kernel(e_ptr, inverse_ptr, d_ptr, width, BLOCK: tl.constexpr):
    """From the gradient of a unit row to that of the row, in place: what lies along the row falls away."""
    row = tl.program_id(0).to(tl.int64) * width
    inverse = tl.load(inverse_ptr + tl.program_id(0))
    along = 0.0
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        unit = tl.load(e_ptr + row + k, mask=k < width, other=0.0).to(tl.float32) * inverse
        along += tl.sum(unit * tl.load(d_ptr + row + k, mask=k < width, other=0.0), axis=0)
    # Where the length is clamped it is a constant, and there is nothing to take away.
    clamped = inverse >= CLAMPED
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        unit = tl.load(e_ptr + row + k, mask=k < width, other=0.0).to(tl.float32) * inverse
        d = tl.load(d_ptr + row + k, mask=k < width, other=0.0)
        tl.store(d_ptr + row + k, tl.where(clamped, d, d - unit * along) * inverse, mask=k < width)
