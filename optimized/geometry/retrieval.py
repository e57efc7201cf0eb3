"""Retrieval in one pass over the candidates: fused distance, softmax and weighted mean (trainer2, technique 000.F1)."""

import functools
from typing import NamedTuple

import torch

from optimized.kernels import ceil_div, jit, launching, tl, use_triton

# A thread keeps a candidate's offsets and the metric in registers. More coordinates need a matrix product instead.
MAX_COORDINATES = 8
# Queries that share a tile of the memory. tl.dot needs at least 16 rows.
QUERIES = 16


class _Tiles(NamedTuple):
    """Tile size and number of warps of a program."""

    candidates: int
    columns: int
    num_warps: int


# Measured on an H200 at the trainer's two sizes: 16 queries, 128 own candidates and 256 columns; and 64, 512 and 512;
# both with 2048 shared candidates. The forward takes 12.4 and 44.1 µs, and (64, 64, 8) takes 18.1 and 205 µs: four
# warps are always faster than eight. Of 108 combinations with the numbers of programs below, this one is the fastest at
# the larger size and within 8% of the fastest at the smaller. The backward's tile is the fastest of 12 combinations:
# forward and backward take 169 µs at the larger size, and 263 µs with eight warps.
FORWARD = _Tiles(candidates=128, columns=64, num_warps=4)
BACKWARD = _Tiles(candidates=64, columns=64, num_warps=4)
# Approximate number of programs for the shared and for a query's own candidates. If there are more tiles than that, a
# program loops over several. The split depends only on the sizes, so every device sums in the same order.
MEMORY_PROGRAMS = 132
OWN_PROGRAMS = 4 * 132
COMBINE_COLUMNS, COMBINE_WARPS = 128, 4
# Partial results that a program loads at a time.
PARTIALS = tl.constexpr(16)


def retrieval(
    query: torch.Tensor,
    curvature: torch.Tensor,
    coordinates: torch.Tensor,
    states: torch.Tensor,
    filled: torch.Tensor,
    memory_coordinates: torch.Tensor,
    memory_states: torch.Tensor,
    memory_filled: torch.Tensor,
    metric: torch.Tensor | None,
    metric_diag: torch.Tensor | None = None,
    beta: float = 5.0,
    eps: float = 1e-8,
) -> torch.Tensor:
    """Return the mean state of each query's candidates, [B, D], weighted by `softmax(-beta * cost)`.

    `cost = curvature * sqrt(max(d' g d, 0) + eps)` with `d = candidate - query`. A query's candidates are its own and
    those of the memory, which all queries share. An empty slot has weight 0, even if it holds NaN. A query without any
    filled slot returns 0.

    Triton kernels run for float32 tensors on CUDA with n <= 8. They compute in float32, and their forward and backward
    are deterministic; they have no second derivative. All other inputs use the vectorised form. Neither form waits for
    the device or copies the memory states for each query.

    If the costs of all filled slots of a query overflow, the kernels return 0 for it. The reference returns NaN, or 0
    if the query also has an empty slot.

    query               [B, n]
    curvature           [B], R_sc
    coordinates         [B, K, n], the query's own candidates
    states              [B, K, D]
    filled              [B, K] bool
    memory_coordinates  [M, n]
    memory_states       [M, D]
    memory_filled       [M] bool
    metric              [n, n] or [B, n, n]; None if metric_diag is given
    metric_diag         [n] or None; if given, it is used instead of metric

    Source: trainer2, technique 000.F1.
    """
    form = metric if metric_diag is None else metric_diag
    real = (query, curvature, coordinates, states, memory_coordinates, memory_states, form)
    call = retrieval_triton if use_triton(*real) else retrieval_vectorised
    every = (query, curvature, coordinates, states, filled, memory_coordinates, memory_states, memory_filled)
    return call(*every, metric, metric_diag, beta, eps)


def retrieval_vectorised(
    query: torch.Tensor,
    curvature: torch.Tensor,
    coordinates: torch.Tensor,
    states: torch.Tensor,
    filled: torch.Tensor,
    memory_coordinates: torch.Tensor,
    memory_states: torch.Tensor,
    memory_filled: torch.Tensor,
    metric: torch.Tensor | None,
    metric_diag: torch.Tensor | None = None,
    beta: float = 5.0,
    eps: float = 1e-8,
) -> torch.Tensor:
    """Compute `retrieval` in PyTorch operations, on any device and dtype.

    One softmax covers all candidates. The own and the shared states have one product each.
    """
    own = coordinates.shape[1]
    full = torch.cat([filled, memory_filled.expand(query.shape[0], -1)], dim=1)
    every = torch.cat([coordinates - query[:, None], memory_coordinates - query[:, None]], dim=1)
    d = torch.where(full[..., None], every, 0.0)
    along = d * metric_diag if metric_diag is not None else d @ metric
    # 1 in empty slots: the square root has no derivative at 0.
    form = torch.where(full, (along * d).sum(-1), 1.0)
    cost = curvature[:, None] * torch.sqrt(torch.clamp(form, min=0) + eps)
    logits = (-beta * cost).masked_fill(~full, torch.finfo(cost.dtype).min)
    weights = torch.softmax(logits, dim=1).masked_fill(~full, 0.0)
    states = torch.where(filled[..., None], states, 0.0)
    memory_states = torch.where(memory_filled[:, None], memory_states, 0.0)
    mixed = torch.bmm(weights[:, None, :own], states).squeeze(1)
    return mixed + weights[:, own:] @ memory_states


