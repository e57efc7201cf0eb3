"""A frozen linear layer and its low-rank adapter, by products that add to their outputs (polychromic, 003.6)."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from optimized.autocasting import as_autocast
from optimized.dropout_masks import packed, packed_triton, unpacked
from optimized.kernels import INTERPRETED, ceil_div, has_descriptors, jit, launching, tl, triton, use_triton

if triton is not None:
    from triton.tools.tensor_descriptor import TensorDescriptor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# All constants below are still to be swept on an H200.
# Whether `fused_lora` takes the product kernel on Hopper GPUs. What cuBLAS's products read and write more is, by its
# bytes, 5% to 10% of a product's time; the product kernel is faster only if it loses less than that to cuBLAS.
PRODUCT_KERNEL = False
# (largest number of tokens, tokens in a tile, inputs in a step, warps, stages) of dropout(x) @ a.T: small tiles for
# few tokens, and the steps of an input shared out among programs, of which each makes so many at least.
DOWN_CONFIGS = ((2048, 16, 256, 4, 3), (None, 64, 128, 4, 4))
LEAST_STEPS = 4
# Tokens and columns in a tile of the kernels that read dy and x once, warps, stages. With 256 columns of x and dropout
# registers spill.
ACROSS_CONFIG = (64, 256, 8, 3)
INTO_CONFIG = (64, 128, 8, 3)
# Programs of these kernels: each takes several tiles of tokens, to write fewer partial sums.
PROGRAMS = 264
# Rows and columns of a tile of the product kernel, terms in a step, rows of tiles that share columns in the L2 cache.
PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_TERMS, PRODUCT_GROUP, PRODUCT_WARPS, PRODUCT_STAGES = 128, 256, 64, 8, 8, 3
# tl.dot takes at least so many terms and columns.
LEAST_RANK = 16
# A descriptor of a tensor needs rows that begin at multiples of so many bytes.
DESCRIPTOR_BYTES = 16


def fused_lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """`x @ weight.T + scale * (dropout(x) @ a.T) @ b.T`, [tokens, outputs].

    For the backward pass it saves x, h = scale / keep * (x * kept) @ a.T of [tokens, rank], and kept as bits. Sums
    accumulate in float32. There is no second derivative, and the weight gets no gradient.

    With T tokens, I inputs, O outputs and rank R, the frozen products take 2 T I O operations forward and again
    backward; the others 2 T R (I + O) forward and twice as many backward. Elements read and written beyond the
    operands and results of the frozen products:

                   reference       with dropout    optimized       fused_lora_triton
        forward    T I + 6 T O     5 T I + 6 T O   T I + 2 T O     T I
        backward   5 T I + 4 T O   9 T I + 4 T O   3 T I + T O     T I + T O

    The optimized side reads the T I bytes of kept once, writes T I / 8 and reads these in each direction; the reference
    reads T I bytes in each. Partial sums in float32 of the products with dy add a fifth to what is read of dy for
    8192 tokens and 4096 outputs, and more for fewer.

    On CUDA a Triton kernel packs kept, and three make the products with a narrow side: one reads x once for h; one
    reads dy once for dy @ b and the gradient of b; one reads x once for the gradient of a, and writes the adapter's
    part of the gradient of x. The frozen products, by cuBLAS, then add to what lies in their output (beta = 1).
    `fused_lora_triton` makes the frozen products by a kernel of its own, which adds the adapter's part to the sums
    before they are written. Elsewhere, and in float64, PyTorch's operations do.

    x       [tokens, inputs]
    weight  [outputs, inputs], frozen
    a       [rank, inputs]
    b       [outputs, rank]
    kept    bool or uint8 [tokens, inputs]: 1 where dropout keeps the element, 0 elsewhere; or these as bits, uint8
            [tokens, ⌈inputs / 8⌉], bit i of byte j for the input 8 j + i; None without dropout
    keep    the probability of being kept, by which dropout divides

    Source: polychromic, technique 003.6.
    """
    return _with(None, x, weight, a, b, scale, kept, keep)


def fused_lora_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """`fused_lora` in PyTorch operations, with the same tensors saved."""
    return _with(TORCH, x, weight, a, b, scale, kept, keep)


def fused_lora_narrow(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """`fused_lora` by kernels for the narrow products and PyTorch's for the frozen ones; not in float64."""
    return _with(NARROW, x, weight, a, b, scale, kept, keep)


