"""Muon over all matrices of a shape at once (ups, technique 002.8).

The Newton–Schulz iteration multiplies a matrix by its transpose, and a symmetric matrix by itself: of both products
only the tiles on one side of the diagonal are computed. Where matrices are much wider than high, or the reverse, and
many, their Gram matrices are iterated.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from optimized.addresses import Addresses
from optimized.kernels import INTERPRETED, ceil_div, has_descriptors, jit, launching, tl, use_triton
from optimized.muon_groups import Group, scale_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.95
EPS = 1e-7
# Matrices of one shape with so many tiles in all have launches of their own.
LEAST_TILES = 1000
# From so many times as many columns as rows on, or the reverse, Gram matrices are iterated.
GRAM_FROM = 2
# One program updates so many rows and columns of a matrix.
SQUARE = 64
# Matrices begin at multiples of so many elements.
VECTOR = 16
# Rows and columns are padded with zeros to multiples of so many: 16 bytes in half precision, for vector accesses.
PADDED_TO = 8
# Of the products: the largest tile, and how many terms of its sums are taken at a time.
LARGEST_TILE, DEPTH = 128, 64
# A product's tile has at least so many rows and columns.
LEAST_TILE = 16
NUM_WARPS, NUM_STAGES = 8, 3


def muon(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    momentum: float = MOMENTUM,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> "TorchMuon | _TritonMuon":
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
    momentum: float = MOMENTUM,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> "TorchMuon":
    """`muon` by batched products of torch's, on any device and dtype."""
    return TorchMuon(list(params), lr, momentum, weight_decay, dtype)