def retrieval_triton(
    query: torch.Tensor,
    curvature: torch.Tensor,
    coordinates: torch.Tensor,
    states: torch.Tensor,
    filled: torch.Tensor,
    memory_coordinates: torch.Tensor,
    memory_states: torch.Tensor,
    memory_filled: torch.Tensor,
    metric: torch.Tensor | None,
    metric_diag: torch.Tensor | None = None,
    beta: float = 5.0,
    eps: float = 1e-8,
) -> torch.Tensor:
    """Compute `retrieval` with Triton kernels and their own backward, in float32.

    n > 8 and empty inputs use the vectorised form.
    """
    candidates = coordinates.shape[1] + memory_coordinates.shape[0]
    if not 0 < query.shape[1] <= MAX_COORDINATES or not (query.shape[0] and candidates and states.shape[2]):
        every = (query, curvature, coordinates, states, filled, memory_coordinates, memory_states, memory_filled)
        return retrieval_vectorised(*every, metric, metric_diag, beta, eps)
    form = metric if metric_diag is None else metric_diag
    real = (query, curvature, coordinates, states, memory_coordinates, memory_states, form)
    mixed = _Retrieval.apply(beta, eps, filled, memory_filled, *real)
    # The reference ends in a product, whose result has autocast's dtype.
    if torch.is_autocast_enabled(mixed.device.type):
        return mixed.to(torch.get_autocast_dtype(mixed.device.type))
    return mixed


def _splits(tiles: int, programs: int, most: int) -> tuple[int, int]:
    """Return (tiles per split, splits), so that splits * programs is at most about `most`."""
    length = max(1, ceil_div(tiles * programs, most))
    return length, ceil_div(tiles, length)