def fused_lora_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """`fused_lora` by kernels alone, where the product kernel can be used, else by `fused_lora_narrow`'s.

    It needs a Hopper GPU, half precision, and numbers of inputs and outputs that are multiples of 8.
    """
    return _with(WIDE, x, weight, a, b, scale, kept, keep)


class Form(NamedTuple):
    """Which of the products are made by kernels."""

    narrow: bool
    wide: bool


TORCH, NARROW, WIDE = Form(False, False), Form(True, False), Form(True, True)


def _with(form, x, weight, a, b, scale, kept, keep):
    if form is None and not use_triton(weight, dtypes=DTYPES):
        form = TORCH
    return applied(form, _given, (weight.detach(),), x, a, b, scale, kept, keep)


def _given(form, dtype, weight):
    """The weight itself, but under autocast."""
    weight = weight.to(dtype)
    return weight.contiguous() if form.narrow else weight


def applied(
    form: Form | None,
    weight_of: Callable[..., torch.Tensor],
    frozen: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None,
    keep: float,
) -> torch.Tensor:
    """`fused_lora` with the weight `weight_of(form, dtype, *frozen)`, which is made in each direction and not kept.

    form  None for the one that serves x, a and b where they are
    """
    x, a, b = as_autocast(x, a, b)
    if form is None:
        form = (WIDE if PRODUCT_KERNEL else NARROW) if use_triton(x, a, b, dtypes=DTYPES) else TORCH
    # The interpreter is wrong in bfloat16.
    if not (x.numel() and a.numel() and b.numel()) or (INTERPRETED and x.dtype == torch.bfloat16):
        form = TORCH
    if kept is not None and kept.shape[1] == x.shape[1]:
        kept = (packed_triton if form.narrow else packed)(kept.view(torch.uint8))
    return FusedLora.apply(x, a, b, scale if kept is None else scale / keep, kept, form, weight_of, *frozen)


class FusedLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, factor, bits, form, weight_of, *frozen):
        with torch.autocast(x.device.type, enabled=False):
            if form.narrow:
                x, a, b = (t.contiguous() for t in (x, a, b))
            h = (_down_triton if form.narrow else _down_torch)(x, a, factor, bits)
            ctx.save_for_backward(x, a, b, h, bits, *frozen)
            ctx.factor, ctx.form, ctx.weight_of = factor, form, weight_of
            weight = weight_of(form, x.dtype, *frozen)
            if form.wide and _has_product(x, weight):
                return _product(x, weight, h, b)
            return torch.mm(h, b.T).addmm_(x, weight.T)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, a, b, h, bits, *frozen = ctx.saved_tensors
        form, (for_x, for_a, *_) = ctx.form, ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            if form.narrow:
                dy = dy.contiguous()
            g, d_b = (_across_triton if form.narrow else _across_torch)(dy, b, h, ctx.factor)
            weight = ctx.weight_of(form, x.dtype, *frozen) if for_x else None
            by_kernel = for_x and form.wide and _has_product(dy, weight)
            d_a = d_x = None
            if for_a or for_x:
                into = _into_triton if form.narrow else _into_torch
                d_a, d_x = into(x, a, g, bits, added=for_x and not by_kernel)
            if for_x:
                d_x = _product(dy, weight, g, a, bits, backward=True) if by_kernel else d_x.addmm_(dy, weight)
        return d_x, d_a, d_b, None, None, None, None, *(None for _ in frozen)


def _down_torch(x, a, factor, bits):
    """factor * (x * kept) @ a.T."""
    return (x if bits is None else x * unpacked(bits, x.shape[1])) @ a.T * factor


def _across_torch(dy, b, h, factor):
    """g = factor * dy @ b, and the gradient of b."""
    return dy @ b * factor, dy.T @ h


def _into_torch(x, a, g, bits, added):
    """The gradient of a, and what the adapter adds to that of x; None if it is not `added`."""
    kept = None if bits is None else unpacked(bits, x.shape[1])
    d_a = g.T @ (x if kept is None else x * kept)
    if not added:
        return d_a, None
    d_x = g @ a
    return d_a, d_x if kept is None else d_x.mul_(kept)


