"""Newton–Schulz iteration of many matrices in one launch (ups, technique 002.8).

Programs take tiles from one list, in order. Before a program computes a tile, it waits until the tiles that this one
depends on are done. Those are earlier in the list, so some program can always proceed.

A matrix is stored as panels, one after another, each in row-major order. A row of a panel has 128 bytes. Matrices
are padded with zeros to whole tiles, in both directions. A product computes left · rightᵀ, so that it loads blocks of
adjacent rows of both operands. One tensor descriptor is then enough for all matrices, whatever their shapes. The right
operand is therefore stored transposed.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import torch

from optimized import newton_schulz_strips as strips
from optimized.kernels import INTERPRETED, ceil_div, has_descriptors, jit, launching, tl

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None

# Number of programs. More than can run at once do no harm. The interpreter runs programs one after another.
PROGRAMS = 1 if INTERPRETED else 264
# Rows and columns of the largest tile.
LARGEST_TILE = 128
# In half precision, where two programs fit on a multiprocessor.
NUM_WARPS, NUM_STAGES = 4, 3
PANEL_BYTES = 128
# From this ratio of columns to rows on, the Gram matrix is iterated instead of x, which is less work.
GRAM_FROM = 2
# The Gram matrix is recomputed after this number of iterations: the rounding errors of its smallest eigenvalues grow
# with each iteration. After three, the error in bfloat16 is up to 100 times that of iterating x itself; after two it is
# the same.
RESTART = 2
# The buffers of a matrix. X holds x. X_T and OTHER_T hold its transpose and the Gram matrix, and swap roles. The others
# hold polynomials of the Gram matrix; SPARE and FACTOR are used only where the Gram matrix is iterated.
X, X_T, OTHER_T, POLYNOMIAL, SPARE, FACTOR = range(6)
BUFFERS = FACTOR + 1
NOTHING = -1
# int32 fields of a task, of which 14 are used. `_iterate_kernel` uses the same stride, as a literal.
FIELDS = 16


class Step(NamedTuple):
    """A product α · left rightᵀ + β · added + γ I for all tiles of a matrix. Operands and results are buffer numbers.

    For a symmetric product, only the tiles on one side of the diagonal are computed, and each is also stored mirrored.
    For any other product, the transpose of the result is also stored in the buffer `mirrored`, unless that is NOTHING.

    factors  (α, β, γ)
    is_gram  both operands are the matrix itself
    scaled   the matrix is divided by its norm
    """

    is_symmetric: bool
    left: int
    right: int
    out: int
    mirrored: int = NOTHING
    added: int = NOTHING
    factors: tuple[float, float, float] = (1.0, 0.0, 0.0)
    is_gram: bool = False
    scaled: bool = False


def steps_of(
    coefficients: tuple[float, float, float], iterations: int, restart: int, transposing: bool = True
) -> Iterator[Step]:
    """Yield the steps that multiply x / |x| by P = a I + b G + c G², where G = x xᵀ, `iterations` times.

    x itself is multiplied only once in every `restart` iterations. The Gram matrix after a multiplication is P G P, and
    F is the product of all P so far. These matrices are symmetric and commute. After `restart` iterations, x is
    multiplied by F, and G is computed again.

    transposing  the transpose of x is stored too, as the right operand of the product F x. Otherwise x itself is the
                 right operand, and the result takes the place of G
    """
    a, b, c = coefficients
    x, transposed, gram = X, X_T, OTHER_T if transposing else X_T
    for first in range(0, iterations, restart):
        end, scaled = min(first + restart, iterations), first == 0
        polynomial, spare, factor = POLYNOMIAL, SPARE, FACTOR
        yield _symmetric(x, x, gram)._replace(is_gram=True, scaled=scaled)
        for number in range(first, end):
            yield _symmetric(gram, gram, polynomial)._replace(added=gram, factors=(c, b, a))
            if number + 1 < end:
                yield _symmetric(polynomial, gram, spare)
                yield _symmetric(spare, polynomial, gram)
            if number == first:
                polynomial, factor = factor, polynomial
            else:
                yield _symmetric(polynomial, factor, spare)
                spare, factor = factor, spare
        if transposing:
            yield Step(False, factor, transposed, X, gram if end < iterations else NOTHING, scaled=scaled)
            transposed, gram = gram, transposed
        else:
            yield Step(False, factor, x, gram, scaled=scaled)
            x, gram = gram, x


def _symmetric(left: int, right: int, out: int) -> Step:
    return Step(True, left, right, out, out)


class NewtonSchulz:
    """The iteration of wide matrices with given shapes.

    shapes     (rows, columns) of each matrix, with at most as many rows as columns
    sums       float32 [matrices, n]; the sum of row i is the squared norm of matrix i
    in_strips  use `newton_schulz_strips`, if it supports these matrices

    `room` holds all buffers, as rows of `panel` columns. Matrix i, padded with zeros, begins at row `places[i]`. Its
    transpose begins at row `transposed[i]`, unless that is NOTHING. After `run`, its result begins at row `results[i]`.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        sums: torch.Tensor,
        coefficients: tuple[float, float, float],
        iterations: int,
        dtype: torch.dtype,
        in_strips: bool = False,
    ) -> None:
        device = sums.device
        self.panel = PANEL_BYTES // dtype.itemsize
        self.tile = min(LARGEST_TILE, max(self.panel, 1 << (max(rows for rows, _ in shapes) - 1).bit_length()))
        self.shapes = [tuple(ceil_div(n, self.tile) * self.tile for n in shape) for shape in shapes]
        in_strips = in_strips and strips.serves(device, dtype, self.tile)
        forms = [tuple(steps_of(coefficients, iterations, restart, not in_strips)) for restart in (1, RESTART)]
        # The unpadded sizes decide: matrices with many rows have little padding.
        wide = [columns >= GRAM_FROM * rows for rows, columns in shapes]
        at, end = self._lay([forms[w] for w in wide])
        self.places = [places[X] for places in at]
        self.transposed = [NOTHING if in_strips else places[X_T] for places in at]
        self.results = [places[forms[w][-1].out] for places, w in zip(at, wide, strict=True)]
        self.room = torch.empty(end, self.panel, dtype=dtype, device=device)
        self.sums, self.sums_padded = sums, 1 << (sums.shape[1] - 1).bit_length()
        self.in_strips = in_strips
        listed = self._strips if in_strips else self._tasks
        tasks = numpy.concatenate(list(listed([forms[w] for w in wide], at)))
        self.tasks = torch.from_numpy(tasks).to(device)
        # The next task, and for each matrix the number of tiles that are done.
        self.counters = torch.zeros(1 + len(shapes), dtype=torch.int32, device=device)
        self.is_fenced = not INTERPRETED and has_descriptors(self.room)
        if in_strips:
            self.blocks = strips.blocks_of(self.room)
        else:
            self.blocks = TensorDescriptor.from_tensor(self.room, [self.tile, self.panel])

    def run(self) -> None:
        """Run the iteration, which overwrites the transposes."""
        self.counters.zero_()
        with launching(self.room):
            if self.in_strips:
                strips.iterate(self.blocks, self.tasks, self.counters, self.sums, self.sums_padded)
                return
            _iterate_kernel[(min(PROGRAMS, len(self.tasks)),)](
                self.blocks,
                self.tasks,
                len(self.tasks),
                self.counters,
                self.room,
                self.sums,
                self.sums.shape[1],
                TILE=self.tile,
                PANEL=self.panel,
                SUMS=self.sums_padded,
                FENCED=self.is_fenced,
                num_warps=NUM_WARPS * self.room.element_size() // 2,
                num_stages=NUM_STAGES,
            )

    def _lay(self, forms: Sequence[Sequence[Step]]) -> tuple[list[list[int]], int]:
        """Return the first row of each matrix's buffers, and the number of all rows."""
        used = [
            {n for step in form for n in (step.left, step.right, step.out, step.mirrored)} | {X, X_T} for form in forms
        ]
        at, end = [[0] * BUFFERS for _ in forms], 0
        for buffer in range(BUFFERS):
            for matrix, (rows, columns) in enumerate(self.shapes):
                if buffer in used[matrix]:
                    at[matrix][buffer] = end
                    end += rows * (columns if buffer <= OTHER_T else rows) // self.panel
        return at, end

    def _steps(
        self, forms: Sequence[Sequence[Step]]
    ) -> Iterator[tuple[int, Step, int, int, int, numpy.ndarray, numpy.ndarray]]:
        """Yield (matrix, step, rows, height, terms, i, j) for each step, and in each step for each matrix.

        The result has `rows` rows, and the right operand has `height` rows. `terms` is the inner dimension. `i` and `j`
        are the rows and columns of the tiles, counted in tiles.
        """
        for number in range(max(map(len, forms))):
            for matrix, form in enumerate(forms):
                if number >= len(form):
                    continue
                step, (rows, columns) = form[number], self.shapes[matrix]
                height, terms = (rows, columns if step.is_gram else rows) if step.is_symmetric else (columns, rows)
                i, j = numpy.indices((rows // self.tile, height // self.tile), dtype=numpy.int32)
                i, j = (n[i <= j] if step.is_symmetric else n.ravel() for n in (i, j))
                yield matrix, step, rows, height, terms, i, j

    def _first_row(self, at: Sequence[int], buffer: int, i: numpy.ndarray, j: int | numpy.ndarray, height: int):
        """Return the first row of tile (i, j) of a buffer with `height` rows; NOTHING if there is no buffer."""
        return at[buffer] + (j * height // self.panel + i) * self.tile if buffer != NOTHING else NOTHING

    def _tasks(self, forms: Sequence[Sequence[Step]], at: Sequence[Sequence[int]]) -> Iterator[numpy.ndarray]:
        """Yield the tiles of each step, one matrix after another, as int32 [tiles, FIELDS].

        The fields are those that `_iterate_kernel` loads. Factors are stored as the bits of a float32.
        """
        done = [0] * len(forms)
        for matrix, step, rows, height, terms, i, j in self._steps(forms):
            rows_of = functools.partial(self._first_row, at[matrix])
            mirrored = rows_of(step.mirrored, j, i, height)
            if step.is_symmetric:
                mirrored = numpy.where(i == j, NOTHING, mirrored)
            product, plus, diagonal = _bits(step.factors)
            yield _table(
                len(i),
                FIELDS,
                (
                    rows_of(step.left, i, 0, rows), rows_of(step.right, j, 0, height), rows, height,
                    terms // self.panel, rows_of(step.out, i, j, rows), mirrored, rows_of(step.added, i, j, rows),
                    (1 + step.is_symmetric) * step.scaled, matrix, done[matrix], product, plus,
                    numpy.where(i == j, diagonal, 0),
                ),
            )  # fmt: skip
            done[matrix] += len(i)

    def _strips(self, forms: Sequence[Sequence[Step]], at: Sequence[Sequence[int]]) -> Iterator[numpy.ndarray]:
        """Yield the strips of each step, as int32 [strips, strips.NUMBERS].

        A strip is a row of adjacent tiles, which have the same left operand. The fields are those that
        `newton_schulz_strips` loads. A left operand that does not fit in shared memory is loaded again for each tile.
        """
        done = [0] * len(forms)
        of_step = strips.longest(self.room.device, sum(rows // self.tile for rows, _ in self.shapes))
        for matrix, step, rows, _, terms, i, j in self._steps(forms):
            longest = of_step if terms // self.panel <= strips.LEFT else 1
            _, first, lengths = numpy.unique(i, return_index=True, return_counts=True)
            begin = numpy.concatenate([numpy.arange(a, a + n, longest) for a, n in zip(first, lengths, strict=True)])
            tiles = numpy.diff(numpy.append(begin, len(i)))
            i, j, rows_of = i[begin], j[begin], functools.partial(self._first_row, at[matrix])
            is_diagonal = (i == j) & step.is_symmetric
            is_shared = is_diagonal & (step.left == step.right)
            of_tile, panels = self.tile // self.panel, terms // self.panel
            # Except in Gram products, the left operand is symmetric, and the right operand is symmetric or x.
            left_turns = 0 if step.is_gram else of_tile * i
            right_turns = 0 if step.is_gram else of_tile * j if step.is_symmetric else panels
            flags = strips.DIAGONAL * is_diagonal + strips.SHARED * is_shared
            flags += strips.TURNING * (step.is_symmetric and not step.is_gram)
            product, plus, diagonal = _bits(step.factors)
            yield _table(
                len(i),
                strips.NUMBERS,
                (
                    rows_of(step.left, i, 0, rows), rows_of(step.left, 0, i, rows), left_turns,
                    rows_of(step.right, j, 0, rows), rows_of(step.right, 0, j, rows), right_turns,
                    rows, panels, tiles, flags, matrix, done[matrix], rows_of(step.out, i, j, rows),
                    rows_of(step.added, i, j, rows), (1 + step.is_symmetric) * step.scaled, product, plus, diagonal,
                ),
            )  # fmt: skip
            done[matrix] += int(tiles.sum())


def _bits(factors: tuple[float, float, float]) -> numpy.ndarray:
    return numpy.array(factors, dtype=numpy.float32).view(numpy.int32)


def _table(count: int, width: int, fields: Sequence[int | numpy.ndarray]) -> numpy.ndarray:
    """Return one row for each task, int32 [count, width]."""
    made = numpy.zeros((count, width), dtype=numpy.int32)
    for field, values in enumerate(fields):
        made[:, field] = values
    return made


@jit
def _scale_of(sums_ptr, matrix, sums_of_each, SUMS: tl.constexpr):
    """Return 1 / norm of a matrix, from its tiles' sums of squares; SUMS is a power of two, at least sums_of_each."""
    at = tl.arange(0, SUMS)
    sums = tl.load(sums_ptr + matrix * sums_of_each + at, mask=at < sums_of_each, other=0.0)
    return 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(sums, 0)), 1e-7)  # the eps of torch.optim.Muon


@jit
def place_in_panels(rows, columns, height, PANEL: tl.constexpr):
    """Return the offsets of elements at these rows and columns, in a buffer of panels with `height` rows."""
    return (columns // PANEL * height + rows) * PANEL + columns % PANEL


@jit
def _tile(ptr, first, height, TILE: tl.constexpr, PANEL: tl.constexpr):
    """Return pointers to the elements of the tile that begins at row `first` of a buffer with `height` rows."""
    place = place_in_panels(tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :], height, PANEL)
    return ptr + first.to(tl.int64) * PANEL + place


@jit
def _iterate_kernel(
    blocks,
    tasks_ptr,
    count,
    counters_ptr, room_ptr, sums_ptr,
    sums_of_each,
    TILE: tl.constexpr, PANEL: tl.constexpr, SUMS: tl.constexpr, FENCED: tl.constexpr,
):  # fmt: skip
    """Compute out = factor * left right' + plus * added + diagonal * I for each task, and mirrored = out'.

    A task is one [TILE, TILE] tile of a matrix. Each program takes the next task until none is left. It waits until
    `needed` tiles of the matrix are done, and loops over the inner dimension in steps of PANEL columns.
    """
    task = tl.atomic_add(counters_ptr, 1, sem="relaxed")
    while task < count:
        task_ptr = tasks_ptr + 16 * task
        # First rows of the operands, and numbers of rows of their panels.
        left, right = tl.load(task_ptr), tl.load(task_ptr + 1)
        left_height = tl.multiple_of(tl.load(task_ptr + 2), PANEL)
        right_height = tl.multiple_of(tl.load(task_ptr + 3), PANEL)
        panels = tl.load(task_ptr + 4)
        # First rows of the result, of its transpose, and of the added tile.
        out, mirrored, added = tl.load(task_ptr + 5), tl.load(task_ptr + 6), tl.load(task_ptr + 7)
        power, matrix, needed = tl.load(task_ptr + 8), tl.load(task_ptr + 9), tl.load(task_ptr + 10)
        factor = tl.load(task_ptr + 11).to(tl.float32, bitcast=True)
        if power > 0:
            scale = _scale_of(sums_ptr, matrix, sums_of_each, SUMS)
            factor *= tl.where(power > 1, scale * scale, scale)
        done_ptr = counters_ptr + 1 + matrix
        while tl.atomic_add(done_ptr, 0, sem="acquire") < needed:
            pass
        if FENCED:
            # Order other programs' stores of tiles before the loads of these tiles by the tensor memory accelerator.
            _ = tl.inline_asm_elementwise("fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)
        total = tl.zeros((TILE, TILE), tl.float32)
        for _ in range(panels):
            a, b = blocks.load([left, 0]), blocks.load([right, 0])
            total = tl.dot(a, b.T, total, input_precision="ieee")
            left += left_height
            right += right_height
        total *= factor
        if added >= 0:
            plus = tl.load(task_ptr + 12).to(tl.float32, bitcast=True)
            diagonal = tl.load(task_ptr + 13).to(tl.float32, bitcast=True)
            total += plus * tl.load(_tile(room_ptr, added, left_height, TILE, PANEL)).to(tl.float32)
            n = tl.arange(0, TILE)
            total += tl.where(n[:, None] == n[None, :], diagonal, 0.0)
        result = total.to(room_ptr.dtype.element_ty)
        tl.store(_tile(room_ptr, out, left_height, TILE, PANEL), result)
        if mirrored >= 0:
            tl.store(_tile(room_ptr, mirrored, right_height, TILE, PANEL), tl.trans(result))
        # All threads of the program must have stored before one of them counts the tile as done.
        tl.debug_barrier()
        tl.atomic_add(done_ptr, 1, sem="release")
        task = tl.atomic_add(counters_ptr, 1, sem="relaxed")
