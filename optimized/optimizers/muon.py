"""Muon over all matrices of a shape at once (ups, technique 002.8).

The Newton–Schulz iteration multiplies a matrix by its transpose, and a symmetric matrix by itself: of both products
only the tiles on one side of the diagonal are computed.
"""

from collections.abc import Callable, Sequence

import torch

from optimized.addresses import Addresses
from optimized.kernels import INTERPRETED, ceil_div, jit, launching, tl, use_triton

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7
# Elements of a matrix that one program updates.
BLOCK = 2048
# Of the products: the largest tile, and how many terms of its sums are taken at a time.
LARGEST_TILE, DEPTH = 128, 64
# A product's tile has at least so many rows and columns.
LEAST_TILE = 16
NUM_WARPS, NUM_STAGES = 8, 3


def muon(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    momentum: float = 0.95,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[Sequence[torch.Tensor]], None]:
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    Muon with Nesterov momentum and decoupled weight decay (Jordan, 2024), momenta starting at 0:
    `m += (1 - momentum) * (g - m)`; of `g + momentum * (m - g)` the orthogonalized matrix o is taken;
    `p *= 1 - lr * weight_decay`, then `p -= lr * sqrt(max(1, rows / columns)) * o`.

    float32 parameters on CUDA take Triton kernels, without a host synchronisation. Everything else takes
    `muon_torch`.

    params  matrices [rows, columns], changed in place
    dtype   what float32 matrices are orthogonalized in; torch.optim.Muon does so in bfloat16
    grads   one for each parameter, of its shape

    Source: ups, technique 002.8.
    """
    params = list(params)
    if params and use_triton(*params):
        return muon_triton(params, lr, momentum, weight_decay, dtype)
    return muon_torch(params, lr, momentum, weight_decay, dtype)


def muon_torch(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    momentum: float = 0.95,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[Sequence[torch.Tensor]], None]:
    """`muon` by batched products of torch's, on any device and dtype."""
    params = list(params)
    groups = [[params[i] for i in at] for at in _by_shape(params)]
    momenta = [[torch.zeros_like(p) for p in group] for group in groups]
    places = _by_shape(params)

    @torch.no_grad()
    def step(grads: Sequence[torch.Tensor]) -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        for group, held, at in zip(groups, momenta, places, strict=True):
            given = [grads[i] for i in at]
            torch._foreach_lerp_(held, given, 1 - momentum)
            update, own = torch.stack(torch._foreach_lerp(given, held, momentum)), group[0].dtype
            update = orthogonalized(update.to(dtype) if own == torch.float32 else update)
            torch._foreach_mul_(group, 1 - lr * weight_decay)
            torch._foreach_add_(group, list(update.to(own)), alpha=-_rate(lr, group[0]))

    return step


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Each of the matrices [count, rows, columns] with singular values near 1, by five steps of a Newton–Schulz
    iteration."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = wide(matrices)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def muon_triton(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    momentum: float = 0.95,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[Sequence[torch.Tensor]], None]:
    """`muon` by Triton kernels for the float32 parameters of one device."""
    params = list(params)
    places = _by_shape(params)
    groups = [_Group([params[i] for i in at], lr, momentum, weight_decay, dtype) for at in places]

    @torch.no_grad()
    def step(grads: Sequence[torch.Tensor]) -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        for group, at in zip(groups, places, strict=True):
            group.step([grads[i] for i in at])

    return step


