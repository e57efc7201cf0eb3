"""Cosine distances of all pairs of rows in one tiled Triton kernel (polychromic, technique 003.3)."""

import torch

from optimized.kernels import ceil_div, jit, launching, tl, use_triton

MIN_NORM = 1e-12

# (maximum N, tile edge, columns per step, steps unrolled, warps, pipeline stages), from a sweep at D = 384 on an H200.
# Up to about 500 rows, latency dominates: small tiles give many programs, and the loads of two steps overlap. With more
# rows, 64 x 64 and then 128 x 128 tiles reuse enough data to keep the tensor cores busy.
FORWARD_CONFIGS = (
    (256, 16, 32, 2, 2, 3),
    (512, 16, 32, 2, 1, 4),
    (3072, 64, 32, 1, 4, 4),
    (None, 128, 32, 1, 8, 3),
)
# (maximum N, rows of the tile, columns of the tile, rows per step, warps, stages) of the gradient's matrix product.
BACKWARD_CONFIGS = (
    (256, 16, 32, 32, 4, 3),
    (768, 32, 64, 64, 4, 4),
    (None, 32, 128, 64, 8, 3),
)
# Above this N, the gradient is one float32 product by cuBLAS. TF32 tensor cores need both operands contiguous along the
# summed dimension, and here e is not; without tensor cores, three products cost more than one float32 product.
BACKWARD_KERNEL_MAX = 1536
# 1 / MIN_NORM in float32: the inverse length of a row whose length is clamped.
CLAMPED_LENGTH = 999999995904.0
CLAMPED = tl.constexpr(CLAMPED_LENGTH)
# Columns that the projection kernel handles at a time.
PROJECT_BLOCK = 512
# Three TF32 products (high x high, high x low, low x high) have a relative error below 2^-22; plain TF32 (2^-11) is too
# inaccurate. The tensor cores truncate their sums, so after each step of at most 64 terms the partial sum is added in
# float32. The total error is that of a float32 matrix product.
PRECISION = tl.constexpr("tf32x3")


def pairwise_cosine(e: torch.Tensor) -> torch.Tensor:
    """Return `1 - cos(e_i, e_j)` for all pairs of rows of e [N, D], [N, N].

    Rows are divided by max(length, 1e-12), so a row of zeros is at distance 1 from every row, including itself.
    float32 on CUDA uses Triton kernels, forward and backward. They run on the tensor cores with float32 accuracy, are
    deterministic and have no second derivative. Any other input uses one matrix product.

    Source: polychromic, technique 003.3.
    """
    return pairwise_cosine_triton(e) if use_triton(e) else pairwise_cosine_vectorised(e)


def pairwise_cosine_vectorised(e: torch.Tensor) -> torch.Tensor:
    """Compute `pairwise_cosine` with one matrix product, on any device and dtype."""
    # In float16 the length may overflow, and MIN_NORM is 0.
    wide = torch.promote_types(e.dtype, torch.float32)
    length = torch.linalg.vector_norm(e, dim=-1, keepdim=True, dtype=wide)
    unit = (e / length.clamp(min=MIN_NORM)).to(e.dtype)
    # Autocast would run the product in half precision. The reference's elementwise operations stay in float32.
    with torch.autocast(e.device.type, enabled=False):
        distances = 1 - unit @ unit.t()
    # A row's distance from itself is exactly 0, unless its length is clamped or infinite. 1 - cos would leave a
    # rounding error.
    directed = ((length > MIN_NORM) & (length < torch.inf)).squeeze(-1)
    distances.diagonal().masked_fill_(directed, 0)
    return distances


def pairwise_cosine_triton(e: torch.Tensor) -> torch.Tensor:
    """Compute `pairwise_cosine` with the Triton kernels, float32."""
    return _PairwiseCosine.apply(e)


def _choose(configs: tuple[tuple, ...], n: int) -> tuple[int, ...]:
    return next(config[1:] for config in configs if config[0] is None or n <= config[0])


class _PairwiseCosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e):
        e = e.contiguous()
        n, width = e.shape
        distances = torch.empty((n, n), dtype=e.dtype, device=e.device)
        # 1 / max(length, 1e-12) for each row, needed by the backward.
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
            # The projection of a row needs all its columns, so it is a separate kernel over the N x D result.
            _project_kernel[(n,)](e, inverse, d_e, width, BLOCK=PROJECT_BLOCK, num_warps=4)
        return d_e


