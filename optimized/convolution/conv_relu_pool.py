"""Fused convolution, ReLU and max-pooling in Triton, with a custom backward (leak_cnn, technique 001.F4)."""

from typing import NamedTuple

import torch
from torch.nn import functional

from optimized.autocasting import as_autocast
from optimized.kernels import ceil_div, jit, launching, tl, use_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Tiles(NamedTuple):
    """Launch configuration of one kernel: its tile sizes, warps and pipeline stages.

    positions  pairs of rows, of one or several items
    outputs    output channels
    inputs     input channels
    """

    positions: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


class _Kernels(NamedTuple):
    """Launch configurations of the three tiled kernels for one dtype."""

    forward: _Tiles
    input_gradient: _Tiles
    weight_gradient: _Tiles


# Chosen by a sweep on an H200, for the best total time at the network's two sizes. A float32 product splits each
# operand into two TF32 halves and keeps both in registers, so twice the positions would spill.
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
# tl.dot needs at least 16 rows and 16 columns.
FEWEST = 16
# Approximate number of programs for the weight gradient; each sums over its own share of the positions. The split
# depends only on the sizes, not on the device, so the order of summation is the same on every GPU.
WEIGHT_PROGRAMS = 2 * 132
FINISH_BLOCK = 256
# Which row of a pair the gradient goes to: 0 is the even row, ODD the odd row, BLOCKED neither (the maximum is 0 or
# less, so ReLU passes no gradient).
ODD = tl.constexpr(1)
BLOCKED = tl.constexpr(2)