class _Retrieval(torch.autograd.Function):
    @staticmethod
    def forward(ctx, beta, eps, filled, memory_filled, *real):
        real = [t.contiguous() for t in real]
        marks = [t.contiguous().view(torch.uint8) for t in (filled, memory_filled)]
        query, _, _, states, _, memory_states, form = real
        batch, own, columns = states.shape
        shared = memory_states.shape[0]
        query_tiles, column_tiles = ceil_div(batch, QUERIES), ceil_div(columns, FORWARD.columns)
        memory_tiles, own_tiles = ceil_div(shared, FORWARD.candidates), ceil_div(own, FORWARD.candidates)
        memory_length, memory_splits = _splits(memory_tiles, query_tiles * column_tiles, MEMORY_PROGRAMS)
        own_length, own_splits = _splits(own_tiles, batch * column_tiles, OWN_PROGRAMS)
        splits = memory_splits + own_splits
        mixed = torch.empty((splits, batch, columns), dtype=torch.float32, device=query.device)
        # Of each split and query: the largest logit, and the sum of the weights relative to it.
        tops = torch.empty((splits, batch), dtype=torch.float32, device=query.device)
        totals = torch.empty_like(tops)
        top = torch.empty(batch, dtype=torch.float32, device=query.device)
        y = torch.empty((batch, columns), dtype=query.dtype, device=query.device)
        memory_programs = memory_splits * query_tiles * column_tiles
        with launching(query):
            _mix_kernel[(memory_programs + own_splits * batch * column_tiles,)](
                *(*real, *marks, mixed, tops, totals, batch, own, shared, columns, memory_programs),
                *(memory_length * FORWARD.candidates, memory_splits, own_length * FORWARD.candidates, beta, eps),
                **_constants(query, form, FORWARD),
            )
            _combine_kernel[(batch, ceil_div(columns, COMBINE_COLUMNS))](
                mixed, tops, totals, y, top, splits, batch, columns, COLUMNS=COMBINE_COLUMNS, num_warps=COMBINE_WARPS
            )
        ctx.save_for_backward(*real, *marks, top)
        ctx.beta, ctx.eps = beta, eps
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        *inputs, top = ctx.saved_tensors
        query, _, coordinates, states, _, memory_states, form = inputs[:7]
        batch, own, columns = states.shape
        n, shared = query.shape[1], memory_states.shape[0]
        cells = form[0].numel() if form.dim() == 3 else form.numel()
        grad = grad.contiguous()
        query_tiles, column_tiles = ceil_div(batch, QUERIES), ceil_div(columns, BACKWARD.columns)
        memory_chunks, own_chunks = ceil_div(shared, BACKWARD.candidates), ceil_div(own, BACKWARD.candidates)
        chunks = memory_chunks + own_chunks
        memory_programs = memory_chunks * query_tiles
        fresh = functools.partial(torch.empty, dtype=torch.float32, device=query.device)
        # For each query and candidate: the weight relative to the forward's largest logit, and the weight's gradient.
        weights, slopes = fresh((batch, own + shared)), fresh((batch, own + shared))
        # For each chunk: the sums of weights and of weights * slopes. The backward sums the weights itself, so that the
        # weights that it uses add up to 1: slope - mean slope may be far smaller than the slopes themselves.
        totals, products = fresh((chunks, batch)), fresh((chunks, batch))
        d_coordinates, d_states = torch.empty_like(coordinates), torch.empty_like(states)
        d_memory_states = torch.empty_like(memory_states)
        d_memory_coordinates = fresh((query_tiles, shared, n))
        form_needed = ctx.needs_input_grad[10]
        # A row for each chunk: the gradients of all queries, then of their curvatures, then of their metrics. The sum
        # over chunks has a fixed order and uses no atomics, so every run gives the same gradient.
        partial = fresh((chunks, batch * (n + 1 + (cells if form_needed else 0))))
        sizes, constants = (batch, own, shared, columns), _constants(query, form, BACKWARD)
        states_programs = memory_chunks * column_tiles if ctx.needs_input_grad[9] else 0
        with launching(query):
            _slopes_kernel[(memory_programs + own_chunks * batch,)](
                *(*inputs, top, grad, weights, slopes, totals, products, *sizes, memory_programs, memory_chunks),
                *(ctx.beta, ctx.eps),
                **constants,
            )
            _backward_kernel[(memory_programs + own_chunks * batch + states_programs,)](
                *(*inputs, grad, weights, slopes, totals, products),
                *(d_coordinates, d_states, d_memory_coordinates, d_memory_states, partial),
                *(*sizes, memory_programs, own_chunks * batch, memory_chunks, chunks, ctx.beta, ctx.eps),
                **constants,
                FORM_NEEDED=form_needed,
            )
        total = partial.sum(0)
        d_query, d_curvature, d_form = total.split([batch * n, batch, total.shape[0] - batch * (n + 1)])
        if not form_needed:
            d_form = None
        elif form.dim() == 3:
            d_form = d_form.view(form.shape)
        else:
            d_form = d_form.view(batch, *form.shape).sum(0)
        d_memory_coordinates = d_memory_coordinates.sum(0) if query_tiles > 1 else d_memory_coordinates[0]
        d_memory_states = d_memory_states if states_programs or not shared else None
        d_rest = d_coordinates, d_states, d_memory_coordinates, d_memory_states, d_form
        return None, None, None, None, d_query.view(query.shape), d_curvature, *d_rest


def _constants(query: torch.Tensor, form: torch.Tensor, tiles: _Tiles) -> dict[str, int | bool]:
    return {
        "N": query.shape[1],
        "DIAGONAL": form.dim() == 1,
        "BATCHED": form.dim() == 3,
        "QUERIES": QUERIES,
        "CANDIDATES": tiles.candidates,
        "COLUMNS": tiles.columns,
        "num_warps": tiles.num_warps,
    }


# In the kernels below, a value per query has shape [QUERIES, 1] and a value per candidate [1, CANDIDATES]. In programs
# for a single query, a value per query has shape [1, 1].


@jit
def _load_form(form_ptr, b, inside, N: tl.constexpr, DIAGONAL: tl.constexpr, BATCHED: tl.constexpr):
    """Load the metric of each query as a tuple of N or N * N values: g_ii, and g_ij + g_ji off the diagonal.

    The quadratic form depends on nothing else.
    """
    g = ()
    if DIAGONAL:
        for i in tl.static_range(N):
            g += (tl.load(form_ptr + i).to(tl.float32),)
    else:
        for i in tl.static_range(N):
            for j in tl.static_range(N):
                if i > j:
                    g += (g[j * N + i],)
                elif BATCHED:
                    own = form_ptr + b * (N * N)
                    upper = tl.load(own + (i * N + j), mask=inside, other=0.0).to(tl.float32)
                    if i < j:
                        upper += tl.load(own + (j * N + i), mask=inside, other=0.0).to(tl.float32)
                    g += (upper,)
                else:
                    upper = tl.load(form_ptr + (i * N + j)).to(tl.float32)
                    if i < j:
                        upper += tl.load(form_ptr + (j * N + i)).to(tl.float32)
                    g += (upper,)
    return g