def _backward_product(e: torch.Tensor, inverse: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Compute the gradient with one float32 matrix product by cuBLAS."""
    unit = e * inverse[:, None]
    both = grad + grad.t()
    # A row's distance from itself is constant, unless its length is clamped.
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
    """Return the row and column of a tile in the upper triangle; tiles are numbered column by column."""
    column = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # In float32 the result can be off by one if the number has more than 21 bits.
    column = tl.where(column * (column + 1) // 2 > number, column - 1, column)
    column = tl.where((column + 1) * (column + 2) // 2 <= number, column + 1, column)
    return number - column * (column + 1) // 2, column


@jit
def _forward_kernel(
    e_ptr, distances_ptr, inverse_ptr, n, width, BLOCK: tl.constexpr, DEPTH: tl.constexpr, UNROLL: tl.constexpr
):
    """distances[i, j] = 1 - e_i . e_j / (max(|e_i|, 1e-12) max(|e_j|, 1e-12)).

    Each program computes one BLOCK x BLOCK tile on or above the diagonal, DEPTH columns of e at a time, and also stores
    its mirror image. A square grid with idle programs below the diagonal would give some SMs twice the work of others.
    The squared lengths come from the same loads. Programs on the diagonal store the inverse lengths for the backward.
    """
    tile_i, tile_j = _tile(tl.program_id(0))
    i = tile_i * BLOCK + tl.arange(0, BLOCK)
    j = tile_j * BLOCK + tl.arange(0, BLOCK)
    product = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    # Reduced after the loop: a reduction in each step would cost more than the registers.
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
        # Rare: the squares overflow. A finite row then has infinite length; a row that contains an infinity gives NaN.
        for start in range(0, width, DEPTH):
            k = start + tl.arange(0, DEPTH)
            a = tl.load(row_i + k[None, :], mask=(i < n)[:, None] & (k < width)[None, :], other=0.0).to(tl.float32)
            b = tl.load(row_j + k[None, :], mask=(j < n)[:, None] & (k < width)[None, :], other=0.0).to(tl.float32)
            length_i += tl.sum(a * 0.0, axis=1)
            length_j += tl.sum(b * 0.0, axis=1)
    inverse_i = tl.div_rn(tl.full((BLOCK,), 1.0, dtype=tl.float32), length_i)
    inverse_j = tl.div_rn(tl.full((BLOCK,), 1.0, dtype=tl.float32), length_j)
    # The cosine with a row of infinite length is 0 (or NaN), whatever the product overflowed to.
    endless = (length_i == infinity)[:, None] | (length_j == infinity)[None, :]
    cosine = product * inverse_i[:, None] * inverse_j[None, :]
    distance = 1.0 - tl.where(endless, inverse_i[:, None] * inverse_j[None, :], cosine)
    # A row's distance from itself is exactly 0, unless its length is clamped or infinite.
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
    e_ptr, inverse_ptr, grad_ptr, d_unit_ptr,
    n, width, stride_i, stride_j,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """d_u_i = -sum_j (G_ij + G_ji) u_j, the gradient of the unit rows u = e / length, for the output's gradient G.

    Each program computes a ROWS x COLUMNS tile of d_u and sums over j, DEPTH rows at a time. It reads G in both orders,
    so G + G^T is never stored.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i64 = i.to(tl.int64)
    # A row's distance from itself is constant, unless its length is clamped.
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
    """d_e = (d_u - (d_u . u) u) / length: turn the gradient of a unit row u into that of the row, in place.

    Each program handles one row, BLOCK columns at a time, in two passes: the dot product, then the projection.
    """
    row = tl.program_id(0).to(tl.int64) * width
    inverse = tl.load(inverse_ptr + tl.program_id(0))
    along = 0.0
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        unit = tl.load(e_ptr + row + k, mask=k < width, other=0.0).to(tl.float32) * inverse
        along += tl.sum(unit * tl.load(d_ptr + row + k, mask=k < width, other=0.0), axis=0)
    # A clamped length is a constant, so the gradient keeps its part along the row.
    clamped = inverse >= CLAMPED
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        unit = tl.load(e_ptr + row + k, mask=k < width, other=0.0).to(tl.float32) * inverse
        d = tl.load(d_ptr + row + k, mask=k < width, other=0.0)
        tl.store(d_ptr + row + k, tl.where(clamped, d, d - unit * along) * inverse, mask=k < width)