def _rank_block(rank):
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def _down_triton(x, a, factor, bits):
    tokens, inputs = x.shape
    rank = len(a)
    _, tile, step, warps, stages = next(c for c in DOWN_CONFIGS if c[0] is None or tokens <= c[0])
    tiles, steps = ceil_div(tokens, tile), ceil_div(inputs, step)
    each = ceil_div(steps, max(1, min(PROGRAMS // tiles, steps // LEAST_STEPS)))
    parts = ceil_div(steps, each)
    h_parts = torch.empty((parts, tokens, rank), dtype=torch.float32 if parts > 1 else x.dtype, device=x.device)
    with launching(x):
        _down_kernel[(tiles, parts)](
            x,
            a,
            bits,
            h_parts,
            factor,
            tokens,
            inputs,
            rank,
            each,
            DROPS=bits is not None,
            TOKENS=tile,
            INPUTS=step,
            RANK=_rank_block(rank),
            num_warps=warps,
            num_stages=stages,
        )
    return _total(h_parts, x.dtype)


def _tiling(tokens, columns, config):
    """How many tiles of tokens a program takes, and the grid: parts of the tokens, tiles of the columns."""
    tiles, across = ceil_div(tokens, config[0]), ceil_div(columns, config[1])
    # No more programs than run at once: a few left over would take as long again.
    each = ceil_div(tiles, max(1, PROGRAMS // across))
    return each, (ceil_div(tiles, each), across)


def _total(parts, dtype):
    """Partial sums in float32, added up."""
    return (parts[0] if len(parts) == 1 else parts.sum(0)).to(dtype)


def _across_triton(dy, b, h, factor):
    tokens, outputs = dy.shape
    rank = h.shape[1]
    tile, width, warps, stages = ACROSS_CONFIG
    each, grid = _tiling(tokens, outputs, ACROSS_CONFIG)
    g_parts = torch.empty((grid[1], tokens, rank), dtype=torch.float32, device=dy.device)
    b_parts = torch.empty((grid[0], outputs, rank), dtype=torch.float32, device=dy.device)
    with launching(dy):
        _across_kernel[grid](
            dy,
            b,
            h,
            g_parts,
            b_parts,
            factor,
            tokens,
            outputs,
            rank,
            each,
            TOKENS=tile,
            COLUMNS=width,
            RANK=_rank_block(rank),
            num_warps=warps,
            num_stages=stages,
        )
    return _total(g_parts, dy.dtype), _total(b_parts, b.dtype)


def _into_triton(x, a, g, bits, added):
    tokens, inputs = x.shape
    rank = len(a)
    tile, width, warps, stages = INTO_CONFIG
    each, grid = _tiling(tokens, inputs, INTO_CONFIG)
    a_parts = torch.empty((grid[0], rank, inputs), dtype=torch.float32, device=x.device)
    d_x = torch.empty_like(x) if added else None
    with launching(x):
        _into_kernel[grid](
            x,
            a,
            g,
            bits,
            d_x,
            a_parts,
            tokens,
            inputs,
            rank,
            each,
            DROPS=bits is not None,
            ADDS=added,
            TOKENS=tile,
            COLUMNS=width,
            RANK=_rank_block(rank),
            num_warps=warps,
            num_stages=stages,
        )
    return _total(a_parts, a.dtype), d_x


def _has_product(left, weight):
    """Whether the product kernel takes these operands: half precision, with rows at multiples of 16 bytes."""
    aligned = all(
        t.data_ptr() % DESCRIPTOR_BYTES == 0 and n * t.element_size() % DESCRIPTOR_BYTES == 0
        for t in (left, weight)
        for n in weight.shape
    )
    return aligned and has_descriptors(left) and (left.dtype != torch.float32 or INTERPRETED)


def _product(left, weight, thin, low, bits=None, backward=False):
    """left @ weight.T + thin @ low.T, or backward left @ weight + (thin @ low) * kept."""
    outputs, inputs = weight.shape
    columns = inputs if backward else outputs
    rows, terms = left.shape
    rank = thin.shape[1]
    out = torch.empty((rows, columns), dtype=left.dtype, device=left.device)
    block = [PRODUCT_TERMS, PRODUCT_COLUMNS] if backward else [PRODUCT_COLUMNS, PRODUCT_TERMS]
    with launching(left):
        _product_kernel[(ceil_div(rows, PRODUCT_ROWS) * ceil_div(columns, PRODUCT_COLUMNS),)](
            TensorDescriptor.from_tensor(left, [PRODUCT_ROWS, PRODUCT_TERMS]),
            TensorDescriptor.from_tensor(weight, block),
            TensorDescriptor.from_tensor(out, [PRODUCT_ROWS, PRODUCT_COLUMNS]),
            thin,
            low,
            bits,
            rows,
            columns,
            terms,
            rank,
            BACKWARD=backward,
            DROPS=bits is not None,
            ROWS=PRODUCT_ROWS,
            COLUMNS=PRODUCT_COLUMNS,
            TERMS=PRODUCT_TERMS,
            GROUP=PRODUCT_GROUP,
            RANK=_rank_block(rank),
            num_warps=PRODUCT_WARPS,
            num_stages=PRODUCT_STAGES,
        )
    return out


@jit
def _kept(bits_ptr, row, first, columns, mask, COLUMNS: tl.constexpr):
    """0 or 1 of each of COLUMNS elements of the rows, from the column `first` on, a multiple of 8; [rows, bytes, 8]."""
    bytes_of_row = tl.cdiv(columns, 8)
    byte = first // 8 + tl.arange(0, COLUMNS // 8)
    bits = tl.load(
        bits_ptr + row * bytes_of_row + byte[None, :], mask=mask[:, None] & (byte < bytes_of_row)[None, :], other=0
    )
    return (bits.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1


@jit
def _dropped(x_ptr, bits_ptr, row, first, columns, mask, COLUMNS: tl.constexpr):
    """COLUMNS elements of the rows of x, 0 where they are dropped. Eight at a time, as many as share a byte of bits."""
    i = first + tl.arange(0, COLUMNS // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = tl.load(
        x_ptr + row[:, :, None] * columns + i[None, :, :],
        mask=mask[:, None, None] & (i < columns)[None, :, :],
        other=0.0,
    )
    kept = _kept(bits_ptr, row, first, columns, mask, COLUMNS)
    return tl.reshape(x * kept.to(x.dtype), (row.shape[0], COLUMNS))


@jit
def _down_kernel(
    x_ptr,
    a_ptr,
    bits_ptr,
    h_ptr,
    factor,
    tokens,
    inputs,
    rank,
    each,
    DROPS: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANK: tl.constexpr,
):
    part = tl.program_id(1)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    r = tl.arange(0, RANK)
    row = t.to(tl.int64)[:, None]
    total = tl.zeros((TOKENS, RANK), tl.float32)
    for start in range(part * each * INPUTS, (part + 1) * each * INPUTS, INPUTS):
        i = start + tl.arange(0, INPUTS)
        mask = (t < tokens)[:, None] & (i < inputs)[None, :]
        if DROPS:
            x = _dropped(x_ptr, bits_ptr, row, start, inputs, t < tokens, INPUTS)
        else:
            x = tl.load(x_ptr + row * inputs + i[None, :], mask=mask, other=0.0)
        a = tl.load(
            a_ptr + r[:, None] * inputs + i[None, :], mask=(r < rank)[:, None] & (i < inputs)[None, :], other=0.0
        )
        total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
    h = (total * factor).to(h_ptr.dtype.element_ty)
    h_ptr += part.to(tl.int64) * tokens * rank
    tl.store(h_ptr + row * rank + r[None, :], h, mask=(t < tokens)[:, None] & (r < rank)[None, :])


@jit
def _across_kernel(
    dy_ptr,
    b_ptr,
    h_ptr,
    g_ptr,
    d_b_ptr,
    factor,
    tokens,
    outputs,
    rank,
    each,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    part = tl.program_id(0)
    column = tl.program_id(1)
    o = column * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    of_b = (o < outputs)[:, None] & (r < rank)[None, :]
    place = o[:, None] * rank + r[None, :]
    b = tl.load(b_ptr + place, mask=of_b, other=0.0)
    d_b = tl.zeros((COLUMNS, RANK), tl.float32)
    g_ptr += column.to(tl.int64) * tokens * rank
    for step in range(each):
        t = (part * each + step) * TOKENS + tl.arange(0, TOKENS)
        row = t.to(tl.int64)[:, None]
        mask = (t < tokens)[:, None] & (o < outputs)[None, :]
        dy = tl.load(dy_ptr + row * outputs + o[None, :], mask=mask, other=0.0)
        of_h = (t < tokens)[:, None] & (r < rank)[None, :]
        h = tl.load(h_ptr + row * rank + r[None, :], mask=of_h, other=0.0)
        g = tl.dot(dy, b, input_precision="ieee") * factor
        tl.store(g_ptr + row * rank + r[None, :], g, mask=of_h)
        d_b = tl.dot(tl.trans(dy), h, d_b, input_precision="ieee")
    tl.store(d_b_ptr + part.to(tl.int64) * outputs * rank + place, d_b, mask=of_b)


@jit
def _into_kernel(
    x_ptr,
    a_ptr,
    g_ptr,
    bits_ptr,
    d_x_ptr,
    d_a_ptr,
    tokens,
    inputs,
    rank,
    each,
    DROPS: tl.constexpr,
    ADDS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    part = tl.program_id(0)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    a = tl.load(a_ptr + r[:, None] * inputs + i[None, :], mask=(r < rank)[:, None] & (i < inputs)[None, :], other=0.0)
    d_a = tl.zeros((COLUMNS, RANK), tl.float32)
    for step in range(each):
        t = (part * each + step) * TOKENS + tl.arange(0, TOKENS)
        row = t.to(tl.int64)[:, None]
        mask = (t < tokens)[:, None] & (i < inputs)[None, :]
        if DROPS:
            x = _dropped(x_ptr, bits_ptr, row, tl.program_id(1) * COLUMNS, inputs, t < tokens, COLUMNS)
        else:
            x = tl.load(x_ptr + row * inputs + i[None, :], mask=mask, other=0.0)
        of_g = (t < tokens)[:, None] & (r < rank)[None, :]
        g = tl.load(g_ptr + row * rank + r[None, :], mask=of_g, other=0.0)
        d_a = tl.dot(tl.trans(x), g, d_a, input_precision="ieee")
        if ADDS:
            added = tl.dot(g, a, input_precision="ieee")
            if DROPS:
                kept = _kept(bits_ptr, row, tl.program_id(1) * COLUMNS, inputs, t < tokens, COLUMNS)
                added = added * tl.reshape(kept.to(tl.float32), (TOKENS, COLUMNS))
            tl.store(d_x_ptr + row * inputs + i[None, :], added.to(d_x_ptr.dtype.element_ty), mask=mask)
    place = part.to(tl.int64) * rank * inputs + r[None, :] * inputs + i[:, None]
    tl.store(d_a_ptr + place, d_a, mask=(i < inputs)[:, None] & (r < rank)[None, :])


@jit
def _product_kernel(
    left,
    weight,
    out,
    thin_ptr,
    low_ptr,
    bits_ptr,
    rows,
    columns,
    terms,
    rank,
    BACKWARD: tl.constexpr,
    DROPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
):
    # Programs that run at the same time take GROUP tiles of rows by as few tiles of columns as possible.
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // (GROUP * across)
    within = tl.program_id(0) % (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    first_row = (group * GROUP + within % height) * ROWS
    first_column = within // height * COLUMNS
    m = first_row + tl.arange(0, ROWS)
    n = first_column + tl.arange(0, COLUMNS)
    r = tl.arange(0, RANK)
    row = m.to(tl.int64)[:, None]
    thin = tl.load(thin_ptr + row * rank + r[None, :], mask=(m < rows)[:, None] & (r < rank)[None, :], other=0.0)
    inside = (r < rank)[:, None] & (n < columns)[None, :]
    if BACKWARD:
        low = tl.load(low_ptr + r[:, None] * columns + n[None, :], mask=inside, other=0.0)
    else:
        low = tl.load(low_ptr + n[None, :] * rank + r[:, None], mask=inside, other=0.0)
    # The adapter's part first: after the sums it would need registers beside them.
    total = tl.dot(thin, low, input_precision="ieee")
    if DROPS:
        kept = _kept(bits_ptr, row, first_column, columns, m < rows, COLUMNS)
        total = total * tl.reshape(kept.to(tl.float32), (ROWS, COLUMNS))
    for k in range(0, terms, TERMS):
        x = left.load([first_row, k])
        w = weight.load([k, first_column]) if BACKWARD else tl.trans(weight.load([first_column, k]))
        total = tl.dot(x, w, total, input_precision="ieee")
    out.store([first_row, first_column], total.to(thin_ptr.dtype.element_ty))
