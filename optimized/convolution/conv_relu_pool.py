"""Convolution, ReLU and max-pooling in one kernel, with its own backward (leak_cnn, technique 001.F4)."""

from typing import NamedTuple

import torch
from torch.nn import functional

from optimized.autocasting import as_autocast
from optimized.kernels import ceil_div, jit, launching, tl, use_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Tiles(NamedTuple):
    """A program's tile, in positions (pooled rows of some items) and channels; its warps and pipeline stages."""

    positions: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


class _Kernels(NamedTuple):
    forward: _Tiles
    input_gradient: _Tiles
    weight_gradient: _Tiles


# The best together at the network's two sizes, swept on an H200. A product of float32 keeps both halves of its
# operands, so that twice the positions would spill registers.
FLOAT32 = _Kernels(
    forward=_Tiles(positions=32, outputs=64, inputs=16, num_warps=4, num_stages=1),
    input_gradient=_Tiles(positions=64, outputs=32, inputs=32, num_warps=8, num_stages=1),
    weight_gradient=_Tiles(positions=32, outputs=64, inputs=32, num_warps=8, num_stages=1),
)
HALF = _Kernels(
    forward=_Tiles(positions=64, outputs=64, inputs=64, num_warps=4, num_stages=2),
    input_gradient=_Tiles(positions=64, outputs=32, inputs=64, num_warps=4, num_stages=2),
    weight_gradient=_Tiles(positions=64, outputs=64, inputs=32, num_warps=8, num_stages=2),
)
# The fewest rows and columns that a dot takes.
FEWEST = 16
# About as many programs for the weights' gradient, whatever the sizes: each adds up its positions alone. The split
# depends on the sizes alone, so that the order of summation is the same on every device.
WEIGHT_PROGRAMS = 2 * 132
FINISH_BLOCK = 256
# Which row a pooled position took: the even one, the odd one, or none, where the maximum is not above 0 and has no
# gradient.
ODD = tl.constexpr(1)
BLOCKED = tl.constexpr(2)


