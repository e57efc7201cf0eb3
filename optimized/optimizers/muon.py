"""Muon over many matrices at once (ups, technique 002.8).

One kernel updates the momenta, one computes all products of the Newton–Schulz iteration, and one updates the
parameters. For a symmetric product only the tiles on one side of the diagonal are computed. Without the kernels, all
matrices of a shape are updated at once.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from optimized.addresses import Addresses
from optimized.kernels import INTERPRETED, ceil_div, jit, launching, tl, use_triton
from optimized.newton_schulz import NewtonSchulz, place_in_panels

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MOMENTUM = 0.95
EPS = 1e-7
# Rows and columns of a matrix that one program updates.
SQUARE = 64
# Rows of momenta are padded to a multiple of this number of elements, 32 bytes, for vector accesses.
PADDED_TO = 8


def muon(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    momentum: float = MOMENTUM,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> "TorchMuon | _TritonMuon":
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    Muon with Nesterov momentum and decoupled weight decay (Jordan, 2024), momenta starting at 0:
    `m += (1 - momentum) * (g - m)`; o is `g + momentum * (m - g)`, orthogonalized; `p *= 1 - lr * weight_decay`, then
    `p -= lr * sqrt(max(1, rows / columns)) * o`.

    If all parameters are float32 on one GPU, Triton kernels update them without a host synchronisation. All other
    parameters use `muon_torch`.

    params  matrices [rows, columns], changed in place
    dtype   dtype in which float32 matrices are orthogonalized; torch.optim.Muon uses bfloat16
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
    """Build `muon` with batched products of torch, on any device and dtype."""
    return TorchMuon(list(params), lr, momentum, weight_decay, dtype)


class TorchMuon:
    """Step of `muon_torch`, with its state."""

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
        """Return copies of the momenta, one for each matrix; the reference can load them, too."""
        return {"momenta": [m.clone() for m in self.momenta]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, by copying."""
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
    """Update matrices of one shape, dtype and device, and their momenta, in place.

    The other arguments are those of `muon`.
    """
    torch._foreach_lerp_(momenta, grads, 1 - momentum)
    update, own = torch.stack(torch._foreach_lerp(grads, momenta, momentum)), group[0].dtype
    update = orthogonalized(update.to(dtype) if own == torch.float32 else update)
    torch._foreach_mul_(group, 1 - lr * weight_decay)
    torch._foreach_add_(group, list(update.to(own)), alpha=-_rate(lr, group[0]))


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [count, rows, columns] with their singular values moved near 1, by five Newton–Schulz steps."""
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
    in_strips: bool = True,
) -> "_TritonMuon":
    """Build `muon` with Triton kernels for parameters of any shapes, which are float32 and on one device.

    in_strips  compute the products with `newton_schulz_strips`, which keeps operands in shared memory: on Hopper GPUs,
               in half precision, and if any matrix has more than 64 rows and columns
    """
    return _TritonMuon(list(params), lr, momentum, weight_decay, dtype, in_strips)


def places_by_shape(params: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the indices of the parameters with elements, grouped by shape, dtype and device."""
    places: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for i, p in enumerate(params):
        if p.numel():
            places.setdefault((p.shape, p.dtype, p.device), []).append(i)
    return list(places.values())


def _rate(lr: float, p: torch.Tensor) -> float:
    rows, columns = p.shape
    return lr * max(1.0, rows / columns) ** 0.5


