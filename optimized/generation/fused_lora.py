"""A frozen linear layer and its low-rank adapter; products accumulate into their output (polychromic, 003.6)."""

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
# Whether `fused_lora` uses the product kernel on Hopper GPUs. With cuBLAS, the additional reads and writes take 5% to
# 10% of a product's time, estimated from their bytes. The product kernel pays off only if it is slower than cuBLAS by
# less than that.
PRODUCT_KERNEL = False
# (largest number of tokens, tokens per tile, inputs per step, warps, stages) of dropout(x) @ a.T. With few tokens the
# tiles are small, and the steps over the inputs are divided among programs, at least LEAST_STEPS steps for each.
DOWN_CONFIGS = ((2048, 16, 256, 4, 3), (None, 64, 128, 4, 4))
LEAST_STEPS = 4
# (tokens per tile, columns per tile, warps, stages) of the kernels that read dy and x once. With 256 columns of x and
# dropout, registers spill.
ACROSS_CONFIG = (64, 256, 8, 3)
INTO_CONFIG = (64, 128, 8, 3)
# Maximum number of programs per kernel. Each program processes several tiles of tokens, so that fewer partial sums are
# written.
PROGRAMS = 264
# Product kernel: rows and columns per tile, terms per step, rows of tiles that share columns in the L2 cache.
PRODUCT_ROWS, PRODUCT_COLUMNS, PRODUCT_TERMS, PRODUCT_GROUP, PRODUCT_WARPS, PRODUCT_STAGES = 128, 256, 64, 8, 8, 3
# tl.dot needs at least 16 terms and 16 columns.
LEAST_RANK = 16
# A tensor descriptor needs rows that begin at multiples of 16 bytes.
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
    """Compute `x @ weight.T + scale * (dropout(x) @ a.T) @ b.T`, [tokens, outputs].

    For the backward pass it saves x, h = scale / keep * (x * kept) @ a.T of shape [tokens, rank], and kept as bits.
    Sums accumulate in float32. There is no second derivative, and the weight gets no gradient.

    With T tokens, I inputs, O outputs and rank R, the products with the frozen weight need 2 T I O operations in each
    direction. The adapter's products need 2 T R (I + O) forward and twice as many backward. The table counts the
    elements that are read and written in addition to the operands and results of the frozen products:

                   reference       with dropout    optimized       fused_lora_triton
        forward    T I + 6 T O     5 T I + 6 T O   T I + 2 T O     T I
        backward   5 T I + 4 T O   9 T I + 4 T O   3 T I + T O     T I + T O

    The optimized side reads the T I bytes of kept once, writes T I / 8 bytes, and reads these in each direction. The
    reference reads T I bytes in each direction. The float32 partial sums of the products with dy add a fifth to the
    reads of dy for 8192 tokens and 4096 outputs, and more for fewer.

    On CUDA, one Triton kernel packs kept into bits, and three kernels compute the adapter's products. The first reads x
    once for h. The second reads dy once for dy @ b and the gradient of b. The third reads x once for the gradient of a,
    and writes the adapter's part of the gradient of x. cuBLAS then adds the frozen products to their output (beta = 1).
    In `fused_lora_triton` one more kernel computes the frozen products, and adds the adapter's part before it writes
    them. On other devices and in float64, PyTorch operations compute everything.

    x       [tokens, inputs]
    weight  [outputs, inputs], frozen
    a       [rank, inputs]
    b       [outputs, rank]
    kept    bool or uint8 [tokens, inputs]: 1 where dropout keeps the element, 0 elsewhere. Or the same as bits, uint8
            [tokens, ⌈inputs / 8⌉]: bit i of byte j is for input 8 j + i. None: no dropout
    keep    probability that an element is kept; dropout divides by it

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
    """`fused_lora` in PyTorch operations; it saves the same tensors."""
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
    """`fused_lora` with Triton kernels for the adapter's products and PyTorch for the frozen ones; not in float64."""
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
    """`fused_lora` with Triton kernels only, or `fused_lora_narrow` where the product kernel cannot run.

    The product kernel needs a Hopper GPU or newer, half precision, and multiples of 8 inputs and outputs.
    """
    return _with(WIDE, x, weight, a, b, scale, kept, keep)


class Form(NamedTuple):
    """The products that use Triton kernels: `narrow`, those of the adapter; `wide`, those with the frozen weight."""

    narrow: bool
    wide: bool


TORCH, NARROW, WIDE = Form(False, False), Form(True, False), Form(True, True)


def _with(form, x, weight, a, b, scale, kept, keep):
    if form is None and not use_triton(weight, dtypes=DTYPES):
        form = TORCH
    return applied(form, _given, (weight.detach(),), x, a, b, scale, kept, keep)


def _given(form, dtype, weight):
    """Return the weight in the dtype, which differs from its own only under autocast."""
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
    """`fused_lora` with the weight `weight_of(form, dtype, *frozen)`, computed again in each direction and not saved.

    form  None: chosen by the device and dtype of x, a and b
    """
    x, a, b = as_autocast(x, a, b)
    if form is None:
        form = (WIDE if PRODUCT_KERNEL else NARROW) if use_triton(x, a, b, dtypes=DTYPES) else TORCH
    # Triton's interpreter is wrong in bfloat16.
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
    """Compute h = factor * (x * kept) @ a.T."""
    return (x if bits is None else x * unpacked(bits, x.shape[1])) @ a.T * factor


