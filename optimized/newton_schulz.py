"""The Newton–Schulz iteration of many matrices in one launch (ups, technique 002.8).

Programs take tiles from one list, in its order. Before a tile they wait until the tiles that it depends on are done,
which are earlier in the list, so that some program is always at work. The list is in parts of matrices that the L2
cache holds: a product finds there what the one before it has written.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from optimized.kernels import INTERPRETED, ceil_div, jit, launching, tl

# Bytes of the matrices of a part.
PART_BYTES = 48 << 20
# Programs; more than run at once do no harm. An interpreted one would wait for ever for those after it.
PROGRAMS = 1 if INTERPRETED else 264
# Rows and columns of the largest tile, and how many terms of a sum are taken at a time, in half precision.
LARGEST_TILE, DEPTH = 128, 64
# In half precision: two programs find room on a multiprocessor.
NUM_WARPS, NUM_STAGES = 4, 3
# A tile has at least so many rows and columns.
LEAST_TILE = 16
# Matrices begin at multiples of so many elements.
VECTOR = 16
# From so many times as many columns as rows on, Gram matrices are iterated.
GRAM_FROM = 2
# Iterations after which Gram matrices are computed anew.
RESTART = 3
# The buffers of a matrix; the last two are of Gram matrices' iteration.
X, OTHER, GRAM, POLYNOMIAL, SPARE, FACTOR = range(6)
NOTHING = -1


class Step(NamedTuple):
    """A product for all tiles of a matrix: the numbers of its operands and of its result.

    Symmetric, it is α · left rightᵀ + β · added + γ, of which the tiles on one side of the diagonal are computed; else
    it is left · right. The operands that are `X` are divided by the matrix's norm where `scaled`.
    """

    is_symmetric: bool
    left: int
    right: int
    out: int
    added: int = NOTHING
    factors: tuple[float, float, float] = (1.0, 0.0, 0.0)
    scaled: bool = False


def plain(coefficients: tuple[float, float, float], iterations: int) -> Iterator[Step]:
    """Multiply x, divided by its norm, so often by P = a + b G + c G², where G = x xᵀ."""
    a, b, c = coefficients
    now, after = X, OTHER
    for number in range(iterations):
        yield Step(True, now, now, GRAM, scaled=number == 0)
        yield Step(True, GRAM, GRAM, POLYNOMIAL, added=GRAM, factors=(c, b, a))
        yield Step(False, POLYNOMIAL, now, after, scaled=number == 0)
        now, after = after, now


def by_gram(coefficients: tuple[float, float, float], iterations: int) -> Iterator[Step]:
    """Iterate Gram matrices, and multiply x itself twice.

    The Gram matrix after a multiplication is P G P, and the product of all P so far is F; all are symmetric, and
    commute. For matrices with many more columns than rows this is less work. Rounding spoils G's smallest eigenvalues,
    which grow from iteration to iteration: after RESTART of them G is computed anew, from F x.
    """
    a, b, c = coefficients
    now, after = X, OTHER
    for first, end in ((0, RESTART), (RESTART, iterations)):
        gram, polynomial, spare, factor = GRAM, POLYNOMIAL, SPARE, FACTOR
        yield Step(True, now, now, gram, scaled=first == 0)
        for number in range(first, end):
            yield Step(True, gram, gram, polynomial, added=gram, factors=(c, b, a))
            if number + 1 < end:
                yield Step(True, polynomial, gram, spare)
                yield Step(True, spare, polynomial, gram)
            if number == first:
                polynomial, factor = factor, polynomial
            else:
                yield Step(True, polynomial, factor, spare)
                spare, factor = factor, spare
        yield Step(False, factor, now, after, scaled=first == 0)
        now, after = after, now


class NewtonSchulz:
    """The iteration of wide matrices, whose shapes are given.

    shapes   (rows, columns) of each matrix, with no more rows than columns, multiples of 8
    sums     float32 [matrices, n] whose rows have the squares of the matrices' norms as their sums

    `room` holds the matrices, each row by row from `places[i]` on, and after `run` their results from `results[i]` on.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        sums: torch.Tensor,
        coefficients: tuple[float, float, float],
        iterations: int,
        dtype: torch.dtype,
    ) -> None:
        device = sums.device
        forms = [tuple(form(coefficients, iterations)) for form in (plain, by_gram)]
        wide = [columns >= GRAM_FROM * rows for rows, columns in shapes]
        buffers = [{n for step in forms[w] for n in (step.left, step.right, step.out)} for w in wide]
        sizes = [rows * columns for rows, columns in shapes], [rows * rows for rows, _ in shapes]
        at, end = [[0] * (FACTOR + 1) for _ in shapes], 0
        for buffer in range(FACTOR + 1):
            for matrix, used in enumerate(buffers):
                if buffer in used:
                    at[matrix][buffer] = end
                    end += ceil_div(sizes[buffer > OTHER][matrix], VECTOR) * VECTOR
        self.places = [places[X] for places in at]
        self.results = [places[forms[w][-1].out] for places, w in zip(at, wide, strict=True)]
        self.room = torch.empty(end, dtype=dtype, device=device)
        self.sums, self.sums_padded = sums, 1 << (sums.shape[1] - 1).bit_length()
        largest = max(rows for rows, _ in shapes)
        self.tile = min(LARGEST_TILE, max(LEAST_TILE, 1 << (largest - 1).bit_length()))
        self.depth = min(DEPTH * 2 // self.room.element_size(), max(LEAST_TILE, self.tile))
        steps = [step for form in forms for step in form]
        self.steps = _on(device, [(s.is_symmetric, s.left, s.right, s.out, s.added, s.scaled) for s in steps])
        self.factors = _on(device, [s.factors for s in steps], torch.float32)
        self.matrices = _on(device, [(*places, *shape) for places, shape in zip(at, shapes, strict=True)], torch.int64)
        bytes_of = [
            self.room.element_size() * sum(sizes[n > OTHER][matrix] for n in used)
            for matrix, used in enumerate(buffers)
        ]
        first = [len(forms[0]) if w else 0 for w in wide]
        tasks = [
            tile
            for part in _parts(bytes_of)
            for tile in _tasks(part, [forms[w] for w in wide], first, shapes, self.tile)
        ]
        self.tasks = torch.cat(tasks).to(device)
        # The next task, and of each matrix the number of tiles that are done.
        self.counters = torch.zeros(1 + len(shapes), dtype=torch.int32, device=device)

    def run(self) -> None:
        """Iterate. What lay in the places of the matrices is lost."""
        self.counters.zero_()
        with launching(self.room):
            _iterate_kernel[(min(PROGRAMS, len(self.tasks)),)](
                self.tasks,
                len(self.tasks),
                self.counters,
                self.steps,
                self.factors,
                self.matrices,
                self.room,
                self.sums,
                self.sums.shape[1],
                TILE=self.tile,
                DEPTH=self.depth,
                SUMS=self.sums_padded,
                num_warps=NUM_WARPS * self.room.element_size() // 2,
                num_stages=NUM_STAGES,
            )


def _on(device: torch.device, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


def _parts(sizes: Sequence[int]) -> list[range]:
    """Matrices that follow each other, as many as a part holds."""
    parts, first, held = [], 0, 0
    for matrix, size in enumerate(sizes):
        if held + size > PART_BYTES and matrix > first:
            parts.append(range(first, matrix))
            first, held = matrix, 0
        held += size
    return [*parts, range(first, len(sizes))]


def _tasks(
    part: range,
    forms: Sequence[Sequence[Step]],
    first: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    tile: int,
) -> Iterator[torch.Tensor]:
    """Yield the tiles of each step, one matrix of the part after another.

    They are int32 [tiles, 5]: matrix, step, row, column, and the number of the matrix's tiles that must be done before.
    """
    done = dict.fromkeys(part, 0)
    for number in range(max(len(forms[matrix]) for matrix in part)):
        for matrix in part:
            if number >= len(forms[matrix]):
                continue
            rows, columns = (ceil_div(n, tile) for n in shapes[matrix])
            if forms[matrix][number].is_symmetric:
                tiles = torch.triu_indices(rows, rows, dtype=torch.int32)
            else:
                tiles = torch.cartesian_prod(*(torch.arange(n, dtype=torch.int32) for n in (rows, columns))).T
            made = torch.empty(tiles.shape[1], 5, dtype=torch.int32)
            made[:, 0], made[:, 1], made[:, 4] = matrix, first[matrix] + number, done[matrix]
            made[:, 2:4] = tiles.T
            done[matrix] += len(made)
            yield made


@jit
def _scale_of(sums_ptr, matrix, sums_of_each, SUMS: tl.constexpr):
    """1 over the norm of a matrix, from the sums of squares of its tiles; SUMS is a power of 2, as many or more."""
    at = tl.arange(0, SUMS)
    sums = tl.load(sums_ptr + matrix * sums_of_each + at, mask=at < sums_of_each, other=0.0)
    return 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(sums, 0)), 1e-7)  # torch's eps