class _TritonMuon:
    """Step of `muon_triton`, with its tables: one row for each matrix, or each program's matrix and tile."""

    def __init__(
        self,
        params: list[torch.Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
        in_strips: bool,
    ) -> None:
        self.params, self.momentum, self.decay = params, momentum, 1 - lr * weight_decay
        self.live = [i for i, p in enumerate(params) if p.numel()]
        if not self.live:
            return
        matrices = [params[i] for i in self.live]
        device, shapes = matrices[0].device, [tuple(p.shape) for p in matrices]
        wide = [(min(shape), max(shape)) for shape in shapes]
        self.count = len(shapes)

        def on_device(values: Sequence[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        per_matrix = [ceil_div(rows, SQUARE) * ceil_div(columns, SQUARE) for rows, columns in shapes]
        self.sums = torch.zeros(self.count, max(per_matrix), device=device)
        dtype = torch.float32 if INTERPRETED else dtype
        products = self.products = NewtonSchulz(wide, self.sums, COEFFICIENTS, ITERATIONS, dtype, in_strips)
        sizes = [rows * _padded(columns) for rows, columns in shapes]
        self.spans = dict(zip(self.live, itertools.accumulate([0, *sizes]), strict=False))
        self.momenta = torch.zeros(sum(sizes), device=device)
        # The products use wide matrices (rows <= columns), padded to whole tiles.
        is_tall = [rows > columns for rows, columns in shapes]
        padded = [sides[::-1] if tall else sides for sides, tall in zip(products.shapes, is_tall, strict=True)]
        self.shapes = on_device([n for pair in zip(shapes, padded, strict=True) for shape in pair for n in shape])
        places = [
            (self.spans[i], _padded(params[i].shape[1]), *(at[::-1] if tall else at))
            for i, tall, *at in zip(self.live, is_tall, products.places, products.transposed, strict=True)
        ]
        self.places, self.results = on_device([n for at in places for n in at]), on_device(products.results)
        self.rates = on_device([_rate(lr, p) for p in matrices], torch.float32)
        # Whether all rows of a parameter begin at multiples of 32 bytes, for vector accesses.
        in_vectors = [columns % PADDED_TO == 0 for _, columns in shapes]
        self.elements = [
            (_tiles(padded, SQUARE, device, [i for i, found in enumerate(in_vectors) if found == vectors]), vectors)
            for vectors in sorted(set(in_vectors))
        ]
        self.addresses = Addresses(device)

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad
        if not self.live:
            return
        # Keep both lists alive until the last launch, so that the memory of temporaries is not reused before it.
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
                    self.results,
                    self.products.room,
                    self.rates,
                    self.count,
                    self.decay,
                    TILE=SQUARE,
                    PANEL=self.products.panel,
                    ALIGNED=self.addresses.aligned and vectors,
                    num_warps=8,
                )
        for i, copy in zip(self.live, updated, strict=True):
            if copy is not self.params[i]:
                self.params[i].copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the momenta, one for each matrix; the reference can load them, too."""
        return {"momenta": [self._momentum(i).clone() for i in range(len(self.params))]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, by copying."""
        for i, given in zip(range(len(self.params)), state["momenta"], strict=True):
            self._momentum(i).copy_(given)

    def _momentum(self, i: int) -> torch.Tensor:
        """Return a view of a matrix's momentum."""
        p = self.params[i]
        if not p.numel():
            return torch.zeros_like(p)
        rows, columns = p.shape
        stride = _padded(columns)
        return self.momenta[self.spans[i] : self.spans[i] + rows * stride].view(rows, stride)[:, :columns]

    def _orthogonalize(self) -> None:
        """Update the momenta, and write the orthogonalized updates to `products.room`."""
        for tiles, vectors in self.elements:
            _momentum_kernel[(len(tiles),)](
                self.addresses.table,
                tiles,
                self.shapes,
                self.places,
                self.momenta,
                self.products.room,
                self.sums,
                self.sums.shape[1],
                self.momentum,
                1 - self.momentum,
                TILE=SQUARE,
                PANEL=self.products.panel,
                ALIGNED=self.addresses.aligned and vectors,
                num_warps=8,
            )
        self.products.run()


def _padded(size: int) -> int:
    return ceil_div(size, PADDED_TO) * PADDED_TO


def _tiles(shapes: Sequence[tuple[int, int]], tile: int, device: torch.device, only: Sequence[int]) -> torch.Tensor:
    """Return (matrix, row, column) of each tile of the matrices `only`, int32 [tiles, 3]."""
    found = [
        (matrix, i, j)
        for matrix in only
        for i in range(ceil_div(shapes[matrix][0], tile))
        for j in range(ceil_div(shapes[matrix][1], tile))
    ]
    return torch.tensor(found, dtype=torch.int32).to(device)


@jit
def _tile_of(tiles_ptr, shapes_ptr):
    """Return this program's matrix, the row and column of its tile, and the padded shape of the matrix."""
    tiles_ptr += tl.program_id(0) * 3
    matrix = tl.load(tiles_ptr)
    rows = tl.multiple_of(tl.load(shapes_ptr + 4 * matrix + 2).to(tl.int32), 32)
    columns = tl.multiple_of(tl.load(shapes_ptr + 4 * matrix + 3).to(tl.int32), 32)
    return matrix, tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2), rows, columns


@jit
def _shape_of(matrix, shapes_ptr, ALIGNED: tl.constexpr):
    """Return the shape of a parameter."""
    rows = tl.load(shapes_ptr + 4 * matrix).to(tl.int32)
    columns = tl.load(shapes_ptr + 4 * matrix + 1).to(tl.int32)
    if ALIGNED:
        columns = tl.multiple_of(columns, 8)
    return rows, columns


@jit
def _elements_of(i, j, rows, columns, TILE: tl.constexpr):
    """Return the rows, columns and mask of a tile's elements."""
    row = i * TILE + tl.arange(0, TILE)[:, None]
    column = j * TILE + tl.arange(0, TILE)[None, :]
    return row, column, (row < rows) & (column < columns)


@jit
def _momentum_kernel(
    addresses_ptr, tiles_ptr, shapes_ptr, places_ptr, momenta_ptr, x_ptr, sums_ptr,
    sums_of_each, momentum, one_minus_momentum,
    TILE: tl.constexpr, PANEL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute m += (1 - momentum) * (g - m), and update = g + momentum * (m - g), the input of the products.

    A program computes one [TILE, TILE] tile of one matrix. It stores m, the sum of update^2 over the tile, and the
    update in panels, rounded: as it is, transposed, or both.
    """
    matrix, i, j, rows, columns = _tile_of(tiles_ptr, shapes_ptr)
    own_rows, own_columns = _shape_of(matrix, shapes_ptr, ALIGNED)
    places_ptr += 4 * matrix
    momenta_ptr += tl.multiple_of(tl.load(places_ptr), 8)
    g_ptr = tl.load(addresses_ptr + matrix).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    row, column, mask = _elements_of(i, j, rows, columns, TILE)
    # Write the padding of x, too: after gradients that are not finite it may hold values other than 0.
    inside = (row < own_rows) & (column < own_columns)
    g = tl.load(g_ptr + row * own_columns + column, mask=inside, other=0.0)
    at = row * tl.multiple_of(tl.load(places_ptr + 1), 8) + column
    m = tl.load(momenta_ptr + at, mask=inside, other=0.0)
    m += one_minus_momentum * (g - m)
    update = g + momentum * (m - g)
    tl.store(momenta_ptr + at, m, mask=inside)
    number = i * tl.cdiv(own_columns, TILE) + j
    total = tl.sum(tl.sum(update * update, 1), 0)
    tl.store(sums_ptr + matrix * sums_of_each + number, total, mask=(i * TILE < own_rows) & (j * TILE < own_columns))
    rounded = update.to(x_ptr.dtype.element_ty)
    own, transposed = tl.load(places_ptr + 2), tl.load(places_ptr + 3)
    if own >= 0:
        tl.store(x_ptr + own * PANEL + place_in_panels(row, column, rows, PANEL), rounded, mask=mask)
    if transposed >= 0:
        row, column, mask = _elements_of(j, i, columns, rows, TILE)
        place = place_in_panels(row, column, columns, PANEL)
        tl.store(x_ptr + transposed * PANEL + place, tl.trans(rounded), mask=mask)


@jit
def _update_kernel(
    addresses_ptr, tiles_ptr, shapes_ptr, results_ptr, x_ptr, rates_ptr,
    count, decay,
    TILE: tl.constexpr, PANEL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute p = decay * p - rate * update, with the result of the products as the update.

    A program computes one [TILE, TILE] tile of one matrix. The result is stored in panels; that of a tall matrix is
    transposed.
    """
    matrix, i, j, rows, columns = _tile_of(tiles_ptr, shapes_ptr)
    own_rows, own_columns = _shape_of(matrix, shapes_ptr, ALIGNED)
    x_ptr += tl.load(results_ptr + matrix) * PANEL
    p_ptr = tl.load(addresses_ptr + count + matrix).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        p_ptr = tl.multiple_of(p_ptr, 16)
    row, column, mask = _elements_of(i, j, rows, columns, TILE)
    if own_rows > own_columns:
        x_row, x_column, in_x = _elements_of(j, i, columns, rows, TILE)
        place = place_in_panels(x_row, x_column, columns, PANEL)
        update = tl.trans(tl.load(x_ptr + place, mask=in_x, other=0.0))
    else:
        update = tl.load(x_ptr + place_in_panels(row, column, rows, PANEL), mask=mask, other=0.0)
    at = row * own_columns + column
    mask = (row < own_rows) & (column < own_columns)
    p = tl.load(p_ptr + at, mask=mask)
    tl.store(p_ptr + at, p * decay - tl.load(rates_ptr + matrix) * update.to(tl.float32), mask=mask)