def _across_torch(dy, b, h, factor):
    """Compute g = factor * dy @ b, and the gradient of b."""
    return dy @ b * factor, dy.T @ h


def _into_torch(x, a, g, bits, added):
    """Compute the gradient of a, and the adapter's part of the gradient of x, or None if not `added`."""
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
    """Return the number of tiles of tokens per program, and the grid: (parts of the tokens, tiles of the columns)."""
    tiles, across = ceil_div(tokens, config[0]), ceil_div(columns, config[1])
    # No more programs than run at once: a few more would double the time.
    each = ceil_div(tiles, max(1, PROGRAMS // across))
    return each, (ceil_div(tiles, each), across)


def _total(parts, dtype):
    """Add up the partial sums, in float32, and cast the total to the dtype."""
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
    """Return whether the product kernel supports these operands: half precision, with rows at multiples of 16 bytes.

    In the interpreter it also supports float32.
    """
    aligned = all(
        t.data_ptr() % DESCRIPTOR_BYTES == 0 and n * t.element_size() % DESCRIPTOR_BYTES == 0
        for t in (left, weight)
        for n in weight.shape
    )
    return aligned and has_descriptors(left) and (left.dtype != torch.float32 or INTERPRETED)


def _product(left, weight, thin, low, bits=None, backward=False):
    """Compute left @ weight.T + thin @ low.T, or in the backward pass left @ weight + (thin @ low) * kept."""
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
    """Unpack the bits of COLUMNS columns, from column `first`, a multiple of 8: 0 or 1, [rows, COLUMNS / 8, 8]."""
    bytes_of_row = tl.cdiv(columns, 8)
    byte = first // 8 + tl.arange(0, COLUMNS // 8)
    bits = tl.load(
        bits_ptr + row * bytes_of_row + byte[None, :], mask=mask[:, None] & (byte < bytes_of_row)[None, :], other=0
    )
    return (bits.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1


@jit
def _dropped(x_ptr, bits_ptr, row, first, columns, mask, COLUMNS: tl.constexpr):
    """Load COLUMNS columns of x, from column `first`, with 0 where they are dropped: [rows, COLUMNS].

    The eight elements that share a byte of bits are loaded together.
    """
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
    x_ptr, a_ptr, bits_ptr, h_ptr,
    factor, tokens, inputs, rank, each,
    DROPS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute h = factor * (x * kept) @ a.T, or partial sums of it over the inputs, which the caller adds up.

    Program (tile, part) computes TOKENS × RANK elements from `each` steps of INPUTS inputs, and writes them to plane
    `part` of h [parts, tokens, rank]. RANK is the rank, padded to a power of two of at least 16.
    """
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
    dy_ptr, b_ptr, h_ptr, g_ptr, d_b_ptr,
    factor, tokens, outputs, rank, each,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of g = factor * dy @ b and of d_b = dy.T @ h, with one read of dy.

    Program (part, column) processes COLUMNS columns of dy, in `each` tiles of TOKENS tokens. It writes its tiles of g
    to plane `column` of [tiles of columns, tokens, rank]. It accumulates d_b over its tokens, and writes it to plane
    `part` of [parts, outputs, rank].
    """
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
    x_ptr, a_ptr, g_ptr, bits_ptr, d_x_ptr, d_a_ptr,
    tokens, inputs, rank, each,
    DROPS: tl.constexpr, ADDS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute partial sums of d_a = g.T @ (x * kept) and, if ADDS, d_x = (g @ a) * kept, with one read of x.

    Program (part, column) processes COLUMNS columns of x, in `each` tiles of TOKENS tokens. It writes its tiles of d_x.
    It accumulates d_a over its tokens, and writes it to plane `part` of [parts, rank, inputs].
    """
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
    left, weight, out,
    thin_ptr, low_ptr, bits_ptr,
    rows, columns, terms, rank,
    BACKWARD: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
    GROUP: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute out = left @ weight.T + thin @ low.T, or if BACKWARD out = left @ weight + (thin @ low) * kept.

    One program computes a tile of ROWS × COLUMNS outputs, in steps of TERMS terms. Tensor descriptors load `left` and
    `weight` and store `out`.
    """
    # Programs that run at the same time cover GROUP tiles of rows and as few tiles of columns as possible.
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
    # The adapter's part comes first: after the loop it would need registers in addition to those of the sums.
    total = tl.dot(thin, low, input_precision="ieee")
    if DROPS:
        kept = _kept(bits_ptr, row, first_column, columns, m < rows, COLUMNS)
        total = total * tl.reshape(kept.to(tl.float32), (ROWS, COLUMNS))
    for k in range(0, terms, TERMS):
        x = left.load([first_row, k])
        w = weight.load([k, first_column]) if BACKWARD else tl.trans(weight.load([first_column, k]))
        total = tl.dot(x, w, total, input_precision="ieee")
    out.store([first_row, first_column], total.to(thin_ptr.dtype.element_ty))