@jit
def _load_rows(rows_ptr, row, mask, N: tl.constexpr):
    """Load the coordinates of the rows as a tuple of N values."""
    x = ()
    for i in tl.static_range(N):
        x += (tl.load(rows_ptr + row * N + i, mask=mask, other=0.0).to(tl.float32),)
    return x


@jit
def _offsets(candidate, query, live, N: tl.constexpr):
    d = ()
    for i in tl.static_range(N):
        # 0 in empty slots, even if the query holds NaN.
        d += (tl.where(live, candidate[i] - query[i], 0.0),)
    return d


@jit
def _quadratic(d, g, N: tl.constexpr, DIAGONAL: tl.constexpr):
    for i in tl.static_range(N):
        if DIAGONAL:
            along = d[i] * g[i]
        else:
            along = d[i] * g[i * N + i]
            for j in tl.static_range(i + 1, N):
                along += d[j] * g[i * N + j]
        if i == 0:
            q = along * d[i]
        else:
            q += along * d[i]
    return q


@jit
def _speed(q, eps):
    # tl.maximum would drop a NaN, which must propagate.
    return tl.sqrt_rn(tl.where(q < 0, 0.0, q) + eps)


@jit
def _advance(logit, top, total):
    """Run one step of the online softmax.

    Return (weights of the tile, factor for earlier sums, new largest logit, new sum of the weights).
    """
    higher = tl.maximum(top, tl.max(logit, axis=1))
    # While no slot is filled, logit - higher would be -inf - (-inf).
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp(logit - base[:, None])
    shrink = tl.exp(top - base)
    return weight, shrink, higher, total * shrink + tl.sum(weight, axis=1)


@jit
def _place(place, batch, QUERIES: tl.constexpr):
    """Return (part of the candidates, tile of queries, the tile's queries, their mask) of a program."""
    tiles = tl.cdiv(batch, QUERIES)
    tile = place % tiles
    b = (tile * QUERIES + tl.arange(0, QUERIES)).to(tl.int64)
    return place // tiles, tile, b, b < batch


@jit
def _candidates(filled_ptr, start, count, tile, CANDIDATES: tl.constexpr, SHARED: tl.constexpr):
    """Return (indices in the list of candidates, rows in its arrays, mask of the list's end, mask of filled slots).

    A list that is not shared belongs to the query `tile`.
    """
    c = start + tl.arange(0, CANDIDATES)
    row = c.to(tl.int64) if SHARED else tile.to(tl.int64) * count + c
    within = c < count
    return c, row, within, tl.load(filled_ptr + row, mask=within, other=0) != 0


@jit
def _load_queries(queries, b, inside, N: tl.constexpr, DIAGONAL: tl.constexpr, BATCHED: tl.constexpr):
    """Return (coordinates, curvatures, metric) of the queries."""
    query_ptr, curvature_ptr, form_ptr = queries
    query = _load_rows(query_ptr, b[:, None], inside[:, None], N)
    curvature = tl.load(curvature_ptr + b, mask=inside, other=0.0).to(tl.float32)
    return query, curvature, _load_form(form_ptr, b[:, None], inside[:, None], N, DIAGONAL, BATCHED)


