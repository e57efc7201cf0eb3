"""Triton kernels of a transformer block without gradients: layer norm of shifted rows, and a product with GELU."""

import torch

from optimized.kernels import ceil_div, jit, launching, tl, triton

ROWS = 4
"""Rows that one program of `shifted_norm` normalises."""


def shifted_norm(z: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype):
    """Return the layer norm of z + shift in another dtype, [M, D].

    z                   float32 [M, D]
    shift, scale, bias  float32 [D]
    """
    rows, width = z.shape
    out = torch.empty(rows, width, dtype=dtype, device=z.device)
    with launching(z):
        _shifted_norm[(ceil_div(rows, ROWS),)](
            z, shift, scale, bias, out, rows, WIDTH=width, ROWS=ROWS, BLOCK=triton.next_power_of_2(width), num_warps=4
        )
    return out


@jit
def _shifted_norm(
    z, shift, scale, bias, out, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    real = column < WIDTH
    inside = (row < rows)[:, None] & real[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    x = tl.load(z + at, mask=inside, other=0.0) + tl.load(shift + column, mask=real, other=0.0)[None, :]
    mean = tl.sum(x, 1) / WIDTH
    away = tl.where(real[None, :], x - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(away * away, 1) / WIDTH + 1e-5)
    scaled = away * inverse[:, None] * tl.load(scale + column, mask=real, other=0.0)[None, :]
    result = scaled + tl.load(bias + column, mask=real, other=0.0)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


TILES = {
    "128x128, 4 warps": {"TILE_M": 128, "TILE_N": 128, "TILE_K": 64, "num_warps": 4, "num_stages": 3},
    "128x256, 8 warps": {"TILE_M": 128, "TILE_N": 256, "TILE_K": 64, "num_warps": 8, "num_stages": 3},
    "64x128, 4 warps": {"TILE_M": 64, "TILE_N": 128, "TILE_K": 64, "num_warps": 4, "num_stages": 4},
}
GROUP = 8
"""Rows of tiles that programs take together, so that they find each other's operands in the L2 cache."""


def product_gelu(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, tile: dict[str, int]) -> torch.Tensor:
    """Return gelu(a @ w.T + bias), rounded once, in the dtype of a, [M, N]. The product and GELU are in float32.

    a  [M, K], w  [N, K], bias  [N]: one dtype, contiguous
    """
    (rows, depth), columns = a.shape, w.shape[0]
    out = torch.empty(rows, columns, dtype=a.dtype, device=a.device)
    grid = (ceil_div(rows, tile["TILE_M"]) * ceil_div(columns, tile["TILE_N"]),)
    with launching(a):
        _product_gelu[grid](a, w, bias, out, rows, columns, depth, GROUP=GROUP, **tile)
    return out


@jit
def _product_gelu(
    a, w, bias, out, rows, columns, depth,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(rows, TILE_M), tl.cdiv(columns, TILE_N)
    first = (program // (GROUP * tiles_n)) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = program % (GROUP * tiles_n)
    row = (first + within % height) * TILE_M + tl.arange(0, TILE_M)
    column = (within // height) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    of_a = a + (row % rows).to(tl.int64)[:, None] * depth + k[None, :]
    of_w = w + (column % columns).to(tl.int64)[None, :] * depth + k[:, None]
    summed = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, depth, TILE_K):
        left = k < depth - start
        x = tl.load(of_a + start, mask=left[None, :], other=0.0)
        y = tl.load(of_w + start, mask=left[:, None], other=0.0)
        summed = tl.dot(x, y, summed, input_precision="ieee")
    summed += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    result = 0.5 * summed * (1.0 + tl.math.erf(summed * 0.7071067811865476))
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


NORMED_TILES = {"32x64": (32, 64), "32x128": (32, 128), "64x64": (64, 64), "64x128": (64, 128)}
"""Rows and columns of a program of `norm_product`."""


def norm_product(
    z: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    norm_bias: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    *,
    gelu: bool,
    tile: tuple[int, int],
) -> torch.Tensor:
    """Return h @ w.T + bias for the layer norm h of z + shift, or GELU of it, in the dtype of w, [M, N].

    z                        float32 [M, D], D a power of two
    shift, scale, norm_bias  float32 [D]
    w                        [N, D], and bias [N]
    """
    (rows, width), columns = z.shape, w.shape[0]
    out = torch.empty(rows, columns, dtype=w.dtype, device=z.device)
    grid = (ceil_div(rows, tile[0]), ceil_div(columns, tile[1]))
    with launching(z):
        _norm_product[grid](
            z, shift, scale, norm_bias, w, bias, out, rows, columns,
            WIDTH=width, TILE_M=tile[0], TILE_N=tile[1], GELU=gelu, num_warps=4 if tile[0] * width <= 8192 else 8,
        )  # fmt: skip
    return out


@jit
def _norm_product(
    z, shift, scale, norm_bias, w, bias, out, rows, columns,
    WIDTH: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, WIDTH)
    y = tl.load(w + (column % columns)[None, :] * WIDTH + k[:, None])
    x = tl.load(z + (row % rows).to(tl.int64)[:, None] * WIDTH + k[None, :]) + tl.load(shift + k)[None, :]
    mean = tl.sum(x, 1) / WIDTH
    away = x - mean[:, None]
    inverse = 1.0 / tl.sqrt(tl.sum(away * away, 1) / WIDTH + 1e-5)
    normed = away * inverse[:, None] * tl.load(scale + k)[None, :] + tl.load(norm_bias + k)[None, :]
    summed = tl.dot(normed.to(w.dtype.element_ty), y, input_precision="ieee")
    summed += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if GELU:
        summed = 0.5 * summed * (1.0 + tl.math.erf(summed * 0.7071067811865476))
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + at, summed.to(out.dtype.element_ty), mask=inside)