@jit
def _iterate_kernel(
    tasks_ptr,
    count,
    counters_ptr,
    steps_ptr,
    factors_ptr,
    matrices_ptr,
    room_ptr,
    sums_ptr,
    sums_of_each,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    SUMS: tl.constexpr,
):
    depth = tl.arange(0, DEPTH)
    task = tl.atomic_add(counters_ptr, 1)
    while task < count:
        task_ptr = tasks_ptr + 5 * task
        matrix = tl.load(task_ptr)
        step = tl.load(task_ptr + 1)
        i, j = tl.load(task_ptr + 2), tl.load(task_ptr + 3)
        needed = tl.load(task_ptr + 4)
        step_ptr = steps_ptr + 6 * step
        matrix_ptr = matrices_ptr + 8 * matrix
        left_ptr = room_ptr + tl.multiple_of(tl.load(matrix_ptr + tl.load(step_ptr + 1)), 16)
        right_ptr = room_ptr + tl.multiple_of(tl.load(matrix_ptr + tl.load(step_ptr + 2)), 16)
        out_ptr = room_ptr + tl.multiple_of(tl.load(matrix_ptr + tl.load(step_ptr + 3)), 16)
        added = tl.load(step_ptr + 4)
        rows = tl.multiple_of(tl.load(matrix_ptr + 6).to(tl.int32), 8)
        columns = tl.multiple_of(tl.load(matrix_ptr + 7).to(tl.int32), 8)
        scale = tl.full([], 1.0, tl.float32)
        if tl.load(step_ptr + 5) != 0:
            scale = _scale_of(sums_ptr, matrix, sums_of_each, SUMS)
        at_i = i * TILE + tl.arange(0, TILE)
        at_j = j * TILE + tl.arange(0, TILE)
        # Rows beyond the edge are the one at the edge, and are not stored.
        in_i = tl.minimum(at_i, rows - 1)
        total = tl.zeros((TILE, TILE), tl.float32)
        done = tl.atomic_add(counters_ptr + 1 + matrix, 0)
        while done < needed:
            done = tl.atomic_add(counters_ptr + 1 + matrix, 0)
        if tl.load(step_ptr) != 0:
            in_j = tl.minimum(at_j, rows - 1)
            # Only a matrix itself has more columns than rows, and then it is the left operand and the right one.
            terms = tl.where(tl.load(step_ptr + 1) < 2, columns, rows)
            left = left_ptr + in_i[:, None] * terms + depth[None, :]
            right = right_ptr + in_j[None, :] * terms + depth[:, None]
            for k in range(0, terms, DEPTH):
                inside = depth < terms - k
                a = tl.load(left + k, mask=inside[None, :], other=0.0)
                b = tl.load(right + k, mask=inside[:, None], other=0.0)
                total = tl.dot(a, b, total, input_precision="ieee")
            factor_ptr = factors_ptr + 3 * step
            total *= tl.load(factor_ptr) * scale * scale
            place = at_i[:, None] * rows + at_j[None, :]
            mask = (at_i[:, None] < rows) & (at_j[None, :] < rows)
            if added >= 0:
                added_ptr = room_ptr + tl.multiple_of(tl.load(matrix_ptr + added), 16)
                total += tl.load(factor_ptr + 1) * tl.load(added_ptr + place, mask=mask, other=0.0).to(tl.float32)
                total += tl.where(at_i[:, None] == at_j[None, :], tl.load(factor_ptr + 2), 0.0)
            result = total.to(room_ptr.dtype.element_ty)
            tl.store(out_ptr + place, result, mask=mask)
            if i != j:
                mirrored = at_j[:, None] * rows + at_i[None, :]
                tl.store(out_ptr + mirrored, tl.trans(result), mask=tl.trans(mask))
        else:
            left = left_ptr + in_i[:, None] * rows + depth[None, :]
            right = right_ptr + depth[:, None] * columns + at_j[None, :]
            for k in range(0, rows, DEPTH):
                inside = depth < rows - k
                a = tl.load(left + k, mask=inside[None, :], other=0.0)
                b = tl.load(right + k * columns, mask=inside[:, None] & (at_j[None, :] < columns), other=0.0)
                total = tl.dot(a, b, total, input_precision="ieee")
            total *= scale
            place = at_i[:, None] * columns + at_j[None, :]
            mask = (at_i[:, None] < rows) & (at_j[None, :] < columns)
            tl.store(out_ptr + place, total.to(room_ptr.dtype.element_ty), mask=mask)
        # All threads of the program have stored before one of them says so.
        tl.debug_barrier()
        tl.atomic_add(counters_ptr + 1 + matrix, 1)
        task = tl.atomic_add(counters_ptr, 1)