@jit
def _mix_kernel(
    query_ptr, curvature_ptr, coordinates_ptr, states_ptr, memory_coordinates_ptr, memory_states_ptr, form_ptr,
    filled_ptr, memory_filled_ptr, mixed_ptr, tops_ptr, totals_ptr,
    batch, own, shared, columns, memory_programs, memory_length, memory_splits, own_length, beta, eps,
    N: tl.constexpr, DIAGONAL: tl.constexpr, BATCHED: tl.constexpr, QUERIES: tl.constexpr, CANDIDATES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute mixed = sum of exp(logit - top) * state over one split of the candidates, with top its largest logit.

    logit = -beta * curvature * sqrt(max(d' g d, 0) + eps). The first `memory_programs` programs compute the mix of
    shared candidates, for QUERIES queries and COLUMNS columns each. The others compute the mix of a query's own
    candidates, for one query and COLUMNS columns each. A program loops over its split in tiles of CANDIDATES.
    `_combine_kernel` divides by the total weight.
    """
    program = tl.program_id(0)
    column_tiles = tl.cdiv(columns, COLUMNS)
    column = (program % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    queries, results = (query_ptr, curvature_ptr, form_ptr), (mixed_ptr, tops_ptr, totals_ptr)
    sizes = (column, batch, columns, beta, eps)
    if program < memory_programs:
        place = program // column_tiles
        work = (place, memory_coordinates_ptr, memory_states_ptr, memory_filled_ptr, shared, 0, memory_length)
        _mix(queries, work, results, sizes, N, DIAGONAL, BATCHED, QUERIES, CANDIDATES, COLUMNS)
    else:
        place = (program - memory_programs) // column_tiles
        work = (place, coordinates_ptr, states_ptr, filled_ptr, own, memory_splits, own_length)
        _mix(queries, work, results, sizes, N, DIAGONAL, BATCHED, 1, CANDIDATES, COLUMNS)


@jit
def _mix(
    queries, work, results, sizes,
    N: tl.constexpr, DIAGONAL: tl.constexpr, BATCHED: tl.constexpr, QUERIES: tl.constexpr, CANDIDATES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the mix of one split, with tl.dot(weights, states) if QUERIES share it; otherwise QUERIES is 1."""
    SHARED: tl.constexpr = QUERIES > 1
    place, coordinates_ptr, states_ptr, filled_ptr, count, first_split, length = work
    column, batch, columns, beta, eps = sizes
    split, tile, b, inside = _place(place, batch, QUERIES)
    query, curvature, g = _load_queries(queries, b, inside, N, DIAGONAL, BATCHED)
    top = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    # For a single query, summed over the candidates only after the loop: a reduction in each step costs more than the
    # registers.
    mixed = tl.zeros((QUERIES if SHARED else CANDIDATES, COLUMNS), dtype=tl.float32)
    first = split * length
    for start in range(first, tl.minimum(first + length, count), CANDIDATES):
        _, row, _, live = _candidates(filled_ptr, start, count, tile, CANDIDATES, SHARED)
        candidate = _load_rows(coordinates_ptr, row[None, :], live[None, :], N)
        speed = _speed(_quadratic(_offsets(candidate, query, live[None, :], N), g, N, DIAGONAL), eps)
        logit = tl.where(live[None, :], curvature[:, None] * speed * -beta, float("-inf"))
        weight, shrink, top, total = _advance(logit, top, total)
        mask = live[:, None] & (column < columns)[None, :]
        state = tl.load(states_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if SHARED:
            mixed = mixed * shrink[:, None] + tl.dot(weight, state, input_precision="ieee")
        else:
            mixed = mixed * shrink[:, None] + tl.trans(weight) * state
    if not SHARED:
        mixed = tl.sum(mixed, axis=0)[None, :]
    mixed_ptr, tops_ptr, totals_ptr = results
    row = (first_split + split).to(tl.int64) * batch + b
    mask = inside[:, None] & (column < columns)[None, :]
    tl.store(mixed_ptr + row[:, None] * columns + column[None, :], mixed, mask=mask)
    if tl.program_id(0) % tl.cdiv(columns, COLUMNS) == 0:
        tl.store(tops_ptr + row, top, mask=inside)
        tl.store(totals_ptr + row, total, mask=inside)


@jit
def _combine_kernel(mixed_ptr, tops_ptr, totals_ptr, y_ptr, top_ptr, splits, batch, columns, COLUMNS: tl.constexpr):
    """Compute y = (sum over splits of scale * mixed) / (sum over splits of scale * total), scale = exp(top_s - top).

    top_s is the largest logit of split s, and top that of all splits, which is stored for the backward. A program
    computes COLUMNS columns of one query, and loads PARTIALS splits at a time.
    """
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = float("-inf")
    for start in range(0, splits, PARTIALS):
        split = (start + tl.arange(0, PARTIALS)).to(tl.int64)
        tops = tl.load(tops_ptr + split * batch + b, mask=split < splits, other=float("-inf"))
        top = tl.maximum(top, tl.max(tops, axis=0))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    mixed = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, splits, PARTIALS):
        split = (start + tl.arange(0, PARTIALS)).to(tl.int64)
        row = split * batch + b
        tops = tl.load(tops_ptr + row, mask=split < splits, other=float("-inf"))
        scale = tl.exp(tops - base)
        total += tl.sum(tl.load(totals_ptr + row, mask=split < splits, other=0.0) * scale, axis=0)
        mask = (split < splits)[:, None] & (column < columns)[None, :]
        part = tl.load(mixed_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
        mixed += tl.sum(part * scale[:, None], axis=0)
    # The total is 0 if no slot is filled.
    y = tl.where(total == 0, 0.0, tl.div_rn(mixed, tl.where(total == 0, 1.0, total)))
    tl.store(y_ptr + b * columns + column, y, mask=column < columns)
    if tl.program_id(1) == 0:
        tl.store(top_ptr + b, base)


@jit
def _slopes_kernel(
    query_ptr, curvature_ptr, coordinates_ptr, states_ptr, memory_coordinates_ptr, memory_states_ptr, form_ptr,
    filled_ptr, memory_filled_ptr, top_ptr, grad_ptr, weights_ptr, slopes_ptr, totals_ptr, products_ptr,
    batch, own, shared, columns, memory_programs, memory_chunks, beta, eps,
    N: tl.constexpr, DIAGONAL: tl.constexpr, BATCHED: tl.constexpr, QUERIES: tl.constexpr, CANDIDATES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Recompute weight = exp(logit - top) for one chunk of candidates, and compute its gradient, slope = grad . state.

    The first `memory_programs` programs have QUERIES queries and a chunk of CANDIDATES shared candidates each. The
    others have one query and a chunk of its own candidates each. A program loops over the columns in tiles of COLUMNS.
    It also stores the sums of weight and of weight * slope over its chunk.
    """
    program = tl.program_id(0)
    queries = (query_ptr, curvature_ptr, form_ptr, top_ptr, grad_ptr)
    results = (weights_ptr, slopes_ptr, totals_ptr, products_ptr)
    sizes = (batch, own + shared, columns, beta, eps)
    if program < memory_programs:
        work = (program, memory_coordinates_ptr, memory_states_ptr, memory_filled_ptr, shared, own, 0)
        _slopes(queries, work, results, sizes, N, DIAGONAL, BATCHED, QUERIES, CANDIDATES, COLUMNS)
    else:
        work = (program - memory_programs, coordinates_ptr, states_ptr, filled_ptr, own, 0, memory_chunks)
        _slopes(queries, work, results, sizes, N, DIAGONAL, BATCHED, 1, CANDIDATES, COLUMNS)


@jit
def _slopes(
    queries, work, results, sizes,
    N: tl.constexpr, DIAGONAL: tl.constexpr, BATCHED: tl.constexpr, QUERIES: tl.constexpr, CANDIDATES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the slopes of one chunk, with tl.dot(grad, states') if QUERIES share it; otherwise QUERIES is 1."""
    SHARED: tl.constexpr = QUERIES > 1
    query_ptr, curvature_ptr, form_ptr, top_ptr, grad_ptr = queries
    place, coordinates_ptr, states_ptr, filled_ptr, count, offset, first_chunk = work
    weights_ptr, slopes_ptr, totals_ptr, products_ptr = results
    batch, all_candidates, columns, beta, eps = sizes
    chunk, tile, b, inside = _place(place, batch, QUERIES)
    c, row, within, live = _candidates(filled_ptr, chunk * CANDIDATES, count, tile, CANDIDATES, SHARED)
    candidate = _load_rows(coordinates_ptr, row[None, :], live[None, :], N)
    # For a single query, summed over the columns only after the loop.
    slope = tl.zeros((QUERIES, CANDIDATES) if SHARED else (CANDIDATES, COLUMNS), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = live[:, None] & (column < columns)[None, :]
        state = tl.load(states_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        mask = inside[:, None] & (column < columns)[None, :]
        grad = tl.load(grad_ptr + b[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if SHARED:
            slope += tl.dot(grad, tl.trans(state), input_precision="ieee")
        else:
            slope += state * grad
    if not SHARED:
        slope = tl.sum(slope, axis=1)[None, :]
    query, curvature, g = _load_queries((query_ptr, curvature_ptr, form_ptr), b, inside, N, DIAGONAL, BATCHED)
    top = tl.load(top_ptr + b, mask=inside, other=0.0)
    speed = _speed(_quadratic(_offsets(candidate, query, live[None, :], N), g, N, DIAGONAL), eps)
    weight = tl.where(live[None, :], tl.exp(curvature[:, None] * speed * -beta - top[:, None]), 0.0)
    mask = inside[:, None] & within[None, :]
    at = b[:, None] * all_candidates + offset + c[None, :]
    tl.store(weights_ptr + at, weight, mask=mask)
    tl.store(slopes_ptr + at, slope, mask=mask)
    row = (first_chunk + chunk).to(tl.int64) * batch + b
    tl.store(totals_ptr + row, tl.sum(weight, axis=1), mask=inside)
    tl.store(products_ptr + row, tl.sum(weight * slope, axis=1), mask=inside)


@jit
def _inverse_total(totals_ptr, b, inside, chunks, batch):
    """Return 1 / total weight of each query, [queries, 1]; 0 if no slot is filled."""
    total = _sum_chunks(totals_ptr, b, inside, chunks, batch)
    return tl.where(total == 0, 0.0, tl.div_rn(tl.zeros_like(total) + 1.0, tl.where(total == 0, 1.0, total)))


@jit
def _sum_chunks(values_ptr, b, inside, chunks, batch):
    """Return the sum of each query's values over all chunks, [queries, 1]."""
    total = tl.zeros_like(b[:, None]).to(tl.float32)
    for start in range(0, chunks, PARTIALS):
        chunk = (start + tl.arange(0, PARTIALS)).to(tl.int64)
        mask = inside[:, None] & (chunk < chunks)[None, :]
        some = tl.load(values_ptr + chunk[None, :] * batch + b[:, None], mask=mask, other=0.0)
        total += tl.sum(some, axis=1)[:, None]
    return total


@jit
def _backward_kernel(
    query_ptr, curvature_ptr, coordinates_ptr, states_ptr, memory_coordinates_ptr, memory_states_ptr, form_ptr,
    filled_ptr, memory_filled_ptr, grad_ptr, weights_ptr, slopes_ptr, totals_ptr, products_ptr, d_coordinates_ptr,
    d_states_ptr, d_memory_coordinates_ptr, d_memory_states_ptr, partial_ptr,
    batch, own, shared, columns, memory_programs, own_programs, memory_chunks, chunks, beta, eps,
    N: tl.constexpr, DIAGONAL: tl.constexpr, BATCHED: tl.constexpr, QUERIES: tl.constexpr, CANDIDATES: tl.constexpr,
    COLUMNS: tl.constexpr, FORM_NEEDED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of all inputs from the weights and slopes of `_slopes_kernel`.

    With w = weight / total weight and mean = sum of w * slope over all candidates of a query:
    d_cost = -beta * w * (slope - mean) and d_state = w * grad. Three kinds of programs follow each other:
    `memory_programs`, with QUERIES queries and a chunk of CANDIDATES shared candidates each; `own_programs`, with one
    query and a chunk of its own candidates each; and one for each [CANDIDATES, COLUMNS] tile of d_memory_states.
    """
    program = tl.program_id(0)
    queries = (query_ptr, curvature_ptr, form_ptr, grad_ptr)
    slopes = (weights_ptr, slopes_ptr, totals_ptr, products_ptr)
    sizes = (batch, own + shared, columns, chunks, beta, eps)
    if program < memory_programs:
        work = (program, memory_coordinates_ptr, memory_filled_ptr, shared, own, 0)
        results = (d_memory_coordinates_ptr, d_memory_states_ptr, partial_ptr)
        _backward(
            queries, work, slopes, results, sizes, N, DIAGONAL, BATCHED, QUERIES, CANDIDATES, COLUMNS, FORM_NEEDED
        )
    elif program < memory_programs + own_programs:
        work = (program - memory_programs, coordinates_ptr, filled_ptr, own, 0, memory_chunks)
        results = (d_coordinates_ptr, d_states_ptr, partial_ptr)
        _backward(queries, work, slopes, results, sizes, N, DIAGONAL, BATCHED, 1, CANDIDATES, COLUMNS, FORM_NEEDED)
    else:
        place = program - memory_programs - own_programs
        inputs, counts = (memory_filled_ptr, grad_ptr, weights_ptr, totals_ptr), (batch, own, shared, columns, chunks)
        _backward_memory_states(inputs, d_memory_states_ptr, place, counts, QUERIES, CANDIDATES, COLUMNS)


@jit
def _backward(
    queries, work, slopes, results, sizes,
    N: tl.constexpr, DIAGONAL: tl.constexpr, BATCHED: tl.constexpr, QUERIES: tl.constexpr, CANDIDATES: tl.constexpr,
    COLUMNS: tl.constexpr, FORM_NEEDED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one chunk's coordinates, and its share of those of query, curvature and metric.

    For a single query (QUERIES is 1), also the gradients of the states of its own candidates.
    """
    SHARED: tl.constexpr = QUERIES > 1
    query_ptr, curvature_ptr, form_ptr, grad_ptr = queries
    place, coordinates_ptr, filled_ptr, count, offset, first_chunk = work
    weights_ptr, slopes_ptr, totals_ptr, products_ptr = slopes
    d_coordinates_ptr, d_states_ptr, partial_ptr = results
    batch, all_candidates, columns, chunks, beta, eps = sizes
    chunk, tile, b, inside = _place(place, batch, QUERIES)
    c, row, within, filled = _candidates(filled_ptr, chunk * CANDIDATES, count, tile, CANDIDATES, SHARED)
    mask = inside[:, None] & within[None, :]
    live = inside[:, None] & filled[None, :]
    candidate = _load_rows(coordinates_ptr, row[None, :], filled[None, :], N)
    query, curvature, g = _load_queries((query_ptr, curvature_ptr, form_ptr), b, inside, N, DIAGONAL, BATCHED)
    d = _offsets(candidate, query, live, N)
    q = _quadratic(d, g, N, DIAGONAL)
    speed = _speed(q, eps)
    inverse = _inverse_total(totals_ptr, b, inside, chunks, batch)
    mean = _sum_chunks(products_ptr, b, inside, chunks, batch) * inverse
    at = b[:, None] * all_candidates + offset + c[None, :]
    weight = tl.load(weights_ptr + at, mask=mask, other=0.0) * inverse
    slope = tl.load(slopes_ptr + at, mask=mask, other=0.0)
    d_cost = tl.where(live, weight * (slope - mean) * -beta, 0.0)
    # As in torch.clamp(min=0), the gradient is 0 for q < 0 and passes at q = 0.
    passes = live & (q >= 0)
    d_q = tl.where(passes, tl.div_rn(d_cost * curvature[:, None], tl.where(passes, 2.0 * speed, 1.0)), 0.0)

    CELLS: tl.constexpr = N if DIAGONAL else N * N
    # batch.to() would fail for batch = 1, which Triton compiles in as a constant.
    width = batch * (N + 1 + (CELLS if FORM_NEEDED else 0))
    partial = partial_ptr + (first_chunk + chunk).to(tl.int64) * width
    tl.store(partial + batch * N + b, tl.sum(tl.where(live, d_cost * speed, 0.0), axis=1), mask=inside)
    form = partial + batch * (N + 1) + b * CELLS
    d_coordinate = d_coordinates_ptr + (tile.to(tl.int64) * count + c) * N
    for i in tl.static_range(N):
        if DIAGONAL:
            along = 2.0 * (d[i] * g[i])
        else:
            along = 2.0 * (d[i] * g[i * N + i])
            for j in tl.static_range(N):
                if i != j:
                    along += d[j] * g[i * N + j]
        d_i = tl.where(live, d_q * along, 0.0)
        tl.store(d_coordinate + i, tl.sum(d_i, axis=0), mask=within)
        tl.store(partial + b * N + i, -tl.sum(d_i, axis=1), mask=inside)
        if FORM_NEEDED:
            if DIAGONAL:
                tl.store(form + i, tl.sum(d_q * d[i] * d[i], axis=1), mask=inside)
            else:
                for j in tl.static_range(i, N):
                    cell = tl.sum(d_q * d[i] * d[j], axis=1)
                    tl.store(form + (i * N + j), cell, mask=inside)
                    if i != j:
                        tl.store(form + (j * N + i), cell, mask=inside)
    if not SHARED:
        for start in range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            grad = tl.load(grad_ptr + b * columns + column, mask=column < columns, other=0.0).to(tl.float32)
            # An empty slot's gradient is 0 even if the output's is not finite.
            d_state = tl.where(filled[:, None], tl.trans(weight) * grad[None, :], 0.0)
            stored = within[:, None] & (column < columns)[None, :]
            tl.store(d_states_ptr + row[:, None] * columns + column[None, :], d_state, mask=stored)


@jit
def _backward_memory_states(
    inputs, d_states_ptr, place, counts, QUERIES: tl.constexpr, CANDIDATES: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute a [CANDIDATES, COLUMNS] tile of d_memory_states = w' grad; loop over the queries in tiles of QUERIES."""
    filled_ptr, grad_ptr, weights_ptr, totals_ptr = inputs
    batch, own, shared, columns, chunks = counts
    column_tiles = tl.cdiv(columns, COLUMNS)
    column = (place % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    c = ((place // column_tiles) * CANDIDATES + tl.arange(0, CANDIDATES)).to(tl.int64)
    within = c < shared
    live = tl.load(filled_ptr + c, mask=within, other=0) != 0
    d_state = tl.zeros((CANDIDATES, COLUMNS), dtype=tl.float32)
    for start in range(0, batch, QUERIES):
        b = (start + tl.arange(0, QUERIES)).to(tl.int64)
        inside = b < batch
        row = b[:, None] * (own + shared) + own + c[None, :]
        weight = tl.load(weights_ptr + row, mask=inside[:, None] & within[None, :], other=0.0)
        weight *= _inverse_total(totals_ptr, b, inside, chunks, batch)
        mask = inside[:, None] & (column < columns)[None, :]
        grad = tl.load(grad_ptr + b[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        d_state += tl.dot(tl.trans(weight), grad, input_precision="ieee")
    mask = within[:, None] & (column < columns)[None, :]
    d_state = tl.where(live[:, None], d_state, 0.0)
    tl.store(d_states_ptr + c[:, None] * columns + column[None, :], d_state, mask=mask)