def conv_relu_pool(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`max_pool(relu(conv(x)))`: convolution 3×3 with padding 1, the larger of every two rows; [N, C', H // 2, W].

    With a single column the kernel's outer columns see only padding. So the convolution along H uses the middle column
    alone, and the outer ones' gradient is 0. (An outer weight that is not finite has no effect, where the reference may
    multiply it by the padding's zeros.)

    One column on CUDA in float32, bfloat16 or float16 takes the Triton kernels: one forward (after a copy of the
    weights' middle column), which beside the result writes a byte a value where a gradient is wanted; in the backward
    one for the input and two for weight and bias, deterministic. They add up in float32, and multiply float32 as
    cuDNN would: in TF32 where `torch.backends.cudnn.allow_tf32` is on, else to float32's accuracy. They have no
    second derivative. All else takes the vectorised form. Under autocast both work in its dtype, as the reference
    does.

    x       [N, C, H, W], H 2 or more; the result is channels-last where x is
    weight  [C', C, 3, 3]
    bias    [C']

    Source: leak_cnn, technique 001.F4, which expects 10–15% of an epoch.
    """
    x, weight, bias = as_autocast(x, weight, bias)
    served = use_triton(x, weight, bias, dtypes=DTYPES) and x.dtype == weight.dtype == bias.dtype
    return (conv_relu_pool_triton if served else conv_relu_pool_vectorised)(x, weight, bias)


def conv_relu_pool_vectorised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`conv_relu_pool` in PyTorch operations, on any device and dtype.

    ReLU keeps the order, so that it may come after the pooling: in place, on half the values.
    """
    if x.shape[3] == 1:
        convolved = functional.conv2d(x, weight[..., 1:2], bias, padding=(1, 0))
    else:
        convolved = functional.conv2d(x, weight, bias, padding=1)
    return torch.relu_(functional.max_pool2d(convolved, (2, 1)))


def conv_relu_pool_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`conv_relu_pool` by the Triton kernels, of one column; of more, or of none, the vectorised form."""
    if x.shape[3] != 1 or x.shape[2] < 2 or not (x.numel() and weight.numel()):
        return conv_relu_pool_vectorised(x, weight, bias)
    return _ConvReluPool.apply(x, weight, bias, torch.is_grad_enabled())


class _ConvReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, recording):
        N, C, H, _ = x.shape
        outputs, rows = weight.shape[0], H // 2
        # The middle column, [3, C', C]: read where it lies, each value would cost a sector of its own.
        middle = weight[..., 1].permute(2, 0, 1).contiguous()
        bias = bias.contiguous()
        layout = _layout(x)
        y = torch.empty((N, outputs, rows, 1), dtype=x.dtype, device=x.device, memory_format=layout)
        needed = recording and any(ctx.needs_input_grad)
        taken = torch.empty_like(y, dtype=torch.uint8) if needed else y
        tiles = _kernels(x).forward
        block, items, grid = _positions(tiles.positions, N, rows)
        of_outputs = _channels(tiles.outputs, outputs)
        with launching(x):
            _forward_kernel[(grid, ceil_div(outputs, of_outputs))](
                x,
                middle,
                bias,
                y,
                taken,
                N,
                C,
                H,
                outputs,
                *x.stride()[:3],
                *y.stride()[:3],
                BLOCK_ROWS=block,
                ITEMS=items,
                OUTPUTS=of_outputs,
                INPUTS=_channels(tiles.inputs, C),
                TAKEN=needed,
                PRECISION=_precision(x),
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )
        if needed:
            ctx.save_for_backward(x, middle, taken)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, middle, taken = ctx.saved_tensors
        x_needed, weight_needed, bias_needed, _ = ctx.needs_input_grad
        d_x = _input_gradient(grad, taken, middle, x) if x_needed else None
        d_weight = d_bias = None
        if weight_needed or bias_needed:
            d_weight, d_bias = _weight_gradient(grad, taken, x)
        return d_x, d_weight if weight_needed else None, d_bias if bias_needed else None, None


def _input_gradient(grad: torch.Tensor, taken: torch.Tensor, middle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    N, C, H, _ = x.shape
    outputs = taken.shape[1]
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=_layout(x))
    tiles = _kernels(x).input_gradient
    # An odd last row is not pooled, but its neighbour saw it.
    block, items, grid = _positions(tiles.positions, N, ceil_div(H, 2))
    of_inputs = _channels(tiles.inputs, C)
    with launching(x):
        _input_gradient_kernel[(grid, ceil_div(C, of_inputs))](
            grad,
            taken,
            middle,
            d_x,
            N,
            C,
            H,
            outputs,
            *grad.stride()[:3],
            *taken.stride()[:3],
            *d_x.stride()[:3],
            BLOCK_ROWS=block,
            ITEMS=items,
            OUTPUTS=_channels(tiles.outputs, outputs),
            INPUTS=of_inputs,
            # With so few channels the tensor cores' three products take longer than the plain one.
            PRECISION=_precision(x, accurate="ieee"),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return d_x


def _weight_gradient(grad: torch.Tensor, taken: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    N, C, H, _ = x.shape
    outputs = taken.shape[1]
    tiles = _kernels(x).weight_gradient
    # An odd last row has a gradient of 0, which leaves no trace unless its neighbours are not finite.
    block, items, count = _positions(tiles.positions, N, ceil_div(H, 2))
    of_outputs, of_inputs = _channels(tiles.outputs, outputs), _channels(tiles.inputs, C)
    tiles_out, tiles_in = ceil_div(outputs, of_outputs), ceil_div(C, of_inputs)
    length = max(1, ceil_div(count * tiles_out * tiles_in, WEIGHT_PROGRAMS))
    splits = ceil_div(count, length)
    # For each split: the middle column's gradient [3, C', C], then the bias'. Summed in a fixed order, with no atomics:
    # the gradient is the same at every run.
    partial = torch.empty((splits, (3 * C + 1) * outputs), dtype=torch.float32, device=x.device)
    d_weight = torch.empty((outputs, C, 3, 3), dtype=x.dtype, device=x.device)
    d_bias = torch.empty(outputs, dtype=x.dtype, device=x.device)
    with launching(x):
        _weight_gradient_kernel[(splits, tiles_out, tiles_in)](
            grad,
            taken,
            x,
            partial,
            N,
            C,
            H,
            outputs,
            count,
            length,
            *grad.stride()[:3],
            *taken.stride()[:3],
            *x.stride()[:3],
            BLOCK_ROWS=block,
            ITEMS=items,
            OUTPUTS=of_outputs,
            INPUTS=of_inputs,
            LAST=H % 2 == 1,
            PRECISION=_precision(x),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        _finish_kernel[(ceil_div(partial.shape[1], FINISH_BLOCK),)](
            partial, d_weight, d_bias, splits, C, outputs, BLOCK=FINISH_BLOCK, num_warps=4
        )
    return d_weight, d_bias


def _kernels(x: torch.Tensor) -> _Kernels:
    return FLOAT32 if x.dtype == torch.float32 else HALF


def _positions(tile: int, N: int, rows: int) -> tuple[int, int, int]:
    """(rows of an item in a tile, items in a tile, tiles): the rows a power of two, that indices stay aligned."""
    block = min(tile, _power(rows))
    items = tile // block
    return block, items, ceil_div(N, items) * ceil_div(rows, block)


def _channels(tile: int, channels: int) -> int:
    return min(tile, max(FEWEST, _power(channels)))


def _power(n: int) -> int:
    """The smallest power of two that is n or more."""
    return 1 << (n - 1).bit_length()


def _layout(x: torch.Tensor) -> torch.memory_format:
    """Return the memory format that a convolution's result has: that of its input."""
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return torch.contiguous_format
    return torch.channels_last


def _precision(x: torch.Tensor, accurate: str = "tf32x3") -> str:
    """Return the precision of a float32 product. Three TF32 products drop less than 2^-22: float32's accuracy."""
    return "tf32" if x.is_cuda and torch.backends.cudnn.conv.fp32_precision == "tf32" else accurate


# In what follows a tile is [channels, positions]: position p of it is row `p % BLOCK_ROWS` of item `p // BLOCK_ROWS`,
# counted in pairs of rows. Rows of a pair are kept apart (even, odd), so that nothing is shuffled to pool them; of the
# four rows that a pair's convolution sees each is read once. Triton reads along whichever dimension has stride 1.


@jit
def _where(tile, N, rows, BLOCK_ROWS: tl.constexpr, ITEMS: tl.constexpr):
    """(item, row, whether the item is there) of each position of a tile."""
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    p = tl.arange(0, ITEMS * BLOCK_ROWS)
    item = (tile // row_tiles) * ITEMS + p // BLOCK_ROWS
    row = (tile % row_tiles) * BLOCK_ROWS + p % BLOCK_ROWS
    return item.to(tl.int64), row, item < N


@jit
def _load_row(base, row, rows, stride, channel_live, item_live):
    """A row of every item, 0 where there is none: [channels, positions]."""
    live = item_live & (row >= 0) & (row < rows)
    return tl.load(base + row[None, :] * stride, mask=channel_live[:, None] & live[None, :], other=0.0)


@jit
def _load_taken(grad_base, taken_base, row, rows, grad_stride, taken_stride, channel_live, item_live):
    """The gradient that reaches a pair's even row, and its odd one."""
    live = channel_live[:, None] & (item_live & (row >= 0) & (row < rows))[None, :]
    grad = tl.load(grad_base + row[None, :] * grad_stride, mask=live, other=0.0)
    taken = tl.load(taken_base + row[None, :] * taken_stride, mask=live, other=BLOCKED)
    return tl.where(taken == 0, grad, 0.0).to(grad.dtype), tl.where(taken == ODD, grad, 0.0).to(grad.dtype)


@jit
def _forward_kernel(
    x_ptr,
    middle_ptr,
    bias_ptr,
    y_ptr,
    taken_ptr,
    N,
    C,
    H,
    outputs,
    x_item,
    x_channel,
    x_row,
    y_item,
    y_channel,
    y_row,
    BLOCK_ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    TAKEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = H // 2
    item, row, item_live = _where(tl.program_id(0), N, rows, BLOCK_ROWS, ITEMS)
    out = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    out_live = out < outputs
    even = tl.zeros((OUTPUTS, ITEMS * BLOCK_ROWS), dtype=tl.float32)
    odd = tl.zeros((OUTPUTS, ITEMS * BLOCK_ROWS), dtype=tl.float32)
    for start in range(0, C, INPUTS):
        c = start + tl.arange(0, INPUTS)
        base = x_ptr + item[None, :] * x_item + c[:, None] * x_channel
        x0 = _load_row(base, 2 * row - 1, H, x_row, c < C, item_live)
        x1 = _load_row(base, 2 * row, H, x_row, c < C, item_live)
        x2 = _load_row(base, 2 * row + 1, H, x_row, c < C, item_live)
        x3 = _load_row(base, 2 * row + 2, H, x_row, c < C, item_live)
        mask = out_live[:, None] & (c < C)[None, :]
        at = middle_ptr + out[:, None] * C + c[None, :]
        w = tl.load(at, mask=mask, other=0.0)
        even = tl.dot(w, x0, even, input_precision=PRECISION)
        odd = tl.dot(w, x1, odd, input_precision=PRECISION)
        w = tl.load(at + outputs * C, mask=mask, other=0.0)
        even = tl.dot(w, x1, even, input_precision=PRECISION)
        odd = tl.dot(w, x2, odd, input_precision=PRECISION)
        w = tl.load(at + 2 * outputs * C, mask=mask, other=0.0)
        even = tl.dot(w, x2, even, input_precision=PRECISION)
        odd = tl.dot(w, x3, odd, input_precision=PRECISION)
    bias = tl.load(bias_ptr + out, mask=out_live, other=0.0).to(tl.float32)
    # Rounded as the convolution's result would be, so that ties are the same.
    even = (even + bias[:, None]).to(y_ptr.dtype.element_ty).to(tl.float32)
    odd = (odd + bias[:, None]).to(y_ptr.dtype.element_ty).to(tl.float32)
    # The first of equals, but the last NaN; and NaN is not below 0.
    second = (odd > even) | (odd != odd)
    top = tl.where(second, odd, even)
    blocked = top <= 0
    mask = out_live[:, None] & (item_live & (row < rows))[None, :]
    at = item[None, :] * y_item + out[:, None] * y_channel + row[None, :] * y_row
    tl.store(y_ptr + at, tl.where(blocked, 0.0, top).to(y_ptr.dtype.element_ty), mask=mask)
    if TAKEN:
        tl.store(taken_ptr + at, tl.where(blocked, BLOCKED, tl.where(second, ODD, 0)).to(tl.uint8), mask=mask)


@jit
def _input_gradient_kernel(
    grad_ptr,
    taken_ptr,
    middle_ptr,
    d_x_ptr,
    N,
    C,
    H,
    outputs,
    grad_item,
    grad_channel,
    grad_row,
    taken_item,
    taken_channel,
    taken_row,
    x_item,
    x_channel,
    x_row,
    BLOCK_ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The same convolution of the gradient, with the weights turned round."""
    rows = H // 2
    item, row, item_live = _where(tl.program_id(0), N, (H + 1) // 2, BLOCK_ROWS, ITEMS)
    c = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    even = tl.zeros((INPUTS, ITEMS * BLOCK_ROWS), dtype=tl.float32)
    odd = tl.zeros((INPUTS, ITEMS * BLOCK_ROWS), dtype=tl.float32)
    for start in range(0, outputs, OUTPUTS):
        out = start + tl.arange(0, OUTPUTS)
        out_live = out < outputs
        grads = grad_ptr + item[None, :] * grad_item + out[:, None] * grad_channel
        takens = taken_ptr + item[None, :] * taken_item + out[:, None] * taken_channel
        _, g0 = _load_taken(grads, takens, row - 1, rows, grad_row, taken_row, out_live, item_live)
        g1, g2 = _load_taken(grads, takens, row, rows, grad_row, taken_row, out_live, item_live)
        g3, _ = _load_taken(grads, takens, row + 1, rows, grad_row, taken_row, out_live, item_live)
        mask = (c < C)[:, None] & out_live[None, :]
        at = middle_ptr + out[None, :] * C + c[:, None]
        w = tl.load(at + 2 * outputs * C, mask=mask, other=0.0)
        even = tl.dot(w, g0, even, input_precision=PRECISION)
        odd = tl.dot(w, g1, odd, input_precision=PRECISION)
        w = tl.load(at + outputs * C, mask=mask, other=0.0)
        even = tl.dot(w, g1, even, input_precision=PRECISION)
        odd = tl.dot(w, g2, odd, input_precision=PRECISION)
        w = tl.load(at, mask=mask, other=0.0)
        even = tl.dot(w, g2, even, input_precision=PRECISION)
        odd = tl.dot(w, g3, odd, input_precision=PRECISION)
    at = d_x_ptr + item[None, :] * x_item + c[:, None] * x_channel + 2 * row[None, :] * x_row
    mask = (c < C)[:, None] & item_live[None, :]
    tl.store(at, even.to(d_x_ptr.dtype.element_ty), mask=mask & (2 * row < H)[None, :])
    tl.store(at + x_row, odd.to(d_x_ptr.dtype.element_ty), mask=mask & (2 * row + 1 < H)[None, :])


@jit
def _weight_gradient_kernel(
    grad_ptr,
    taken_ptr,
    x_ptr,
    partial_ptr,
    N,
    C,
    H,
    outputs,
    count,
    length,
    grad_item,
    grad_channel,
    grad_row,
    taken_item,
    taken_channel,
    taken_row,
    x_item,
    x_channel,
    x_row,
    BLOCK_ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A split's own sums over its `length` tiles of the `count` there are."""
    rows = H // 2
    split = tl.program_id(0)
    out = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    c = tl.program_id(2) * INPUTS + tl.arange(0, INPUTS)
    out_live = out < outputs
    d0 = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    d1 = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    d2 = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    d_bias = tl.zeros((OUTPUTS, ITEMS * BLOCK_ROWS), dtype=tl.float32)
    for tile in range(split * length, min((split + 1) * length, count)):
        item, row, item_live = _where(tile, N, (H + 1) // 2, BLOCK_ROWS, ITEMS)
        grads = grad_ptr + item[None, :] * grad_item + out[:, None] * grad_channel
        takens = taken_ptr + item[None, :] * taken_item + out[:, None] * taken_channel
        even, odd = _load_taken(grads, takens, row, rows, grad_row, taken_row, out_live, item_live)
        d_bias += even.to(tl.float32) + odd.to(tl.float32)
        base = x_ptr + item[None, :] * x_item + c[:, None] * x_channel
        # The row after the last has neighbours too, and what is not finite would not vanish in its gradient of 0.
        here = item_live & (2 * row < H)
        x0 = tl.trans(_load_row(base, 2 * row - 1, H, x_row, c < C, here))
        d0 = tl.dot(even, x0, d0, input_precision=PRECISION)
        x1 = tl.trans(_load_row(base, 2 * row, H, x_row, c < C, item_live))
        d1 = tl.dot(even, x1, d1, input_precision=PRECISION)
        if LAST:
            # Below an odd last row there is none whose neighbour above it could be.
            x1 = tl.where((2 * row + 1 < H)[:, None], x1, 0.0).to(x1.dtype)
        d0 = tl.dot(odd, x1, d0, input_precision=PRECISION)
        x2 = tl.trans(_load_row(base, 2 * row + 1, H, x_row, c < C, item_live))
        d1 = tl.dot(odd, x2, d1, input_precision=PRECISION)
        d2 = tl.dot(even, x2, d2, input_precision=PRECISION)
        x3 = tl.trans(_load_row(base, 2 * row + 2, H, x_row, c < C, item_live))
        d2 = tl.dot(odd, x3, d2, input_precision=PRECISION)
    size = outputs * C
    partial = partial_ptr + split.to(tl.int64) * (3 * size + outputs)
    at = partial + out[:, None] * C + c[None, :]
    mask = out_live[:, None] & (c < C)[None, :]
    tl.store(at, d0, mask=mask)
    tl.store(at + size, d1, mask=mask)
    tl.store(at + 2 * size, d2, mask=mask)
    if tl.program_id(2) == 0:
        tl.store(partial + 3 * size + out, tl.sum(d_bias, axis=1), mask=out_live)


@jit
def _finish_kernel(partial_ptr, d_weight_ptr, d_bias_ptr, splits, C, outputs, BLOCK: tl.constexpr):
    """The splits' sum; the weights' outer columns have none."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = outputs * C
    width = 3 * size + outputs
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(splits):
        total += tl.load(partial_ptr + at, mask=at < width, other=0.0)
        partial_ptr += width
    of_weight = at < 3 * size
    tap = at // size
    to = d_weight_ptr + (at % size) * 9 + tap * 3
    value = total.to(d_weight_ptr.dtype.element_ty)
    tl.store(to, tl.zeros_like(value), mask=of_weight)
    tl.store(to + 1, value, mask=of_weight)
    tl.store(to + 2, tl.zeros_like(value), mask=of_weight)
    tl.store(d_bias_ptr + (at - 3 * size), value, mask=(at >= 3 * size) & (at < width))