def _by_shape(params: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of the parameters with elements, together with those of the same shape."""
    places: dict[torch.Size, list[int]] = {}
    for i, p in enumerate(params):
        if p.numel():
            places.setdefault(p.shape, []).append(i)
    return list(places.values())


def _rate(lr: float, p: torch.Tensor) -> float:
    rows, columns = p.shape
    return lr * max(1.0, rows / columns) ** 0.5


class _Group:
    """The parameters of one shape, with their momenta and the memory of the iteration."""

    def __init__(self, params: list[torch.Tensor], lr: float, momentum: float, weight_decay: float, dtype: torch.dtype):
        self.params, self.rate, self.momentum = params, _rate(lr, params[0]), momentum
        self.decay = 1 - lr * weight_decay
        count, (rows, columns), device = len(params), params[0].shape, params[0].device
        self.momenta = torch.zeros(count, rows, columns, device=device)
        self.addresses = Addresses(device)
        dtype = torch.float32 if INTERPRETED else dtype
        self.x, self.next_x = (torch.empty(count, rows, columns, dtype=dtype, device=device) for _ in range(2))
        least = min(rows, columns)
        self.gram, self.polynomial = (torch.empty(count, least, least, dtype=dtype, device=device) for _ in range(2))
        self.squares = torch.empty(count, ceil_div(rows * columns, BLOCK), device=device)

    def step(self, grads: list[torch.Tensor]) -> None:
        # Held until the last launch, so that no temporary's memory is reused before.
        dense = [grad.contiguous() for grad in grads]
        updated = [p.contiguous() for p in self.params]
        self.addresses.send([*dense, *updated])
        count, blocks = self.squares.shape
        size = self.momenta[0].numel()
        with launching(self.momenta):
            _momentum_kernel[(blocks, count)](
                self.addresses.table,
                self.momenta,
                self.x,
                self.squares,
                size,
                self.momentum,
                1 - self.momentum,
                BLOCK=BLOCK,
                ALIGNED=self.addresses.aligned and size % BLOCK == 0,
                num_warps=8,
            )
            result = self._orthogonalized()
            _update_kernel[(blocks, count)](
                self.addresses.table,
                result,
                count,
                size,
                self.decay,
                self.rate,
                BLOCK=BLOCK,
                ALIGNED=self.addresses.aligned and size % BLOCK == 0,
                num_warps=8,
            )
        for p, copy in zip(self.params, updated, strict=True):
            if copy is not p and copy.data_ptr() != p.data_ptr():
                p.copy_(copy)

    def _orthogonalized(self) -> torch.Tensor:
        scale = 1 / self.squares.sum(1).sqrt_().clamp_(min=EPS)
        a, b, c = COEFFICIENTS
        x, following = self.x, self.next_x
        for number in range(ITERATIONS):
            by = scale if number == 0 else None
            symmetric_product(wide(x), self.gram, scale=by)
            symmetric_product(self.gram, self.polynomial, alpha=c, beta=b)
            product_and_sum(self.polynomial, wide(x), wide(following), beta=a, scale=by)
            x, following = following, x
        return x


def wide(matrices: torch.Tensor) -> torch.Tensor:
    """The matrices, or their transposes if they have more rows than columns."""
    return matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices


def _tile(rows: int) -> int:
    return min(LARGEST_TILE, max(LEAST_TILE, 1 << (rows - 1).bit_length()))


def symmetric_product(
    x: torch.Tensor, out: torch.Tensor, *, scale: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
) -> None:
    """out = alpha · (s x) (s x)ᵀ + beta · x for each matrix, s being its scale; with a beta, x must be symmetric.

    x      [count, rows, columns]
    out    [count, rows, rows], contiguous
    scale  [count] float32, or None for 1
    """
    count, rows, columns = x.shape
    tile = _tile(rows)
    tiles = ceil_div(rows, tile)
    _symmetric_kernel[(tiles * (tiles + 1) // 2, count)](
        x,
        out,
        x if scale is None else scale,
        rows,
        columns,
        *x.stride(),
        alpha,
        beta,
        TILE=tile,
        DEPTH=DEPTH,
        SCALED=scale is not None,
        ADDS=beta != 0.0,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def product_and_sum(
    p: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *, beta: float, scale: torch.Tensor | None = None
) -> None:
    """out = s · (p x + beta · x) for each matrix, s being its scale.

    p      [count, rows, rows], contiguous
    x      [count, rows, columns]
    out    as x, with the same strides
    scale  [count] float32, or None for 1
    """
    count, rows, columns = x.shape
    tile = _tile(rows)
    _product_kernel[(ceil_div(rows, tile) * ceil_div(columns, tile), count)](
        p,
        x,
        out,
        x if scale is None else scale,
        rows,
        columns,
        *x.stride(),
        beta,
        TILE=tile,
        DEPTH=DEPTH,
        SCALED=scale is not None,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


@jit
def _momentum_kernel(
    addresses_ptr,
    momenta_ptr,
    x_ptr,
    squares_ptr,
    size,
    momentum,
    one_minus_momentum,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    matrix = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A mask would split the vector accesses: whole blocks go without.
    mask = None if ALIGNED else at < size
    g_ptr = tl.load(addresses_ptr + matrix).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    first = matrix.to(tl.int64) * size
    g = tl.load(g_ptr + at, mask=mask, other=None if ALIGNED else 0.0)
    m = tl.load(momenta_ptr + first + at, mask=mask, other=None if ALIGNED else 0.0)
    m += one_minus_momentum * (g - m)
    update = g + momentum * (m - g)
    tl.store(momenta_ptr + first + at, m, mask=mask)
    tl.store(x_ptr + first + at, update.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(squares_ptr + matrix * tl.num_programs(0) + tl.program_id(0), tl.sum(update * update, 0))


@jit
def _update_kernel(addresses_ptr, x_ptr, count, size, decay, rate, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    matrix = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = None if ALIGNED else at < size
    p_ptr = tl.load(addresses_ptr + count + matrix).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        p_ptr = tl.multiple_of(p_ptr, 16)
    p = tl.load(p_ptr + at, mask=mask)
    update = tl.load(x_ptr + matrix.to(tl.int64) * size + at, mask=mask).to(tl.float32)
    tl.store(p_ptr + at, p * decay - rate * update, mask=mask)


@jit
def _symmetric_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    rows,
    columns,
    stride_matrix,
    stride_row,
    stride_column,
    alpha,
    beta,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALED: tl.constexpr,
    ADDS: tl.constexpr,
):
    # Tiles (i, j) with i ≤ j, in the order (0, 0), (0, 1), (1, 1), (0, 2), …
    number = tl.program_id(0)
    j = ((tl.sqrt(8.0 * number + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = number - j * (j + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    x_ptr += matrix * stride_matrix
    out_ptr += matrix * rows * rows
    at_i = i * TILE + tl.arange(0, TILE)
    at_j = j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    left = x_ptr + at_i[:, None] * stride_row + depth[None, :] * stride_column
    right = x_ptr + at_j[None, :] * stride_row + depth[:, None] * stride_column
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, columns, DEPTH):
        inside = depth < columns - k
        a = tl.load(left, mask=(at_i[:, None] < rows) & inside[None, :], other=0.0)
        b = tl.load(right, mask=(at_j[None, :] < rows) & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += DEPTH * stride_column
        right += DEPTH * stride_column
    if SCALED:
        scale = tl.load(scale_ptr + matrix)
        total = total * scale * scale
    total *= alpha
    place = at_i[:, None] * rows + at_j[None, :]
    mask = (at_i[:, None] < rows) & (at_j[None, :] < rows)
    if ADDS:
        total += beta * tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, result, mask=mask)
    if i != j:
        tl.store(out_ptr + at_j[:, None] * rows + at_i[None, :], tl.trans(result), mask=tl.trans(mask))


@jit
def _product_kernel(
    p_ptr,
    x_ptr,
    out_ptr,
    scale_ptr,
    rows,
    columns,
    stride_matrix,
    stride_row,
    stride_column,
    beta,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    SCALED: tl.constexpr,
):
    across = tl.cdiv(columns, TILE)
    i = tl.program_id(0) // across
    j = tl.program_id(0) % across
    matrix = tl.program_id(1).to(tl.int64)
    p_ptr += matrix * rows * rows
    x_ptr += matrix * stride_matrix
    out_ptr += matrix * stride_matrix
    at_i = i * TILE + tl.arange(0, TILE)
    at_j = j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    left = p_ptr + at_i[:, None] * rows + depth[None, :]
    right = x_ptr + depth[:, None] * stride_row + at_j[None, :] * stride_column
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, rows, DEPTH):
        inside = depth < rows - k
        a = tl.load(left, mask=(at_i[:, None] < rows) & inside[None, :], other=0.0)
        b = tl.load(right, mask=inside[:, None] & (at_j[None, :] < columns), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += DEPTH
        right += DEPTH * stride_row
    place = at_i[:, None] * stride_row + at_j[None, :] * stride_column
    mask = (at_i[:, None] < rows) & (at_j[None, :] < columns)
    total += beta * tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        total *= tl.load(scale_ptr + matrix)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)
