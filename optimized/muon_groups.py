"""Products of many matrices of one shape, through the tensor memory accelerator of Hopper GPUs (ups, 002.8).

A launch serves one shape: its matrices lie one after another, so that one descriptor serves them all. The GPU then
copies whole blocks, without a thread that computes addresses.
"""

from typing import Any, NamedTuple

import torch

from optimized.kernels import ceil_div, jit, tl

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton: nothing here is called
    TensorDescriptor = None

# Tiles of a symmetric product and of another one, and how many terms of a sum are taken at a time; in half precision,
# columns and terms half as many in float32.
SQUARE, COLUMNS, DEPTH = 128, 256, 64
# Programs of the persistent kernel: one for each multiprocessor.
PROGRAMS = 132
# A tile has at least so many rows and columns.
LEAST_TILE = 16
# Iterations after which Gram matrices are computed anew.
RESTART = 3


class Square(NamedTuple):
    """Blocks of a symmetric matrix: those that are multiplied, and those that are written, or added."""

    rows: Any
    tiles: Any


class Group:
    """Matrices of one shape, [count, least, most], with at least as many columns as rows.

    x, other    the matrices, and room for as many; [count, least, most]
    gram        room for the product of each matrix with its transpose, [count, least, least]
    polynomial  room for the polynomial of each Gram matrix, [count, least, least]
    sums        [count, tiles] sums of squares, whose total is the square of a matrix's norm
    by_gram     whether the iteration is of Gram matrices, see `_by_gram`; the result is then in `x`, and else in
                `other`
    """

    def __init__(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        gram: torch.Tensor,
        polynomial: torch.Tensor,
        sums: torch.Tensor,
        *,
        by_gram: bool,
    ) -> None:
        self.sums, self.sums_padded = sums, 1 << (sums.shape[1] - 1).bit_length()
        count, self.least, self.most = x.shape
        wider = x.element_size() // 2
        self.tile, self.wide = _tile(self.least, SQUARE), _tile(self.most, COLUMNS // wider)
        self.depth = min(DEPTH // wider, self.tile)
        rows, columns = range(ceil_div(self.least, self.tile)), range(ceil_div(self.most, self.wide))
        self.upper, self.every = (
            torch.tensor(tiles, dtype=torch.int32).to(x.device)
            for tiles in (
                [(m, i, j) for m in range(count) for i in rows for j in rows if j >= i],
                [(m, i, j) for m in range(count) for i in rows for j in columns],
            )
        )
        self.x, self.other = self._described(x), self._described(other)
        self.by_gram = by_gram
        more = [torch.empty_like(gram) for _ in range(2)] if by_gram else []
        self.squares = [
            Square(_blocks(square, self.tile, self.depth), _blocks(square, self.tile, self.tile))
            for square in (gram, polynomial, *more)
        ]

    def _described(self, x: torch.Tensor) -> tuple[Any, Any, Any]:
        """The blocks of matrices that are read for a symmetric product, read for the other product, and written."""
        sizes = ((self.tile, self.depth), (self.depth, self.wide), (self.tile, self.wide))
        return _blocks(x, *sizes[0]), _blocks(x, *sizes[1]), _blocks(x, *sizes[2])

    def orthogonalize(self, coefficients: tuple[float, float, float], iterations: int) -> None:
        """Multiply each matrix x, divided by its norm, so often by a + b G + c G², where G = x xᵀ."""
        if self.by_gram:
            self._by_gram(coefficients, iterations)
            return
        gram, polynomial = self.squares
        now, after = self.x, self.other
        for number in range(iterations):
            self._gram(now, gram, scaled=number == 0)
            self._polynomial(gram, polynomial, coefficients)
            self._product(polynomial, now, after, scaled=number == 0)
            now, after = after, now

    def _by_gram(self, coefficients: tuple[float, float, float], iterations: int) -> None:
        """Iterate Gram matrices, and multiply the matrices themselves twice.

        With P = a + b G + c G² the next Gram matrix is P G P, and the product of all P so far is Q; all are symmetric,
        and commute. For matrices with more columns than rows this is less work. Rounding spoils G's smallest
        eigenvalues, which grow from iteration to iteration: after RESTART of them G is computed anew, from Q x.
        """
        now, after = self.x, self.other
        for first, end in ((0, RESTART), (RESTART, iterations)):
            gram, polynomial, spare, product = self.squares
            self._gram(now, gram, scaled=first == 0)
            for number in range(first, end):
                self._polynomial(gram, polynomial, coefficients)
                if number + 1 < end:
                    self._symmetric(polynomial.rows, gram.rows, spare.tiles, self.least)
                    self._symmetric(spare.rows, polynomial.rows, gram.tiles, self.least)
                if number == first:
                    polynomial, product = product, polynomial
                else:
                    self._symmetric(polynomial.rows, product.rows, spare.tiles, self.least)
                    spare, product = product, spare
            self._product(product, now, after, scaled=first == 0)
            now, after = after, now

    def _gram(self, x: tuple[Any, Any, Any], out: Square, *, scaled: bool) -> None:
        self._symmetric(x[0], x[0], out.tiles, self.most, scaled=scaled)

    def _polynomial(self, gram: Square, out: Square, coefficients: tuple[float, float, float]) -> None:
        a, b, c = coefficients
        self._symmetric(gram.rows, gram.rows, out.tiles, self.least, (c, b, a), gram.tiles)

    def _symmetric(
        self,
        left: Any,
        right: Any,
        out: Any,
        terms: int,
        factors: tuple[float, float, float] = (1.0, 0.0, 0.0),
        added: Any = None,
        *,
        scaled: bool = False,
    ) -> None:
        """Compute α · left rightᵀ + β · added + γ of each matrix, which is symmetric."""
        alpha, beta, gamma = factors
        _symmetric_kernel[(len(self.upper),)](
            self.upper,
            left,
            right,
            out if added is None else added,
            out,
            self.sums,
            self.sums.shape[1],
            alpha,
            beta,
            gamma,
            terms,
            TILE=self.tile,
            DEPTH=self.depth,
            SUMS=self.sums_padded if scaled else 0,
            ADDS=added is not None,
            num_warps=4,
            num_stages=3,
        )

    def _product(self, left: Square, x: tuple[Any, Any, Any], out: tuple[Any, Any, Any], *, scaled: bool) -> None:
        """Compute left · x of each matrix; scaled, x is divided by its norm."""
        programs = min(PROGRAMS, len(self.every))
        _product_kernel[(programs,)](
            self.every,
            len(self.every),
            left.rows,
            x[1],
            out[2],
            self.sums,
            self.sums.shape[1],
            self.least,
            TILE=self.tile,
            WIDE=self.wide,
            DEPTH=self.depth,
            SUMS=self.sums_padded if scaled else 0,
            PROGRAMS=programs,
            num_warps=8,
            num_stages=3,
        )


def _tile(size: int, largest: int) -> int:
    return min(largest, max(LEAST_TILE, 1 << (size - 1).bit_length()))


def _blocks(matrices: torch.Tensor, rows: int, columns: int) -> Any:
    """Describe matrices that are read or written in blocks of this size."""
    return TensorDescriptor.from_tensor(matrices, [1, rows, columns])


@jit
def scale_of(sums_ptr, matrix, sums_of_each, SUMS: tl.constexpr):
    """1 over the norm of a matrix, from the sums of squares of its tiles; SUMS is a power of 2, as many or more."""
    at = tl.arange(0, SUMS)
    sums = tl.load(sums_ptr + matrix * sums_of_each + at, mask=at < sums_of_each, other=0.0)
    return 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(sums, 0)), 1e-7)  # torch's eps