def conv_relu_pool(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return `max_pool(relu(conv(x)))`, [N, C', H // 2, W]: 3×3 convolution, padding 1, maximum of every two rows.

    If W is 1, the outer columns of the weight only meet padding. The convolution then uses the middle column alone, and
    the gradient of the outer columns is 0. (An outer weight that is not finite has no effect here; the reference may
    multiply it by the padding's zeros.)

    The Triton kernels run on CUDA for W = 1 in float32, bfloat16 or float16; any other input uses the vectorised form.
    The forward is one kernel, after a copy of the weight's middle column. If a gradient is needed, it also writes one
    byte per output value. The backward is one kernel for the input and two for weight and bias. It is deterministic and
    has no second derivative. The kernels accumulate in float32. They multiply float32 as cuDNN does: in TF32 if
    `torch.backends.cudnn.allow_tf32` is on, else with float32 accuracy. Under autocast both forms compute in its dtype,
    as the reference does.

    x       [N, C, H, W], H 2 or more; the result is channels-last if x is
    weight  [C', C, 3, 3]
    bias    [C']

    Source: leak_cnn, technique 001.F4, which expects 10–15% of an epoch.
    """
    x, weight, bias = as_autocast(x, weight, bias)
    served = use_triton(x, weight, bias, dtypes=DTYPES) and x.dtype == weight.dtype == bias.dtype
    return (conv_relu_pool_triton if served else conv_relu_pool_vectorised)(x, weight, bias)


def conv_relu_pool_vectorised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute `conv_relu_pool` with PyTorch operations, on any device and dtype.

    ReLU is monotonic, so it can follow the pooling: it then runs in place on half the values.
    """
    if x.shape[3] == 1:
        convolved = functional.conv2d(x, weight[..., 1:2], bias, padding=(1, 0))
    else:
        convolved = functional.conv2d(x, weight, bias, padding=1)
    return torch.relu_(functional.max_pool2d(convolved, (2, 1)))


def conv_relu_pool_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute `conv_relu_pool` with the Triton kernels if W is 1, else (or if a tensor is empty) in vectorised form."""
    if x.shape[3] != 1 or x.shape[2] < 2 or not (x.numel() and weight.numel()):
        return conv_relu_pool_vectorised(x, weight, bias)
    return _ConvReluPool.apply(x, weight, bias, torch.is_grad_enabled())


class _ConvReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, recording):
        N, C, H, _ = x.shape
        outputs, rows = weight.shape[0], H // 2
        # The weight's middle column, [3, C', C]. In place, each value would load a sector of its own.
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
    # If H is odd, the last row is not pooled, but the row above it uses it and gives it a gradient.
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
            # With so few channels, three TF32 products take longer than one float32 product on the CUDA cores.
            PRECISION=_precision(x, accurate="ieee"),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return d_x


def _weight_gradient(grad: torch.Tensor, taken: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    N, C, H, _ = x.shape
    outputs = taken.shape[1]
    tiles = _kernels(x).weight_gradient
    # If H is odd, the output at the last row has a gradient of 0. It is included because 0 × inf is NaN, as in the
    # reference, if an input next to it is not finite.
    block, items, count = _positions(tiles.positions, N, ceil_div(H, 2))
    of_outputs, of_inputs = _channels(tiles.outputs, outputs), _channels(tiles.inputs, C)
    tiles_out, tiles_in = ceil_div(outputs, of_outputs), ceil_div(C, of_inputs)
    length = max(1, ceil_div(count * tiles_out * tiles_in, WEIGHT_PROGRAMS))
    splits = ceil_div(count, length)
    # For each split: the gradient of the middle column, [3, C', C], then that of the bias, [C']. The splits are summed
    # in a fixed order, without atomics, so every run gives the same gradient.
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
    """Return (rows of an item in a tile, items in a tile, number of tiles); the rows are a power of two."""
    block = min(tile, _power(rows))
    items = tile // block
    return block, items, ceil_div(N, items) * ceil_div(rows, block)


def _channels(tile: int, channels: int) -> int:
    return min(tile, max(FEWEST, _power(channels)))


def _power(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _layout(x: torch.Tensor) -> torch.memory_format:
    """Return the memory format of x, which a convolution's result shares."""
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return torch.contiguous_format
    return torch.channels_last


def _precision(x: torch.Tensor, accurate: str = "tf32x3") -> str:
    """Return tl.dot's input precision for float32; "tf32x3" has float32 accuracy, since it drops less than 2^-22."""
    return "tf32" if x.is_cuda and torch.backends.cudnn.conv.fp32_precision == "tf32" else accurate


# In the kernels below a tile is [channels, positions]. A position is a pair of rows: position p of a tile is pair
# `p % BLOCK_ROWS` of item `p // BLOCK_ROWS`. The even and the odd rows of the pairs are separate tiles, so pooling
# needs no shuffle. A pair's convolution uses four rows of the input, 2 * row - 1 to 2 * row + 2, and loads each once.
# Triton coalesces loads along whichever dimension has stride 1.


@jit
def _where(tile, N, rows, BLOCK_ROWS: tl.constexpr, ITEMS: tl.constexpr):
    """Return (item, pair of rows, whether the item exists) for each position of a tile."""
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    p = tl.arange(0, ITEMS * BLOCK_ROWS)
    item = (tile // row_tiles) * ITEMS + p // BLOCK_ROWS
    row = (tile % row_tiles) * BLOCK_ROWS + p % BLOCK_ROWS
    return item.to(tl.int64), row, item < N


@jit
def _load_row(base, row, rows, stride, channel_live, item_live):
    """Load one row for each position, [channels, positions]; 0 outside the tensor."""
    live = item_live & (row >= 0) & (row < rows)
    return tl.load(base + row[None, :] * stride, mask=channel_live[:, None] & live[None, :], other=0.0)


@jit
def _load_taken(grad_base, taken_base, row, rows, grad_stride, taken_stride, channel_live, item_live):
    """Load the output's gradient and return the parts that go to the even and to the odd row of each pair."""
    live = channel_live[:, None] & (item_live & (row >= 0) & (row < rows))[None, :]
    grad = tl.load(grad_base + row[None, :] * grad_stride, mask=live, other=0.0)
    taken = tl.load(taken_base + row[None, :] * taken_stride, mask=live, other=BLOCKED)
    return tl.where(taken == 0, grad, 0.0).to(grad.dtype), tl.where(taken == ODD, grad, 0.0).to(grad.dtype)


@jit
def _forward_kernel(
    x_ptr, middle_ptr, bias_ptr, y_ptr, taken_ptr,
    N, C, H, outputs, x_item, x_channel, x_row, y_item, y_channel, y_row,
    BLOCK_ROWS: tl.constexpr, ITEMS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TAKEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y[n, o, r] = max(0, z[2 r], z[2 r + 1]), z[h] = bias[o] + sum over t, c of middle[t, o, c] x[n, c, h + t - 1].

    Program (i, j) computes tile i of the positions for OUTPUTS output channels from j * OUTPUTS. It loops over the
    input channels, INPUTS at a time. Each step loads four rows and computes six products: three taps for each row of a
    pair. With TAKEN, it also stores which row of each pair was the maximum.
    """
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
    # Round to the output's dtype before comparing, as a separate convolution does, so that ties are the same.
    even = (even + bias[:, None]).to(y_ptr.dtype.element_ty).to(tl.float32)
    odd = (odd + bias[:, None]).to(y_ptr.dtype.element_ty).to(tl.float32)
    # As in max_pool2d, the first of two equal rows wins, and the last NaN. `<=` is false for NaN, which ReLU passes on.
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
    grad_ptr, taken_ptr, middle_ptr, d_x_ptr,
    N, C, H, outputs, grad_item, grad_channel, grad_row, taken_item, taken_channel, taken_row, x_item, x_channel,
    x_row,
    BLOCK_ROWS: tl.constexpr, ITEMS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """d_x[n, c, h] = sum over t, o of middle[t, o, c] g[n, o, h + 1 - t], where g is the gradient before the pooling.

    Program (i, j) computes tile i of the positions for INPUTS input channels from j * INPUTS. It loops over the output
    channels, OUTPUTS at a time. g is never stored: it is the output's gradient at the row that was taken, 0 elsewhere.
    """
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
    grad_ptr, taken_ptr, x_ptr, partial_ptr,
    N, C, H, outputs, count, length, grad_item, grad_channel, grad_row, taken_item, taken_channel, taken_row, x_item,
    x_channel, x_row,
    BLOCK_ROWS: tl.constexpr, ITEMS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """d_middle[t, o, c] = sum over n, h of g[n, o, h] x[n, c, h + t - 1]; d_bias[o] = sum over n, h of g[n, o, h].

    Program (s, i, j) computes OUTPUTS x INPUTS entries of d_middle for all three taps. It sums over split s only: over
    `length` of the `count` tiles of positions. The partial sums are stored in row s of `partial`; those of d_bias by
    the programs with j = 0.
    """
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
        # A position just past the end (2 * row == H) would load the last row of x, and its gradient of 0 times an
        # infinite value is NaN.
        here = item_live & (2 * row < H)
        x0 = tl.trans(_load_row(base, 2 * row - 1, H, x_row, c < C, here))
        d0 = tl.dot(even, x0, d0, input_precision=PRECISION)
        x1 = tl.trans(_load_row(base, 2 * row, H, x_row, c < C, item_live))
        d1 = tl.dot(even, x1, d1, input_precision=PRECISION)
        if LAST:
            # If H is odd, the last pair has no odd row: mask its even row, which would be multiplied by 0 below.
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
    """Sum the splits' partial results, always in the same order: d_weight [C', C, 3, 3] and d_bias [C'].

    Each program computes BLOCK values of a row of `partial`. It stores 0 in the outer columns of d_weight.
    """
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
