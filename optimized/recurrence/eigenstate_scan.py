"""A diagonal complex recurrence over time, in chunks that run beside each other (eigenstate_lm, 004.8 and 004.12)."""

import math

import torch
from torch.nn import functional

from optimized.kernels import ceil_div, jit, launching, tl, use_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = 64
"""Steps of the plain form's chunks: the work within one grows with it, the steps between them fall."""
SHORTEST, LENGTH = 8, 64
"""Steps of the kernels' chunks, by T."""
UNROLLED = 8
"""Of them, those that are loaded together."""
CHUNKS, STATES = 16, 32
"""What a program works on at once; a row of 32 states is a warp's 128 bytes of float32."""
AT_ONCE = 32
"""Programs before its own that one looks at in a step."""
UNWRITTEN = 0x7FFFDEAD
"""A NaN's bits that no arithmetic gives: what a program has not added yet."""


def eigenstate_scan(
    beta: torch.Tensor, eigenvalues: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`c_t = λ c_{t−1} + β_t` from `c_{−1}`: (Re c_t of every step [B, T, K], the last c [B, K, 2]).

    Chunks of steps run beside each other, each from 0, for what it adds to the state at its end; the states between
    them are put together in float64, and each runs once more from the state that it begins with. No power of λ is
    ever divided by, so that any |λ| ≤ 1 will do.

    float32, bfloat16 or float16 on CUDA, with a float32 state, takes two Triton kernels, one forward and one backward.
    Each reads a chunk from memory once, and again from the cache when what earlier ones add has been awaited. They
    are deterministic, keep the states between chunks and nothing of each step, and have no second derivative. All
    else takes the plain form.

    beta         [B, T, K], real
    eigenvalues  [K, 2]: λ as (real, imaginary), |λ| ≤ 1
    state        [B, K, 2]: c_{−1} likewise; its dtype is what is computed in

    Source: eigenstate_lm, techniques 004.8 and 004.12, which expect 53.9 times a loop.
    """
    served = use_triton(beta, dtypes=DTYPES) and use_triton(state, eigenvalues)
    return (eigenstate_scan_triton if served else eigenstate_scan_chunked)(beta, eigenvalues, state)


# --- plain PyTorch --------------------------------------------------------------------------------------------------


def eigenstate_scan_chunked(
    beta: torch.Tensor, eigenvalues: torch.Tensor, state: torch.Tensor, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """`eigenstate_scan` in PyTorch operations, on any device and dtype: within a chunk a product with λ's powers."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: a chunk has at least one step")
    B, T, K = beta.shape
    if not beta.numel():
        return torch.empty_like(beta), state.clone(memory_format=torch.contiguous_format)
    dtype, L = state.dtype, min(chunk, T)
    count = ceil_div(T, L)
    x = functional.pad(beta.to(dtype), (0, 0, 0, count * L - T)).view(B, count, L, K)
    powers = [p.double() for p in eigenvalues.unbind(-1)]
    wide = _powers(*powers, L + 1)
    real, imaginary = (p.to(dtype) for p in wide)  # [L + 1, K]
    # Of the state at a chunk's end, what its steps have added.
    ends = [torch.einsum("sk,bjsk->bjk", p[:L].flip(0), x[:, :-1]).double() for p in (real, imaginary)]
    carried = _carried(ends, (wide[0][L], wide[1][L]), state.double())
    begin, turned = (c.to(dtype) for c in carried)  # [B, count, K]
    step = torch.arange(L, device=beta.device)
    since = step[:, None] - step
    weight = real[since.clamp(min=0)].masked_fill((since < 0)[..., None], 0.0)  # [t, s, K]
    every = torch.einsum("tsk,bjsk->bjtk", weight, x)
    every = every + real[1:] * begin[:, :, None] - imaginary[1:] * turned[:, :, None]
    rest = T - (count - 1) * L
    last, begin, turned = x[:, -1, :rest], begin[:, -1], turned[:, -1]
    final = [torch.einsum("sk,bsk->bk", p[:rest].flip(0), last) for p in (real, imaginary)]
    final[0] = final[0] + real[rest] * begin - imaginary[rest] * turned
    final[1] = final[1] + real[rest] * turned + imaginary[rest] * begin
    return every.reshape(B, count * L, K)[:, :T].to(beta.dtype).contiguous(), torch.stack(final, -1)


def _powers(real: torch.Tensor, imaginary: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """λ⁰ to λ^(count − 1), [count, K] each."""
    every = torch.ones_like(real)[None], torch.zeros_like(real)[None]
    while len(every[0]) < count:
        every = tuple(torch.cat(pair) for pair in zip(every, _product((real, imaginary), every), strict=True))
        real, imaginary = _product((real, imaginary), (real, imaginary))
    return every[0][:count], every[1][:count]


def _carried(ends, power, state):
    """The states before each chunk, [B, chunks, K] each: doubled, from what each chunk adds and λ to its length."""
    found = [torch.cat((s[:, None], e), 1) for s, e in zip(state.unbind(-1), ends, strict=True)]
    reach = 1
    while reach < found[0].shape[1]:
        earlier = _product(power, [f[:, :-reach] for f in found])
        found = [torch.cat((f[:, :reach], f[:, reach:] + e), 1) for f, e in zip(found, earlier, strict=True)]
        power, reach = _product(power, power), 2 * reach
    return found


def _product(a, b):
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


# --- Triton ---------------------------------------------------------------------------------------------------------


def eigenstate_scan_triton(
    beta: torch.Tensor, eigenvalues: torch.Tensor, state: torch.Tensor, length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`eigenstate_scan` by the Triton kernels; `length`, a power of two, is of their chunks."""
    if not beta.numel():
        return torch.empty_like(beta), state.clone(memory_format=torch.contiguous_format)
    return _EigenstateScan.apply(beta, eigenvalues, state, length or _length(beta.shape[1]))


def _length(T):
    """Of few steps more chunks than steps in one: they are what runs beside each other."""
    return max(SHORTEST, min(LENGTH, _power_of_two(math.isqrt(T)) // 2))


class _EigenstateScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, beta, eigenvalues, state, length):
        beta, eigenvalues, state = beta.contiguous(), eigenvalues.contiguous(), state.contiguous()
        B, T, K = beta.shape
        every, final = torch.empty_like(beta), torch.empty_like(state)
        carries = torch.empty((2, B, ceil_div(T, length), K), dtype=state.dtype, device=beta.device)
        work = _Work(B, T, K, length, beta.device)
        with launching(beta):
            _forward_kernel[work.grid](
                beta, eigenvalues, state, carries, every, final, work.board, T, K, *work.sizes, **work.options
            )
        ctx.save_for_backward(beta, eigenvalues, carries)
        ctx.length = length
        return every, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_final):
        beta, eigenvalues, carries = ctx.saved_tensors
        B, T, K = beta.shape
        grad, grad_final = grad.contiguous(), grad_final.contiguous()
        d_beta, d_state = torch.empty_like(beta), torch.empty_like(grad_final)
        work = _Work(B, T, K, ctx.length, beta.device)
        parts = torch.empty((B * work.groups, K, 2), dtype=carries.dtype, device=beta.device)
        handed = torch.empty_like(carries)
        with launching(beta):
            _backward_kernel[work.grid](
                beta,
                grad,
                eigenvalues,
                grad_final,
                carries,
                handed,
                d_beta,
                d_state,
                parts,
                work.board,
                T,
                K,
                *work.sizes,
                **work.options,
            )
        d_eigenvalues = parts.sum(0, dtype=torch.float64).to(eigenvalues.dtype) if ctx.needs_input_grad[1] else None
        return d_beta, d_eigenvalues, d_state, None


class _Work:
    """How the steps are dealt out: a group of chunks of some states of an item is a program's."""

    def __init__(self, B, T, K, length, device):
        chunks = min(CHUNKS, _power_of_two(ceil_div(T, length)))
        states = min(STATES, _power_of_two(K))
        self.groups = ceil_div(T, chunks * length)
        columns = B * ceil_div(K, states)
        self.grid = (self.groups * columns,)
        # What each group adds, in two planes, and behind them which program comes next.
        self.board = torch.full((2 * B * self.groups * K + 1,), UNWRITTEN, dtype=torch.int32, device=device)
        # Items and groups; a plane of the board and one of what is there once a chunk. From the host, since a kernel's
        # argument of 1 is a plain number there, which cannot be widened.
        self.sizes = B, self.groups, B * self.groups * K, B * ceil_div(T, length) * K
        self.options = {
            "LENGTH": length,
            "CHUNKS": chunks,
            "STATES": states,
            "AT_ONCE": min(AT_ONCE, _power_of_two(self.groups)),
            "UNROLLED": min(UNROLLED, length),
            "UNWRITTEN": UNWRITTEN,
            "num_warps": max(1, chunks * states // 32),
        }


def _power_of_two(n):
    """The least that is no smaller."""
    return 1 << (n - 1).bit_length()


@jit
def _product_of(a, a_turn, b, b_turn):
    """Of complex numbers."""
    return a * b - a_turn * b_turn, a * b_turn + a_turn * b


@jit
def _combined(a, a_turn, a_real, a_imaginary, b, b_turn, b_real, b_imaginary):
    """`c → a c + real` after an earlier one, as one."""
    both, both_turn = _product_of(b, b_turn, a, a_turn)
    real, imaginary = _product_of(b, b_turn, a_real, a_imaginary)
    return both, both_turn, real + b_real, imaginary + b_imaginary


@jit
def _power(across, turn, exponent, MOST: tl.constexpr):
    """λ to whole numbers of at most MOST, a power of two; of the exponents' shape."""
    real = (exponent * 0 + across * 0.0) + 1.0
    imaginary = exponent * 0 + across * 0.0
    for i in tl.static_range(32):
        if (1 << i) <= MOST:
            more, turned = _product_of(across, turn, real, imaginary)
            taken = (exponent >> i) % 2 == 1
            real = tl.where(taken, more, real)
            imaginary = tl.where(taken, turned, imaginary)
            across, turn = _product_of(across, turn, across, turn)
    return real, imaginary


@jit
def _begun(board_ptr, K, items, board_plane, STATES: tl.constexpr, UNWRITTEN: tl.constexpr):
    """(which group in their order, item, states [1, STATES]) this program is for.

    By the order in which programs have begun, so that all that one waits for are under way.
    """
    columns = tl.cdiv(K, STATES)
    program = tl.atomic_add(board_ptr + 2 * board_plane, 1) - UNWRITTEN
    state = (program % columns * STATES + tl.arange(0, STATES))[None, :]
    return program // (items * columns), (program // columns % items).to(tl.int64), state


@jit
def _chunks_of(group, item, state, T, K, LENGTH: tl.constexpr, CHUNKS: tl.constexpr):
    """(its chunks [CHUNKS, 1], steps left of each, offsets of their first steps and of what is there once a chunk).

    The last three are [CHUNKS, STATES]; where there is no such chunk or state, no step is left.
    """
    chunk = group * CHUNKS + tl.arange(0, CHUNKS)[:, None]
    left = tl.where((chunk * LENGTH < T) & (state < K), T - chunk * LENGTH, 0)
    return chunk, left, (item * T + chunk * LENGTH) * K + state, (item * tl.cdiv(T, LENGTH) + chunk) * K + state


@jit
def _awaited(
    board_ptr,
    state,
    item,
    near,
    step,
    count,
    across,
    turn,
    K,
    groups,
    board_plane,
    STATES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    UNWRITTEN: tl.constexpr,
):
    """What `count` groups add together to the state of one, in float64, [1, STATES]; the nearest is `near`.

    step         from a group to the next farther one: −1 or 1
    across, turn  λ to a group's length
    """
    row = tl.arange(0, AT_ONCE)[:, None]
    # The last row is the nearest: of the first look alone rows may be missing, those that would be farthest.
    weight, weight_turn = _power(across, turn, AT_ONCE - 1 - row, AT_ONCE)
    all_rows, all_turn = _power(across, turn, tl.full([1, STATES], AT_ONCE, tl.int32), AT_ONCE)
    real = tl.zeros([1, STATES], tl.float64)
    imaginary = tl.zeros([1, STATES], tl.float64)
    looks = tl.cdiv(count, AT_ONCE)
    for look in range(looks):
        distance = (looks - 1 - look) * AT_ONCE + (AT_ONCE - 1 - row)
        mask = (distance < count) & (state < K)
        at = board_ptr + (item * groups + near + step * distance) * K + state
        bits = tl.full([AT_ONCE, STATES], UNWRITTEN, tl.int32)
        bits_imaginary = bits
        waiting = 1
        while waiting > 0:
            bits = tl.load(at, mask=mask, other=0, volatile=True)
            bits_imaginary = tl.load(at + board_plane, mask=mask, other=0, volatile=True)
            unwritten = (bits == UNWRITTEN) | (bits_imaginary == UNWRITTEN)
            waiting = tl.sum(tl.sum(unwritten.to(tl.int32), 1), 0)
        added = bits.to(tl.float32, bitcast=True).to(tl.float64)
        added_imaginary = bits_imaginary.to(tl.float32, bitcast=True).to(tl.float64)
        more, turned = _product_of(weight, weight_turn, added, added_imaginary)
        real, imaginary = _product_of(all_rows, all_turn, real, imaginary)
        real += tl.sum(more, 0)[None, :]
        imaginary += tl.sum(turned, 0)[None, :]
    return real, imaginary


@jit
def _add(board_ptr, state, item, group, real, imaginary, K, groups, board_plane):
    """Tell the others what a group adds. Each value tells for itself that it is there."""
    at = board_ptr + (item * groups + group) * K + state
    tl.store(at, real.to(tl.float32).to(tl.int32, bitcast=True), mask=state < K)
    tl.store(at + board_plane, imaginary.to(tl.float32).to(tl.int32, bitcast=True), mask=state < K)


@jit
def _together(
    one,
    one_turn,
    real,
    imaginary,
    LENGTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    STATES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """What a group's chunks add: (λ to a chunk's length, to the group's, up to each chunk, in all), in float64."""
    wide, wide_turn = _power(
        one.to(tl.float64), one_turn.to(tl.float64), tl.full([1, STATES], LENGTH, tl.int32), LENGTH
    )
    whole, whole_turn = _power(wide, wide_turn, tl.full([1, STATES], CHUNKS, tl.int32), CHUNKS)
    _, _, added, added_imaginary = tl.associative_scan(
        (
            tl.broadcast_to(wide, [CHUNKS, STATES]),
            tl.broadcast_to(wide_turn, [CHUNKS, STATES]),
            real.to(tl.float64),
            imaginary.to(tl.float64),
        ),
        0,
        _combined,
        reverse=REVERSE,
    )
    last = tl.arange(0, CHUNKS)[:, None] == (0 if REVERSE else CHUNKS - 1)
    own = tl.sum(tl.where(last, added, 0.0), 0)[None, :]
    own_imaginary = tl.sum(tl.where(last, added_imaginary, 0.0), 0)[None, :]
    return wide, wide_turn, whole, whole_turn, added, added_imaginary, own, own_imaginary


@jit
def _forward_kernel(
    beta_ptr,
    eigenvalues_ptr,
    state_ptr,
    carries_ptr,
    every_ptr,
    final_ptr,
    board_ptr,
    T,
    K,
    items,
    groups,
    board_plane,
    plane,
    LENGTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    STATES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    UNROLLED: tl.constexpr,
    UNWRITTEN: tl.constexpr,
):
    group, item, state = _begun(board_ptr, K, items, board_plane, STATES, UNWRITTEN)
    chunk, left, steps, chunks = _chunks_of(group, item, state, T, K, LENGTH, CHUNKS)
    there, row, live = state < K, tl.arange(0, CHUNKS)[:, None], left > 0
    count = tl.cdiv(T, LENGTH)
    one = tl.load(eigenvalues_ptr + 2 * state, mask=there, other=0.0)
    one_turn = tl.load(eigenvalues_ptr + 2 * state + 1, mask=there, other=0.0)
    across = tl.broadcast_to(one, [CHUNKS, STATES])
    turn = tl.broadcast_to(one_turn, [CHUNKS, STATES])
    real = tl.zeros([CHUNKS, STATES], tl.float32)
    imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    for start in range(0, LENGTH, UNROLLED):
        for j in tl.static_range(UNROLLED):
            i = start + j
            real, imaginary = _product_of(across, turn, real, imaginary)
            real += tl.load(beta_ptr + steps + i * K, mask=left > i, other=0.0).to(tl.float32)
    # From here to the states that the chunks begin with, in float64.
    wide, wide_turn, whole, whole_turn, real, imaginary, own, own_imaginary = _together(
        one, one_turn, real, imaginary, LENGTH, CHUNKS, STATES, REVERSE=False
    )
    boundary = (item * K + state) * 2
    if group == 0:
        carried = tl.load(state_ptr + boundary, mask=there, other=0.0).to(tl.float64)
        carried_imaginary = tl.load(state_ptr + boundary + 1, mask=there, other=0.0).to(tl.float64)
        more, turned = _product_of(whole, whole_turn, carried, carried_imaginary)
        _add(board_ptr, state, item, group, own + more, own_imaginary + turned, K, groups, board_plane)
    else:
        _add(board_ptr, state, item, group, own, own_imaginary, K, groups, board_plane)
        carried, carried_imaginary = _awaited(
            board_ptr,
            state,
            item,
            group - 1,
            -1,
            group,
            whole,
            whole_turn,
            K,
            groups,
            board_plane,
            STATES,
            AT_ONCE,
            UNWRITTEN,
        )
    # A chunk begins with what those before it in the group add: each hands its own to the next.
    handed = (row < CHUNKS - 1) & (chunk + 1 < count) & there
    tl.store(carries_ptr + chunks + K, real.to(tl.float32), mask=handed)
    tl.store(carries_ptr + plane + chunks + K, imaginary.to(tl.float32), mask=handed)
    tl.debug_barrier()
    before = tl.load(carries_ptr + chunks, mask=live & (row > 0), other=0.0).to(tl.float64)
    before_imaginary = tl.load(carries_ptr + plane + chunks, mask=live & (row > 0), other=0.0).to(tl.float64)
    power, power_turn = _power(wide, wide_turn, row, CHUNKS)
    more, turned = _product_of(power, power_turn, carried, carried_imaginary)
    real = (before + more).to(tl.float32)
    imaginary = (before_imaginary + turned).to(tl.float32)
    tl.debug_barrier()
    tl.store(carries_ptr + chunks, real, mask=live)
    tl.store(carries_ptr + plane + chunks, imaginary, mask=live)
    for start in range(0, LENGTH, UNROLLED):
        for j in tl.static_range(UNROLLED):
            i = start + j
            valid = left > i
            beta = tl.load(beta_ptr + steps + i * K, mask=valid, other=0.0).to(tl.float32)
            stepped, stepped_turn = _product_of(across, turn, real, imaginary)
            real = tl.where(valid, stepped + beta, real)
            imaginary = tl.where(valid, stepped_turn, imaginary)
            tl.store(every_ptr + steps + i * K, real.to(every_ptr.dtype.element_ty), mask=valid)
    last = live & (chunk == count - 1)
    tl.store(final_ptr + boundary + 0 * row, real, mask=last)
    tl.store(final_ptr + boundary + 1 + 0 * row, imaginary, mask=last)


@jit
def _backward_kernel(
    beta_ptr,
    grad_ptr,
    eigenvalues_ptr,
    grad_final_ptr,
    carries_ptr,
    handed_ptr,
    d_beta_ptr,
    d_state_ptr,
    parts_ptr,
    board_ptr,
    T,
    K,
    items,
    groups,
    board_plane,
    plane,
    LENGTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    STATES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    UNROLLED: tl.constexpr,
    UNWRITTEN: tl.constexpr,
):
    """The same from the end, with λ's conjugate.

    λ's own gradient is the sum of g_t times the conjugate of c_{t−1}. Going forward, it is the sum of what comes into
    each step times the conjugate of dc_t/dλ within the chunk: so no state of a step has to be kept for the way back.
    """
    order, item, state = _begun(board_ptr, K, items, board_plane, STATES, UNWRITTEN)
    group = groups - 1 - order
    chunk, left, steps, chunks = _chunks_of(group, item, state, T, K, LENGTH, CHUNKS)
    there, row, live = state < K, tl.arange(0, CHUNKS)[:, None], left > 0
    count = tl.cdiv(T, LENGTH)
    one = tl.load(eigenvalues_ptr + 2 * state, mask=there, other=0.0)
    one_turn = tl.load(eigenvalues_ptr + 2 * state + 1, mask=there, other=0.0)
    across = tl.broadcast_to(one, [CHUNKS, STATES])
    turn = tl.broadcast_to(one_turn, [CHUNKS, STATES])
    real = tl.zeros([CHUNKS, STATES], tl.float32)
    imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    for start in range(0, LENGTH, UNROLLED):
        for j in tl.static_range(UNROLLED):
            i = LENGTH - 1 - start - j
            real += tl.load(grad_ptr + steps + i * K, mask=left > i, other=0.0).to(tl.float32)
            real, imaginary = _product_of(across, -turn, real, imaginary)
    _, _, whole, whole_turn, real, imaginary, own, own_imaginary = _together(
        one, -one_turn, real, imaginary, LENGTH, CHUNKS, STATES, REVERSE=True
    )
    # Steps from each chunk's end to the group's, of which the last may be cut short.
    ends = tl.minimum(T, (group + 1) * CHUNKS * LENGTH)
    short, short_turn = _power(
        one.to(tl.float64), -one_turn.to(tl.float64), tl.maximum(ends - (chunk + 1) * LENGTH, 0), CHUNKS * LENGTH
    )
    boundary = (item * K + state) * 2
    if group == groups - 1:
        carried = tl.load(grad_final_ptr + boundary, mask=there, other=0.0).to(tl.float64)
        carried_imaginary = tl.load(grad_final_ptr + boundary + 1, mask=there, other=0.0).to(tl.float64)
        rest, rest_turn = _power(
            one.to(tl.float64),
            -one_turn.to(tl.float64),
            tl.full([1, STATES], 0, tl.int32) + (ends - group * CHUNKS * LENGTH),
            CHUNKS * LENGTH,
        )
        more, turned = _product_of(rest, rest_turn, carried, carried_imaginary)
        own += more
        own_imaginary += turned
        _add(board_ptr, state, item, group, own, own_imaginary, K, groups, board_plane)
    else:
        _add(board_ptr, state, item, group, own, own_imaginary, K, groups, board_plane)
        carried, carried_imaginary = _awaited(
            board_ptr,
            state,
            item,
            group + 1,
            1,
            groups - 1 - group,
            whole,
            whole_turn,
            K,
            groups,
            board_plane,
            STATES,
            AT_ONCE,
            UNWRITTEN,
        )
        more, turned = _product_of(whole, whole_turn, carried, carried_imaginary)
        own += more
        own_imaginary += turned
    if group == 0:
        tl.store(d_state_ptr + boundary, own.to(tl.float32), mask=there)
        tl.store(d_state_ptr + boundary + 1, own_imaginary.to(tl.float32), mask=there)
    # What comes back into a chunk's last step: from those after it in the group, each of which hands its own on, and
    # from the groups after.
    tl.store(handed_ptr + chunks, real.to(tl.float32), mask=live)
    tl.store(handed_ptr + plane + chunks, imaginary.to(tl.float32), mask=live)
    tl.debug_barrier()
    handed = (row < CHUNKS - 1) & (chunk + 1 < count) & there
    after = tl.load(handed_ptr + chunks + K, mask=handed, other=0.0).to(tl.float64)
    after_imaginary = tl.load(handed_ptr + plane + chunks + K, mask=handed, other=0.0).to(tl.float64)
    begin = tl.load(carries_ptr + chunks, mask=live, other=0.0)
    begin_imaginary = tl.load(carries_ptr + plane + chunks, mask=live, other=0.0)
    more, turned = _product_of(short, short_turn, carried, carried_imaginary)
    back = (after + more).to(tl.float32)
    back_imaginary = (after_imaginary + turned).to(tl.float32)
    slope = tl.zeros([CHUNKS, STATES], tl.float32)
    slope_imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    part = tl.zeros([CHUNKS, STATES], tl.float32)
    part_imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    for start in range(0, LENGTH, UNROLLED):
        for j in tl.static_range(UNROLLED):
            i = start + j
            valid = left > i
            beta = tl.load(beta_ptr + steps + i * K, mask=valid, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + steps + i * K, mask=valid, other=0.0).to(tl.float32)
            stepped, stepped_turn = _product_of(across, turn, slope, slope_imaginary)
            slope = tl.where(valid, stepped + begin, slope)
            slope_imaginary = tl.where(valid, stepped_turn + begin_imaginary, slope_imaginary)
            begin, begin_imaginary = _product_of(across, turn, begin, begin_imaginary)
            begin += beta
            part += grad * slope
            part_imaginary -= grad * slope_imaginary
    # Of a chunk beyond the end nothing is there to be summed.
    part = tl.where(live, part + back * slope + back_imaginary * slope_imaginary, 0.0)
    part_imaginary = tl.where(live, part_imaginary + back_imaginary * slope - back * slope_imaginary, 0.0)
    at = parts_ptr + ((item * groups + group) * K + state) * 2
    tl.store(at, tl.sum(part, 0)[None, :], mask=there)
    tl.store(at + 1, tl.sum(part_imaginary, 0)[None, :], mask=there)
    for start in range(0, LENGTH, UNROLLED):
        for j in tl.static_range(UNROLLED):
            i = LENGTH - 1 - start - j
            valid = left > i
            reached = back + tl.load(grad_ptr + steps + i * K, mask=valid, other=0.0).to(tl.float32)
            tl.store(d_beta_ptr + steps + i * K, reached.to(d_beta_ptr.dtype.element_ty), mask=valid)
            stepped, stepped_turn = _product_of(across, -turn, reached, back_imaginary)
            back = tl.where(valid, stepped, back)
            back_imaginary = tl.where(valid, stepped_turn, back_imaginary)