@jit
def _symmetric_kernel(
    tiles_ptr,
    left,
    right,
    added,
    out,
    sums_ptr,
    sums_of_each,
    alpha,
    beta,
    gamma,
    terms,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    SUMS: tl.constexpr,
    ADDS: tl.constexpr,
):
    tiles_ptr += tl.program_id(0) * 3
    matrix = tl.load(tiles_ptr)
    i = tl.load(tiles_ptr + 1) * TILE
    j = tl.load(tiles_ptr + 2) * TILE
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, terms, DEPTH):
        a = left.load([matrix, i, k]).reshape(TILE, DEPTH)
        b = right.load([matrix, j, k]).reshape(TILE, DEPTH)
        total = tl.dot(a, b.T, total, input_precision="ieee")
    if SUMS:
        scale = scale_of(sums_ptr, matrix, sums_of_each, SUMS)
        total = total * scale * scale
    total *= alpha
    if ADDS:
        total += beta * added.load([matrix, i, j]).reshape(TILE, TILE).to(tl.float32)
        diagonal = (i + tl.arange(0, TILE)[:, None]) == (j + tl.arange(0, TILE)[None, :])
        total += tl.where(diagonal, gamma, 0.0)
    result = total.to(out.dtype)
    out.store([matrix, i, j], result.reshape(1, TILE, TILE))
    if i != j:
        out.store([matrix, j, i], result.T.reshape(1, TILE, TILE))


@jit
def _product_kernel(
    tiles_ptr,
    count,
    left,
    right,
    out,
    sums_ptr,
    sums_of_each,
    terms,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    SUMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    for program in tl.range(tl.program_id(0), count, PROGRAMS, flatten=True):
        matrix = tl.load(tiles_ptr + 3 * program)
        i = tl.load(tiles_ptr + 3 * program + 1) * TILE
        j = tl.load(tiles_ptr + 3 * program + 2) * WIDE
        total = tl.zeros((TILE, WIDE), tl.float32)
        for k in range(0, terms, DEPTH):
            a = left.load([matrix, i, k]).reshape(TILE, DEPTH)
            b = right.load([matrix, k, j]).reshape(DEPTH, WIDE)
            total = tl.dot(a, b, total, input_precision="ieee")
        if SUMS:
            total *= scale_of(sums_ptr, matrix, sums_of_each, SUMS)
        out.store([matrix, i, j], total.to(out.dtype).reshape(1, TILE, WIDE))
