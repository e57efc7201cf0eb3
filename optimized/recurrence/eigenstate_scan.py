"""A diagonal complex recurrence over time, in chunks that run in parallel (eigenstate_lm, 004.8 and 004.12)."""

import torch
from torch.nn import functional

from optimized.kernels import ceil_div, jit, launching, tl, use_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = 64
"""Steps per chunk of the PyTorch form. A longer chunk costs more work, but leaves fewer chunks to combine."""
LENGTH, CHUNKS, STATES = 32, 32, 16
"""Steps per chunk of the kernels; chunks and states that one program processes."""
VECTOR = 4
"""Consecutive states that a thread loads at once, 16 bytes in float32. It does so for all steps of its chunk."""
AT_ONCE = 8
"""Groups per run, at least. The last group of a run, and group 0, publish their final state; all others publish what
they add to the state."""
FEW = 8
"""Steps whose inputs the backward kernel loads at a time, before it uses them."""
UNWRITTEN = 0x7FFFDEAD
"""Bits of a NaN that no arithmetic produces. They mark a slot that has not been written yet."""


def eigenstate_scan(
    beta: torch.Tensor, eigenvalues: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `c_t = λ c_{t−1} + β_t` from `c_{−1}`; return (Re c_t of every step [B, T, K], the last c [B, K, 2]).

    The steps are split into chunks that run in parallel. First, each chunk runs from the state 0, which yields what it
    adds to the state at its end. Then the states between chunks are computed from these sums in float64, and each chunk
    runs again from the state before it. Nothing is divided by a power of λ, so any |λ| ≤ 1 works.

    On CUDA, two Triton kernels, one forward and one backward, serve beta in float32, bfloat16 or float16 with a float32
    state and float32 eigenvalues. A program reads its chunks once and keeps them in registers while it waits for the
    sums of earlier chunks. The kernels are deterministic. For the backward pass they save the inputs and the states
    between chunks, but no state within a chunk. There is no second derivative. All other inputs use
    `eigenstate_scan_chunked`.

    beta         [B, T, K], real
    eigenvalues  [K, 2]: λ as (real, imaginary), |λ| ≤ 1
    state        [B, K, 2]: c_{−1} as (real, imaginary); its dtype is the dtype of the computation

    Source: eigenstate_lm, techniques 004.8 and 004.12, which expect 53.9 times the speed of a loop.
    """
    served = use_triton(beta, dtypes=DTYPES) and use_triton(state, eigenvalues)
    return (eigenstate_scan_triton if served else eigenstate_scan_chunked)(beta, eigenvalues, state)


# --- plain PyTorch --------------------------------------------------------------------------------------------------


def eigenstate_scan_chunked(
    beta: torch.Tensor, eigenvalues: torch.Tensor, state: torch.Tensor, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """`eigenstate_scan` in PyTorch operations, on any device and in any dtype.

    Within a chunk, it multiplies the inputs by powers of λ. A non-finite input therefore also affects earlier steps of
    its chunk. ValueError if `chunk` is below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: a chunk has at least one step")
    with torch.autocast(beta.device.type, enabled=False):  # compute in the state's dtype
        return _chunked(beta, eigenvalues, state, chunk)


def _chunked(beta, eigenvalues, state, chunk):
    B, T, K = beta.shape
    state = state.expand(B, K, 2)
    if not T:
        return beta.clone(memory_format=torch.contiguous_format), state.clone(memory_format=torch.contiguous_format)
    dtype, L = state.dtype, min(chunk, T)
    count = ceil_div(T, L)
    x = functional.pad(beta.to(dtype), (0, 0, 0, count * L - T)).view(B, count, L, K)
    powers = [p.double() for p in eigenvalues.unbind(-1)]
    wide = _powers(*powers, L + 1)
    real, imaginary = (p.to(dtype) for p in wide)  # [L + 1, K]
    # What the steps of a chunk add to the state at its end.
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
    """Return λ⁰ to λ^(count − 1) as (real, imaginary), [count, K] each, by repeated doubling."""
    every = torch.ones_like(real)[None], torch.zeros_like(real)[None]
    while len(every[0]) < count:
        every = tuple(torch.cat(pair) for pair in zip(every, _product((real, imaginary), every), strict=True))
        real, imaginary = _product((real, imaginary), (real, imaginary))
    return every[0][:count], every[1][:count]


def _carried(ends, power, state):
    """Compute the state before each chunk as [real, imaginary], [B, chunks, K] each, by a scan in log2(chunks) passes.

    ends   what each chunk except the last adds to the state at its end
    power  λ to the power of the chunk length
    """
    found = [torch.cat((s[:, None], e), 1) for s, e in zip(state.unbind(-1), ends, strict=True)]
    reach = 1
    while reach < found[0].shape[1]:
        earlier = _product(power, [f[:, :-reach] for f in found])
        found = [torch.cat((f[:, :reach], f[:, reach:] + e), 1) for f, e in zip(found, earlier, strict=True)]
        power, reach = _product(power, power), 2 * reach
    return found


def _product(a, b):
    """Multiply complex numbers, each given as (real, imaginary)."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


# --- Triton ---------------------------------------------------------------------------------------------------------


def eigenstate_scan_triton(
    beta: torch.Tensor, eigenvalues: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`eigenstate_scan` with the Triton kernels."""
    if not beta.numel():  # no program would run
        return eigenstate_scan_chunked(beta, eigenvalues, state)
    B, _, K = beta.shape
    return _EigenstateScan.apply(beta, eigenvalues.expand(K, 2), state.expand(B, K, 2))


class _EigenstateScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, beta, eigenvalues, state):
        beta, eigenvalues, state = beta.contiguous(), eigenvalues.contiguous(), state.contiguous()
        B, T, K = beta.shape
        every, final = torch.empty_like(beta), torch.empty_like(state)
        work = _Work(B, T, K, beta.device)
        # Real and imaginary parts are in separate planes. If they were interleaved, each thread would hold one pair,
        # and every step would go through shared memory to match that layout.
        begins = torch.empty((2, B, work.chunks, K), dtype=state.dtype, device=beta.device)
        with launching(beta):
            _forward_kernel[work.grid](
                beta, eigenvalues, state, begins, every, final, work.board, T, K, *work.sizes, **work.options
            )
        ctx.save_for_backward(beta, eigenvalues, begins)
        return every, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_final):
        beta, eigenvalues, begins = ctx.saved_tensors
        B, T, K = beta.shape
        grad, grad_final = grad.contiguous(), grad_final.contiguous()
        d_beta, d_state = torch.empty_like(beta), torch.empty_like(grad_final)
        work = _Work(B, T, K, beta.device)
        parts = torch.empty((K, 2, B * work.groups), dtype=begins.dtype, device=beta.device)
        with launching(beta):
            _backward_kernel[work.grid](
                beta,
                grad,
                eigenvalues,
                grad_final,
                begins,
                d_beta,
                d_state,
                parts,
                work.board,
                T,
                K,
                *work.sizes,
                FEW=work.few,
                **work.options,
            )
        d_eigenvalues = parts.sum(-1) if ctx.needs_input_grad[1] else None
        return d_beta, d_eigenvalues, d_state