class TorchMuon:
    """The step of `muon_torch`, and its state."""

    def __init__(
        self, params: list[torch.Tensor], lr: float, momentum: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        self.params, self.dtype = params, dtype
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.places = places_by_shape(params)
        self.momenta = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad
        for at in self.places:
            group, held, given = ([tensors[i] for i in at] for tensors in (self.params, self.momenta, grads))
            momentum_step(group, held, given, self.lr, self.momentum, self.weight_decay, self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the momenta, one for each matrix; the reference reads them, too."""
        return {"momenta": [m.clone() for m in self.momenta]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on a state, by copying."""
        for own, given in zip(self.momenta, state["momenta"], strict=True):
            own.copy_(given)


def momentum_step(
    group: list[torch.Tensor],
    momenta: list[torch.Tensor],
    grads: list[torch.Tensor],
    lr: float,
    momentum: float,
    weight_decay: float,
    dtype: torch.dtype,
) -> None:
    """Step matrices of one shape, which are changed in place, as their momenta are; arguments as `muon`'s."""
    torch._foreach_lerp_(momenta, grads, 1 - momentum)
    update, own = torch.stack(torch._foreach_lerp(grads, momenta, momentum)), group[0].dtype
    update = orthogonalized(update.to(dtype) if own == torch.float32 else update)
    torch._foreach_mul_(group, 1 - lr * weight_decay)
    torch._foreach_add_(group, list(update.to(own)), alpha=-_rate(lr, group[0]))


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Each of the matrices [count, rows, columns] with singular values near 1, by five steps of a Newton–Schulz
    iteration."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def muon_triton(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    momentum: float = MOMENTUM,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
    least_tiles: int = LEAST_TILES,
) -> "_TritonMuon":
    """`muon` by Triton kernels for the float32 parameters of one device, whatever their shapes.

    least_tiles  tiles of the matrices of one shape from which on they have launches of their own, by descriptors of
                 tensors; these need a Hopper GPU
    """
    return _TritonMuon(list(params), lr, momentum, weight_decay, dtype, least_tiles)


def places_by_shape(params: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of the parameters with elements, together with those of the same shape."""
    places: dict[torch.Size, list[int]] = {}
    for i, p in enumerate(params):
        if p.numel():
            places.setdefault(p.shape, []).append(i)
    return list(places.values())


def _rate(lr: float, p: torch.Tensor) -> float:
    rows, columns = p.shape
    return lr * max(1.0, rows / columns) ** 0.5


class _TritonMuon:
    """The step, with its tables: of each matrix, and of each program's matrix and tile."""

    def __init__(
        self,
        params: list[torch.Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
        least_tiles: int,
    ) -> None:
        self.params, self.momentum, self.decay = params, momentum, 1 - lr * weight_decay
        # Matrices of one shape, or transposed of it, lie one after another.
        live = [i for i, p in enumerate(params) if p.numel()]
        self.live = sorted(live, key=lambda i: sorted(_padded(n) for n in params[i].shape))
        if not self.live:
            return
        matrices = [params[i] for i in self.live]
        device, shapes = matrices[0].device, [tuple(p.shape) for p in matrices]
        padded = [(_padded(rows), _padded(columns)) for rows, columns in shapes]
        least = [min(shape) for shape in padded]
        most = [max(shape) for shape in padded]
        self.count = len(shapes)
        self.tile = min(LARGEST_TILE, max(LEAST_TILE, 1 << (max(least) - 1).bit_length()))

        def on_device(values: Sequence[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        sizes = [n * m for n, m in zip(least, most, strict=True)]
        squares = [n * n for n in least]
        self.shapes = on_device([n for shape in zip(shapes, padded, strict=True) for pair in shape for n in pair])
        # Each matrix begins at a multiple of what a vector access reads.
        places, total = _places(sizes)
        self.spans = dict(zip(self.live, places, strict=True))
        places_of_squares, total_of_squares = _places(squares)
        self.first, self.first_of_squares = on_device(places), on_device(places_of_squares)
        self.rates = on_device([_rate(lr, p) for p in matrices], torch.float32)
        dtype = torch.float32 if INTERPRETED else dtype
        self.momenta = torch.zeros(total, device=device)
        both = torch.empty(2, total, dtype=dtype, device=device)
        self.x, self.next_x = both
        self.results = both.view(-1)
        self.gram, self.polynomial = (torch.empty(total_of_squares, dtype=dtype, device=device) for _ in range(2))
        # A parameter's own rows begin at multiples of 16 bytes or they do not.
        in_vectors = [columns % PADDED_TO == 0 for _, columns in shapes]
        self.elements = [
            (_tiles(padded, SQUARE, device, [i for i, found in enumerate(in_vectors) if found == vectors]), vectors)
            for vectors in sorted(set(in_vectors))
        ]
        per_matrix = [ceil_div(rows, SQUARE) * ceil_div(columns, SQUARE) for rows, columns in padded]
        self.sums = torch.zeros(self.count, max(per_matrix), device=device)
        self.sums_padded = 1 << (max(per_matrix) - 1).bit_length()
        self.addresses = Addresses(device)
        grouped = self._grouped(list(zip(least, most, strict=True)), least_tiles)
        self.groups = [self._group(at, least[at[0]], most[at[0]], places, places_of_squares) for at in grouped]
        by_gram = {i for at, group in zip(grouped, self.groups, strict=True) if group.by_gram for i in at}
        self.first_of_results = on_device([p if i in by_gram else p + total for i, p in enumerate(places)])
        rest = sorted(set(range(self.count)) - {matrix for at in grouped for matrix in at})
        self.products = _tiles(list(zip(least, most, strict=True)), self.tile, device, rest)
        self.symmetric = _tiles([(n, n) for n in least], self.tile, device, rest, upper=True)

    def _grouped(self, shapes: list[tuple[int, int]], least_tiles: int) -> list[range]:
        """Choose the matrices that have launches of their own: those of one shape lie one after another."""
        fits = has_descriptors(self.x)
        found, end = [], 0
        for (rows, columns), matrices in itertools.groupby(shapes):
            first, end = end, end + len(list(matrices))
            if fits and (end - first) * ceil_div(rows, LARGEST_TILE) * ceil_div(columns, LARGEST_TILE) >= least_tiles:
                found.append(range(first, end))
        return found

    def _group(self, at: range, rows: int, columns: int, places: list[int], squares: list[int]) -> Group:
        """The products of matrices of one shape, which follow each other without a gap."""

        def of(buffer: torch.Tensor, place: int, width: int) -> torch.Tensor:
            return buffer[place : place + len(at) * rows * width].view(len(at), rows, width)

        x, other = of(self.x, places[at[0]], columns), of(self.next_x, places[at[0]], columns)
        gram, polynomial = of(self.gram, squares[at[0]], rows), of(self.polynomial, squares[at[0]], rows)
        sums = self.sums[at[0] : at[-1] + 1]
        return Group(x, other, gram, polynomial, sums, by_gram=columns >= GRAM_FROM * rows)

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad
        if not self.live:
            return
        # Held until the last launch, so that no temporary's memory is reused before.
        dense = [grads[i].contiguous() for i in self.live]
        updated = [self.params[i].contiguous() for i in self.live]
        self.addresses.send([*dense, *updated])
        with launching(self.momenta):
            self._orthogonalize()
            for tiles, vectors in self.elements:
                _update_kernel[(len(tiles),)](
                    self.addresses.table,
                    tiles,
                    self.shapes,
                    self.first_of_results,
                    self.results,
                    self.rates,
                    self.count,
                    self.decay,
                    TILE=SQUARE,
                    ALIGNED=self.addresses.aligned and vectors,
                    num_warps=8,
                )
        for i, copy in zip(self.live, updated, strict=True):
            if copy is not self.params[i]:
                self.params[i].copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the momenta, one for each matrix; the reference reads them, too."""
        return {"momenta": [self._momentum(i).clone() for i in range(len(self.params))]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take on a state, by copying."""
        for i, given in enumerate(state["momenta"]):
            self._momentum(i).copy_(given)

    def _momentum(self, i: int) -> torch.Tensor:
        """A view of a matrix's momentum."""
        p = self.params[i]
        if not p.numel():
            return torch.zeros_like(p)
        rows, columns = p.shape
        stride = _padded(columns)
        return self.momenta[self.spans[i] : self.spans[i] + rows * stride].view(rows, stride)[:, :columns]

    def _orthogonalize(self) -> None:
        """Update the momenta, and leave in `results` what they are orthogonalized to."""
        for tiles, vectors in self.elements:
            _momentum_kernel[(len(tiles),)](
                self.addresses.table,
                tiles,
                self.shapes,
                self.first,
                self.momenta,
                self.x,
                self.sums,
                self.sums.shape[1],
                self.momentum,
                1 - self.momentum,
                TILE=SQUARE,
                ALIGNED=self.addresses.aligned and vectors,
                num_warps=8,
            )
        a, b, c = COEFFICIENTS
        for group in self.groups:
            group.orthogonalize(COEFFICIENTS, ITERATIONS)
        if not len(self.symmetric):
            return
        now, after = self.x, self.next_x
        for number in range(ITERATIONS):  # an odd number, so that the last results are in `next_x`
            self._symmetric(now, self.gram, scaled=number == 0)
            self._symmetric(self.gram, self.polynomial, alpha=c, beta=b)
            self._product(now, after, beta=a, scaled=number == 0)
            now, after = after, now

    def _symmetric(
        self, x: torch.Tensor, out: torch.Tensor, *, alpha: float = 1.0, beta: float = 0.0, scaled: bool = False
    ) -> None:
        """Compute out = alpha · (s x) (s x)ᵀ + beta · x for each matrix; with a beta, x is symmetric.

        s is 1 over the matrix's norm if it is scaled, and else 1.
        """
        squares = beta != 0.0
        _symmetric_kernel[(len(self.symmetric),)](
            self.symmetric,
            self.shapes,
            self.first_of_squares if squares else self.first,
            self.first_of_squares,
            x,
            out,
            self.sums,
            self.sums.shape[1],
            alpha,
            beta,
            TILE=self.tile,
            DEPTH=DEPTH,
            SUMS=self.sums_padded if scaled else 0,
            SQUARES=squares,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )

    def _product(self, x: torch.Tensor, out: torch.Tensor, *, beta: float, scaled: bool) -> None:
        """Compute out = s · (polynomial x + beta · x) for each matrix; s as in `_symmetric`."""
        _product_kernel[(len(self.products),)](
            self.products,
            self.shapes,
            self.first,
            self.first_of_squares,
            self.polynomial,
            x,
            out,
            self.sums,
            self.sums.shape[1],
            beta,
            TILE=self.tile,
            DEPTH=DEPTH,
            SUMS=self.sums_padded if scaled else 0,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each matrix begins, and where the last one ends: at multiples of VECTOR elements."""
    places, total = [], 0
    for size in sizes:
        places.append(total)
        total += ceil_div(size, VECTOR) * VECTOR
    return places, total


def _padded(size: int) -> int:
    return ceil_div(size, PADDED_TO) * PADDED_TO


def _tiles(
    shapes: Sequence[tuple[int, int]],
    tile: int,
    device: torch.device,
    only: Iterable[int] | None = None,
    *,
    upper: bool = False,
) -> torch.Tensor:
    """(matrix, row, column) of each tile, int32, of all matrices or of some; `upper` leaves out those below the
    diagonal."""
    found = [
        (matrix, i, j)
        for matrix in (range(len(shapes)) if only is None else only)
        for rows, columns in [shapes[matrix]]
        for i in range(ceil_div(rows, tile))
        for j in range(i if upper else 0, ceil_div(columns, tile))
    ]
    return torch.tensor(found, dtype=torch.int32).to(device)


@jit
def _tile_of(tiles_ptr, shapes_ptr):
    """This program's matrix, its tile's row and column, and the matrix's padded shape."""
    tiles_ptr += tl.program_id(0) * 3
    matrix = tl.load(tiles_ptr)
    rows = tl.multiple_of(tl.load(shapes_ptr + 4 * matrix + 2).to(tl.int32), 8)
    columns = tl.multiple_of(tl.load(shapes_ptr + 4 * matrix + 3).to(tl.int32), 8)
    return matrix, tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2), rows, columns


@jit
def _shape_of(matrix, shapes_ptr, ALIGNED: tl.constexpr):
    """The shape of a parameter."""
    rows = tl.load(shapes_ptr + 4 * matrix).to(tl.int32)
    columns = tl.load(shapes_ptr + 4 * matrix + 1).to(tl.int32)
    if ALIGNED:
        columns = tl.multiple_of(columns, 8)
    return rows, columns


@jit
def _elements_of(i, j, rows, columns, TILE: tl.constexpr):
    """Rows, columns and mask of the elements of a tile."""
    row = i * TILE + tl.arange(0, TILE)[:, None]
    column = j * TILE + tl.arange(0, TILE)[None, :]
    return row, column, (row < rows) & (column < columns)


@jit
def _momentum_kernel(
    addresses_ptr,
    tiles_ptr,
    shapes_ptr,
    first_ptr,
    momenta_ptr,
    x_ptr,
    sums_ptr,
    sums_of_each,
    momentum,
    one_minus_momentum,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    matrix, i, j, rows, columns = _tile_of(tiles_ptr, shapes_ptr)
    own_rows, own_columns = _shape_of(matrix, shapes_ptr, ALIGNED)
    first = tl.multiple_of(tl.load(first_ptr + matrix), 16)
    g_ptr = tl.load(addresses_ptr + matrix).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    row, column, mask = _elements_of(i, j, rows, columns, TILE)
    # x's padding is written, too: gradients that are not finite have left other values than 0 there.
    g = tl.load(g_ptr + row * own_columns + column, mask=(row < own_rows) & (column < own_columns), other=0.0)
    at = row * columns + column
    m = tl.load(momenta_ptr + first + at, mask=mask, other=0.0)
    m += one_minus_momentum * (g - m)
    update = g + momentum * (m - g)
    tl.store(momenta_ptr + first + at, m, mask=mask)
    place = i * tl.cdiv(columns, TILE) + j
    tl.store(sums_ptr + matrix * sums_of_each + place, tl.sum(tl.sum(update * update, 1), 0))
    # x is wide: a matrix with more rows than columns is transposed.
    rounded = update.to(x_ptr.dtype.element_ty)
    if rows > columns:
        tl.store(x_ptr + first + tl.trans(column) * rows + tl.trans(row), tl.trans(rounded), mask=tl.trans(mask))
    else:
        tl.store(x_ptr + first + at, rounded, mask=mask)


@jit
def _update_kernel(
    addresses_ptr,
    tiles_ptr,
    shapes_ptr,
    first_ptr,
    x_ptr,
    rates_ptr,
    count,
    decay,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    matrix, i, j, rows, columns = _tile_of(tiles_ptr, shapes_ptr)
    own_rows, own_columns = _shape_of(matrix, shapes_ptr, ALIGNED)
    first = tl.multiple_of(tl.load(first_ptr + matrix), 16)
    p_ptr = tl.load(addresses_ptr + count + matrix).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        p_ptr = tl.multiple_of(p_ptr, 16)
    row, column, mask = _elements_of(i, j, rows, columns, TILE)
    if rows > columns:
        update = tl.trans(
            tl.load(x_ptr + first + tl.trans(column) * rows + tl.trans(row), mask=tl.trans(mask), other=0.0)
        )
    else:
        update = tl.load(x_ptr + first + row * columns + column, mask=mask, other=0.0)
    at = row * own_columns + column
    mask = (row < own_rows) & (column < own_columns)
    p = tl.load(p_ptr + at, mask=mask)
    tl.store(p_ptr + at, p * decay - tl.load(rates_ptr + matrix) * update.to(tl.float32), mask=mask)


@jit
def _symmetric_kernel(
    tiles_ptr,
    shapes_ptr,
    first_ptr,
    first_out_ptr,
    x_ptr,
    out_ptr,
    sums_ptr,
    sums_of_each,
    alpha,
    beta,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    SUMS: tl.constexpr,
    SQUARES: tl.constexpr,
):
    matrix, i, j, one, other = _tile_of(tiles_ptr, shapes_ptr)
    rows = tl.multiple_of(tl.minimum(one, other), 8)
    columns = rows if SQUARES else tl.multiple_of(tl.maximum(one, other), 8)
    x_ptr += tl.multiple_of(tl.load(first_ptr + matrix), 16)
    out_ptr += tl.multiple_of(tl.load(first_out_ptr + matrix), 16)
    at_i = i * TILE + tl.arange(0, TILE)
    at_j = j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    left = x_ptr + at_i[:, None] * columns + depth[None, :]
    right = x_ptr + at_j[None, :] * columns + depth[:, None]
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, columns, DEPTH):
        inside = depth < columns - k
        a = tl.load(left + k, mask=(at_i[:, None] < rows) & inside[None, :], other=0.0)
        b = tl.load(right + k, mask=(at_j[None, :] < rows) & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if SUMS:
        scale = scale_of(sums_ptr, matrix, sums_of_each, SUMS)
        total = total * scale * scale
    total *= alpha
    place = at_i[:, None] * rows + at_j[None, :]
    mask = (at_i[:, None] < rows) & (at_j[None, :] < rows)
    if SQUARES:
        total += beta * tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    result = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, result, mask=mask)
    if i != j:
        tl.store(out_ptr + at_j[:, None] * rows + at_i[None, :], tl.trans(result), mask=tl.trans(mask))


@jit
def _product_kernel(
    tiles_ptr,
    shapes_ptr,
    first_ptr,
    first_p_ptr,
    p_ptr,
    x_ptr,
    out_ptr,
    sums_ptr,
    sums_of_each,
    beta,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    SUMS: tl.constexpr,
):
    matrix, i, j, one, other = _tile_of(tiles_ptr, shapes_ptr)
    rows, columns = tl.multiple_of(tl.minimum(one, other), 8), tl.multiple_of(tl.maximum(one, other), 8)
    first = tl.multiple_of(tl.load(first_ptr + matrix), 16)
    p_ptr += tl.multiple_of(tl.load(first_p_ptr + matrix), 16)
    x_ptr += first
    out_ptr += first
    at_i = i * TILE + tl.arange(0, TILE)
    at_j = j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    left = p_ptr + at_i[:, None] * rows + depth[None, :]
    right = x_ptr + depth[:, None] * columns + at_j[None, :]
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, rows, DEPTH):
        inside = depth < rows - k
        a = tl.load(left + k, mask=(at_i[:, None] < rows) & inside[None, :], other=0.0)
        b = tl.load(right + k * columns, mask=inside[:, None] & (at_j[None, :] < columns), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = at_i[:, None] * columns + at_j[None, :]
    mask = (at_i[:, None] < rows) & (at_j[None, :] < columns)
    total += beta * tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if SUMS:
        total *= scale_of(sums_ptr, matrix, sums_of_each, SUMS)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)