class _Work:
    """Launch parameters and the board. One program processes a group of chunks of one batch item, for some states."""

    def __init__(self, B, T, K, device):
        length = min(LENGTH, _power_of_two(T))
        chunks = min(CHUNKS, _power_of_two(ceil_div(T, length)))
        states = min(STATES, _power_of_two(K))
        self.groups = ceil_div(T, chunks * length)
        self.chunks = self.groups * chunks
        self.grid = (self.groups * B * ceil_div(K, states),)
        # The board: what each group adds to the state, or its final state; real parts, then imaginary parts.
        self.board = torch.full((2, B * self.groups, K), UNWRITTEN, dtype=torch.int32, device=device)
        # Items, groups, elements of a plane of the board, elements of a plane of `begins`. The host multiplies them:
        # Triton makes an argument of 1 a Python int, which a kernel cannot cast to int64.
        self.sizes = B, self.groups, B * self.groups * K, B * self.chunks * K
        self.few = min(FEW, length)
        warps = max(1, chunks * states // (32 * VECTOR))
        self.options = {
            "WHOLE": T % (chunks * length) == 0,
            "LENGTH": length,
            "CHUNKS": chunks,
            "STATES": states,
            # At least one value for each thread: two threads that read the same value of the board could see different
            # states of it.
            "AT_ONCE": max(AT_ONCE, 32 * warps // states),
            "UNWRITTEN": UNWRITTEN,
            "num_warps": warps,
        }


def _power_of_two(n):
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@jit
def _product_of(a, a_turn, b, b_turn):
    """Multiply the complex numbers a + i a_turn and b + i b_turn."""
    return a * b - a_turn * b_turn, a * b_turn + a_turn * b


@jit
def _power(across, turn, exponent, MOST: tl.constexpr):
    """Compute λ^exponent by repeated squaring, for integer exponents from 0 to MOST, a power of two.

    across, turn  λ as (real, imaginary)
    """
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
def _begun(K, items, STATES: tl.constexpr):
    """Return this program's (position of its group in scan order, item, states [STATES]).

    Earlier groups have lower program ids. Programs start in the order of their ids, which CUB's scans rely on too, so
    every program that this one waits for has already started.
    """
    columns = tl.cdiv(K, STATES)
    program = tl.program_id(0)
    state = program % columns * STATES + tl.arange(0, STATES)
    return program // (items * columns), (program // columns % items).to(tl.int64), state


@jit
def _awaited(
    board_ptr,
    state, item, order, across, turn, K, groups, board_plane,
    STATES: tl.constexpr, AT_ONCE: tl.constexpr, UNWRITTEN: tl.constexpr,
):  # fmt: skip
    """Wait for earlier groups and return the state before this group, in float64, [1, STATES].

    It is the sum of the last published final state and of what each group since then adds, each times λ to the power of
    the number of steps that follow. The program polls these slots, at most AT_ONCE, until all are written.

    across, turn  λ to the power of a group's length
    """
    row = tl.arange(0, AT_ONCE)[:, None]
    # The last row is the group directly before this one.
    weight, weight_turn = _power(across, turn, AT_ONCE - 1 - row, AT_ONCE)
    other = order - AT_ONCE + row
    mask = (other >= 0) & (other >= order // AT_ONCE * AT_ONCE - 1) & (state < K)
    at = board_ptr + (item * groups + other) * K + state
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
    real, imaginary = _product_of(weight, weight_turn, added, added_imaginary)
    return tl.sum(real, 0)[None, :], tl.sum(imaginary, 0)[None, :]


@jit
def _bits(value, UNWRITTEN: tl.constexpr):
    """Return the bits of a value in float32, as int32.

    A NaN with the bits UNWRITTEN is replaced by another NaN, since later groups would wait for it forever.
    """
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits == UNWRITTEN, 0x7FC00000, bits)


@jit
def _add(board_ptr, state, item, order, real, imaginary, K, groups, board_plane, UNWRITTEN: tl.constexpr):
    """Publish what a group adds to the state, or its final state. Overwriting UNWRITTEN marks a value as published."""
    at = board_ptr + (item * groups + order) * K + state
    tl.store(at, _bits(real, UNWRITTEN), mask=state < K)
    tl.store(at + board_plane, _bits(imaginary, UNWRITTEN), mask=state < K)


@jit
def _joined(a, a_turn, x, x_turn, b, b_turn, y, y_turn):
    """Combine two consecutive ranges of steps.

    Return λ to the power of their joint length, and what they add to the state.
    """
    across, turn = _product_of(a, a_turn, b, b_turn)
    more, turned = _product_of(b, b_turn, x, x_turn)
    return across, turn, more + y, turned + y_turn


@jit
def _of_last(values, CHUNKS: tl.constexpr):
    """Return the last row, [1, STATES]."""
    return tl.sum(tl.where(tl.arange(0, CHUNKS)[:, None] == CHUNKS - 1, values, 0.0), 0)[None, :]


@jit
def _behind(values, first, CHUNKS: tl.constexpr, STATES: tl.constexpr):
    """Shift rows down by one, [CHUNKS, STATES]; `first` becomes the first row."""
    row = tl.arange(0, CHUNKS)[:, None] + tl.zeros([CHUNKS, STATES], tl.int32)
    return tl.where(row == 0, first, tl.gather(values, tl.maximum(row - 1, 0), 0))


@jit
def _states_between(
    board_ptr, initial_ptr, last_ptr,
    left, state, item, order, one, one_turn, real, imaginary, T, K, groups, board_plane,
    WHOLE: tl.constexpr, LENGTH: tl.constexpr, CHUNKS: tl.constexpr, STATES: tl.constexpr, AT_ONCE: tl.constexpr,
    UNWRITTEN: tl.constexpr,
):  # fmt: skip
    """Compute the state before each chunk of this group, [CHUNKS, STATES], in float32.

    A scan over the group's chunks, in float64, yields what the group adds to the state. Most groups publish that, and
    then wait for earlier groups. The last group of a run waits first, and then publishes its final state. Group 0
    starts from the state at `initial_ptr` and publishes its final state. The last group writes its final state to
    `last_ptr`.

    left             steps from the start of each chunk to the end of the sequence, as `_left` returns them
    one, one_turn    λ, or its conjugate in the backward kernel
    real, imaginary  what each chunk adds to the state at its end
    """
    there = state < K
    one = one.to(tl.float64)
    one_turn = one_turn.to(tl.float64)
    full, full_turn = _power(one, one_turn, tl.full([1, STATES], LENGTH, tl.int32), LENGTH)
    nothing = tl.zeros([CHUNKS, STATES], tl.float64)
    across, turn = full + nothing, full_turn + nothing
    if not WHOLE:
        rest, rest_turn = _power(one, one_turn, tl.full([1, STATES], 0, tl.int32) + T % LENGTH, LENGTH)
        across = tl.where(left >= LENGTH, across, tl.where(left > 0, rest, 1.0))
        turn = tl.where(left >= LENGTH, turn, tl.where(left > 0, rest_turn, 0.0))
    across, turn, more, turned = tl.associative_scan(
        (across, turn, real.to(tl.float64), imaginary.to(tl.float64)), 0, _joined
    )
    own, own_turn = _of_last(more, CHUNKS), _of_last(turned, CHUNKS)
    over, over_turn = _of_last(across, CHUNKS), _of_last(turn, CHUNKS)
    real, imaginary = more.to(tl.float32), turned.to(tl.float32)
    weight, weight_turn = across.to(tl.float32), turn.to(tl.float32)
    boundary = (item * K + state) * 2
    last = order % AT_ONCE == AT_ONCE - 1
    if order == 0:
        carried = tl.load(initial_ptr + boundary, mask=there, other=0.0).to(tl.float64)
        carried_turn = tl.load(initial_ptr + boundary + 1, mask=there, other=0.0).to(tl.float64)
    else:
        if not last:
            _add(board_ptr, state, item, order, own, own_turn, K, groups, board_plane, UNWRITTEN)
        group, group_turn = _power(full, full_turn, tl.full([1, STATES], CHUNKS, tl.int32), CHUNKS)
        carried, carried_turn = _awaited(
            board_ptr, state, item, order, group, group_turn, K, groups, board_plane, STATES, AT_ONCE, UNWRITTEN
        )
    more, turned = _product_of(over, over_turn, carried, carried_turn)
    own += more
    own_turn += turned
    if (order == 0) | last:
        _add(board_ptr, state, item, order, own, own_turn, K, groups, board_plane, UNWRITTEN)
    if order == groups - 1:
        tl.store(last_ptr + boundary, own.to(tl.float32), mask=there)
        tl.store(last_ptr + boundary + 1, own_turn.to(tl.float32), mask=there)
    carried = carried.to(tl.float32)
    carried_turn = carried_turn.to(tl.float32)
    more, turned = _product_of(weight, weight_turn, carried, carried_turn)
    real = _behind(real + more, carried, CHUNKS, STATES)
    imaginary = _behind(imaginary + turned, carried_turn, CHUNKS, STATES)
    return real, imaginary


@jit
def _left(group, row, state, T, K, WHOLE: tl.constexpr, LENGTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the number of steps from the start of each chunk to the end of the sequence, [CHUNKS, STATES].

    It is 0 for states beyond K, and LENGTH for all others if the groups are WHOLE. A chunk past the end has 0 or fewer.
    """
    if WHOLE:
        left = tl.where(state < K, LENGTH + row * 0, 0)
    else:
        left = tl.where(state < K, T - (group * CHUNKS + row) * LENGTH, 0)
    return left


@jit
def _has(left, step, WHOLE: tl.constexpr):
    """Return whether a chunk has this step. If the groups are WHOLE, every step exists except for states beyond K."""
    if WHOLE:
        step = 0
    return left > step


@jit
def _where(valid, new, old, WHOLE: tl.constexpr):
    """`tl.where(valid, new, old)`; if the groups are WHOLE, every step is valid and it returns `new`."""
    if not WHOLE:
        new = tl.where(valid, new, old)
    return new


@jit
def _read(pointer, left, first, stride, COUNT: tl.constexpr, WHOLE: tl.constexpr, SKIP: tl.constexpr = 0):
    """Load COUNT steps, `stride` elements apart, as a tuple of float32 tiles: a thread holds all steps of its states.

    `first` is the index, within the chunk, of the step at the pointers. Steps past the end of the sequence, and the
    first SKIP steps, are 0.
    """
    steps = ()
    for i in tl.static_range(COUNT):
        steps += (tl.load(pointer, mask=_has(left, first + i, WHOLE) & (i >= SKIP), other=0.0).to(tl.float32),)
        pointer += stride
    return steps


@jit
def _forward_kernel(
    beta_ptr, eigenvalues_ptr, state_ptr, begins_ptr, every_ptr, final_ptr, board_ptr,
    T, K, items, groups, board_plane, plane,
    WHOLE: tl.constexpr, LENGTH: tl.constexpr, CHUNKS: tl.constexpr, STATES: tl.constexpr, AT_ONCE: tl.constexpr,
    UNWRITTEN: tl.constexpr,
):  # fmt: skip
    """Compute c_t = λ c_{t−1} + β_t; write Re c_t, the state before each chunk and the final state.

    A program processes a group of CHUNKS × LENGTH consecutive steps of STATES states of one batch item, as LENGTH tiles
    [CHUNKS, STATES] in registers: row j of tile i is step i of chunk j. It runs over the tiles twice, first from the
    state 0 for what each chunk adds, then from the state before each chunk.
    """
    order, item, states = _begun(K, items, STATES)
    group, state, row = order, states[None, :], tl.arange(0, CHUNKS)[:, None]
    one = tl.load(eigenvalues_ptr + 2 * state, mask=state < K, other=0.0)
    one_turn = tl.load(eigenvalues_ptr + 2 * state + 1, mask=state < K, other=0.0)
    left = _left(group, row, state, T, K, WHOLE, LENGTH, CHUNKS)
    begin = (item * T + group * (CHUNKS * LENGTH)) * K
    at = row * LENGTH * K + state
    beta = _read(beta_ptr + begin + at, left, 0, K, LENGTH, WHOLE)
    real = tl.zeros([CHUNKS, STATES], tl.float32)
    imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    for i in tl.static_range(LENGTH):
        stepped, turned = _product_of(one, one_turn, real, imaginary)
        valid = _has(left, i, WHOLE)
        real = _where(valid, stepped + beta[i], real, WHOLE)
        imaginary = _where(valid, turned, imaginary, WHOLE)
    real, imaginary = _states_between(
        board_ptr,
        state_ptr,
        final_ptr,
        left,
        state,
        item,
        order,
        one,
        one_turn,
        real,
        imaginary,
        T,
        K,
        groups,
        board_plane,
        WHOLE,
        LENGTH,
        CHUNKS,
        STATES,
        AT_ONCE,
        UNWRITTEN,
    )
    begins = begins_ptr + (item * groups + group) * CHUNKS * K + row * K + state
    tl.store(begins, real, mask=left > 0)
    tl.store(begins + plane, imaginary, mask=left > 0)
    place = every_ptr + begin + at
    for i in tl.static_range(LENGTH):
        stepped, imaginary = _product_of(one, one_turn, real, imaginary)
        real = stepped + beta[i]
        tl.store(place, real.to(every_ptr.dtype.element_ty), mask=_has(left, i, WHOLE))
        place += K


@jit
def _backward_kernel(
    beta_ptr, grad_ptr, eigenvalues_ptr, grad_final_ptr, begins_ptr, d_beta_ptr, d_state_ptr, parts_ptr, board_ptr,
    T, K, items, groups, board_plane, plane,
    WHOLE: tl.constexpr, LENGTH: tl.constexpr, CHUNKS: tl.constexpr, STATES: tl.constexpr, FEW: tl.constexpr,
    AT_ONCE: tl.constexpr, UNWRITTEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients: r_t = grad_t + λ̄ r_{t+1}, from the last step to the first; β_t has the gradient Re r_t.

    Programs and tiles are those of the forward kernel, in reverse order of time.

    The gradient of λ is the sum over t of r_t conj(c_{t−1}). For a chunk that starts from the state c, this equals the
    sum over its steps of s_{t+1} β_t, plus s conj(c) with s of its first step. Here s_t = r_t + λ̄ s_{t+1}, and s is 0
    after the chunk's last step. So the backward pass needs no state within a chunk. Each program writes its part of
    the sum to `parts_ptr`.
    """
    order, item, states = _begun(K, items, STATES)
    # The first row is the last chunk.
    group, state, row = groups - 1 - order, states[None, :], CHUNKS - 1 - tl.arange(0, CHUNKS)[:, None]
    one = tl.load(eigenvalues_ptr + 2 * state, mask=state < K, other=0.0)
    one_turn = -tl.load(eigenvalues_ptr + 2 * state + 1, mask=state < K, other=0.0)
    left = _left(group, row, state, T, K, WHOLE, LENGTH, CHUNKS)
    begin = (item * T + group * (CHUNKS * LENGTH)) * K
    at = row * LENGTH * K + state
    grad = _read(grad_ptr + begin + at, left, 0, K, LENGTH, WHOLE)
    begins = begins_ptr + (item * groups + group) * CHUNKS * K + row * K + state
    state_real = tl.load(begins, mask=left > 0, other=0.0)
    state_imaginary = tl.load(begins + plane, mask=left > 0, other=0.0)
    real = tl.zeros([CHUNKS, STATES], tl.float32)
    imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    for i in tl.static_range(LENGTH - 1, -1, -1):
        real, imaginary = _product_of(one, one_turn, real + grad[i], imaginary)
    real, imaginary = _states_between(
        board_ptr,
        grad_final_ptr,
        d_state_ptr,
        left,
        state,
        item,
        order,
        one,
        one_turn,
        real,
        imaginary,
        T,
        K,
        groups,
        board_plane,
        WHOLE,
        LENGTH,
        CHUNKS,
        STATES,
        AT_ONCE,
        UNWRITTEN,
    )
    # The mask is never true. The stores make the compiler convert both to the layout of stores; the shift by a row in
    # `_states_between` leaves them in another one.
    tl.store(begins, real, mask=(left > 0) & (T < 0))
    tl.store(begins, imaginary, mask=(left > 0) & (T < 0))
    slope = tl.zeros([CHUNKS, STATES], tl.float32)
    slope_imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    part = tl.zeros([CHUNKS, STATES], tl.float32)
    part_imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    place = d_beta_ptr + begin + at + (LENGTH - 1) * K
    # Step i needs the input of step i − 1.
    for end in tl.static_range(LENGTH, 0, -FEW):
        start = end - FEW - 1
        before = _read(beta_ptr + begin + at + start * K, left, start, K, FEW, WHOLE, end == FEW)
        for i in tl.static_range(end - 1, end - 1 - FEW, -1):
            valid = _has(left, i, WHOLE)
            reached = real + grad[i]
            tl.store(place, reached.to(d_beta_ptr.dtype.element_ty), mask=valid)
            place -= K
            stepped, turned = _product_of(one, one_turn, slope, slope_imaginary)
            slope = _where(valid, stepped + reached, slope, WHOLE)
            slope_imaginary = _where(valid, turned + imaginary, slope_imaginary, WHOLE)
            stepped, turned = _product_of(one, one_turn, reached, imaginary)
            real = _where(valid, stepped, real, WHOLE)
            imaginary = _where(valid, turned, imaginary, WHOLE)
            part += slope * before[i - end + FEW]
            part_imaginary += slope_imaginary * before[i - end + FEW]
    part += slope * state_real + slope_imaginary * state_imaginary
    part_imaginary += slope_imaginary * state_real - slope * state_imaginary
    at = parts_ptr + item * groups + group + 2 * state * (items * groups)
    tl.store(at, tl.sum(part, 0)[None, :], mask=state < K)
    tl.store(at + items * groups, tl.sum(part_imaginary, 0)[None, :], mask=state < K)
