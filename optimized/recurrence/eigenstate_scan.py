"""A diagonal complex recurrence over time, in chunks that run beside each other (eigenstate_lm, 004.8 and 004.12)."""

import math

import torch
from torch.nn import functional

from optimized.kernels import ceil_div, jit, launching, tl, use_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = 64
"""Steps of the plain form's chunks: the work within one grows with it, the steps between them fall."""
SHORTEST, LENGTH = 8, 64
"""Steps of the kernels' chunks, by T: their gradients are kept in registers, of which a thread has 255."""
CHUNKS, STATES = 4, 32
"""What a program works on at once; a row of 32 states is a warp's 128 bytes of float32."""
CARRIED, CARRIED_STATES = 512, 8
"""Chunks and states whose carries one program scans at once."""


def eigenstate_scan(
    beta: torch.Tensor, eigenvalues: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`c_t = λ c_{t−1} + β_t` from `c_{−1}`: (Re c_t of every step [B, T, K], the last c [B, K, 2]).

    Chunks of steps run beside each other, twice: once from 0, for what each adds to the state at its end; then, with
    the carries between them scanned in float64, once more from the state that each begins with. No power of λ is ever
    divided by, so that any |λ| ≤ 1 will do.

    float32, bfloat16 or float16 on CUDA, with a float32 state, takes Triton kernels: three forward, and in the
    backward three more and a sum; deterministic. They keep the states between chunks, nothing of each step, and have
    no second derivative. All else takes the plain form.

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
        return torch.empty_like(beta), state.clone()
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
    kernel = real[since.clamp(min=0)].masked_fill((since < 0)[..., None], 0.0)  # [t, s, K]
    every = torch.einsum("tsk,bjsk->bjtk", kernel, x)
    every = every + real[1:] * begin[:, :, None] - imaginary[1:] * turned[:, :, None]
    rest = T - (count - 1) * L
    last, begin, turned = x[:, -1, :rest], begin[:, -1], turned[:, -1]
    final = [torch.einsum("sk,bsk->bk", p[:rest].flip(0), last) for p in (real, imaginary)]
    final[0] = final[0] + real[rest] * begin - imaginary[rest] * turned
    final[1] = final[1] + real[rest] * turned + imaginary[rest] * begin
    return every.reshape(B, count * L, K)[:, :T].to(beta.dtype), torch.stack(final, -1)


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
        return torch.empty_like(beta), state.clone()
    return _EigenstateScan.apply(beta, eigenvalues, state, length or _length(beta.shape[1]))


def _length(T):
    """Of few steps more chunks than steps in one: they are what runs beside each other."""
    return max(SHORTEST, min(LENGTH, _power_of_two(math.isqrt(T)) // 2))


class _EigenstateScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, beta, eigenvalues, state, length):
        beta, eigenvalues, state = beta.contiguous(), eigenvalues.contiguous(), state.contiguous()
        B, T, K = beta.shape
        count = ceil_div(T, length)
        carries = _carries(beta, eigenvalues, state, None, length, reverse=False)
        every, final = torch.empty_like(beta), torch.empty_like(state)
        tile = _tile(count, K)
        with launching(beta):
            _outputs_kernel[_grid(tile, count, K, B)](
                beta, eigenvalues, carries, every, final, T, K, count, LENGTH=length, **tile
            )
        ctx.save_for_backward(beta, eigenvalues, carries)
        ctx.length = length
        return every, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_final):
        beta, eigenvalues, carries = ctx.saved_tensors
        B, T, K = beta.shape
        count, tile = carries.shape[2], _tile(carries.shape[2], K)
        grad, grad_final = grad.contiguous(), grad_final.contiguous()
        d_state = torch.empty_like(grad_final)
        later = _carries(grad, eigenvalues, grad_final, d_state, ctx.length, reverse=True)
        d_beta, parts = torch.empty_like(beta), torch.empty_like(carries)
        with launching(beta):
            _gradients_kernel[_grid(tile, count, K, B)](
                beta, grad, eigenvalues, carries, later, d_beta, parts, T, K, count, LENGTH=ctx.length, **tile
            )
        d_eigenvalues = None
        if ctx.needs_input_grad[1]:
            d_eigenvalues = parts.sum((1, 2), dtype=torch.float64).T.to(eigenvalues.dtype)
        return d_beta, d_eigenvalues, d_state, None


def _carries(x, eigenvalues, boundary, last, length, reverse):
    """[2, B, chunks, K]: the state before each chunk; reversed, what comes back into each chunk's last step.

    boundary  [B, K, 2]: what the first one begins with
    last      [B, K, 2]: reversed, where what comes back into the state before all steps goes
    """
    B, T, K = x.shape
    count = ceil_div(T, length)
    ends = torch.empty((2, B, count, K), dtype=boundary.dtype, device=x.device)
    carries = torch.empty_like(ends)
    tile = _tile(count, K)
    block = min(CARRIED, _power_of_two(count + 1))
    with launching(x):
        if count > 1 or reverse:
            _ends_kernel[_grid(tile, count, K, B)](
                x, eigenvalues, ends, T, K, count, LENGTH=length, REVERSE=reverse, **tile
            )
        _carries_kernel[(ceil_div(K, CARRIED_STATES), B)](
            ends,
            eigenvalues,
            boundary,
            carries,
            boundary if last is None else last,
            T,
            K,
            count,
            LENGTH=length,
            REVERSE=reverse,
            BLOCK=block,
            STATES=CARRIED_STATES,
            num_warps=max(1, min(8, block * CARRIED_STATES // 256)),
        )
    return carries


def _tile(count, K):
    chunks, states = min(CHUNKS, _power_of_two(count)), min(STATES, _power_of_two(K))
    return {"CHUNKS": chunks, "STATES": states, "num_warps": max(1, chunks * states // 32)}


def _grid(tile, count, K, B):
    return ceil_div(count, tile["CHUNKS"]), ceil_div(K, tile["STATES"]), B


def _power_of_two(n):
    """The least that is no smaller."""
    return 1 << (n - 1).bit_length()


@jit
def _where(T, K, count, LENGTH: tl.constexpr, CHUNKS: tl.constexpr, STATES: tl.constexpr):
    """(chunk [CHUNKS, 1], state [1, STATES], which are there, the first step's offset, a chunk's one), by program."""
    chunk = (tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS))[:, None]
    state = (tl.program_id(1) * STATES + tl.arange(0, STATES))[None, :]
    item = tl.program_id(2).to(tl.int64)
    steps = (item * T + chunk * LENGTH) * K + state
    chunks = (item * count + chunk) * K + state
    return chunk, state, (chunk < count) & (state < K), steps, chunks


@jit
def _turned(across, turn, real, imaginary):
    """A product of complex numbers."""
    return across * real - turn * imaginary, across * imaginary + turn * real


@jit
def _ends_kernel(
    x_ptr,
    eigenvalues_ptr,
    ends_ptr,
    T,
    K,
    count,
    LENGTH: tl.constexpr,
    REVERSE: tl.constexpr,
    CHUNKS: tl.constexpr,
    STATES: tl.constexpr,
):
    """What a chunk's steps add to the state at its end; reversed, to what comes back into the step before it."""
    chunk, state, live, steps, chunks = _where(T, K, count, LENGTH, CHUNKS, STATES)
    across = tl.load(eigenvalues_ptr + 2 * state, mask=state < K, other=0.0)
    turn = tl.load(eigenvalues_ptr + 2 * state + 1, mask=state < K, other=0.0)
    if REVERSE:
        turn = -turn
    real = tl.zeros([CHUNKS, STATES], tl.float32)
    imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    for i in tl.static_range(LENGTH):
        at = LENGTH - 1 - i if REVERSE else i
        # What lies beyond the end is 0 and comes first, if reversed; else the chunk's end is not asked for.
        mask = live & (chunk * LENGTH + at < T)
        x = tl.load(x_ptr + steps + at * K, mask=mask, other=0.0).to(tl.float32)
        real, imaginary = _turned(across, turn, real, imaginary)
        real += x
    if REVERSE:
        real, imaginary = _turned(across, turn, real, imaginary)
    plane = tl.num_programs(2).to(tl.int64) * count * K
    tl.store(ends_ptr + chunks, real, mask=live)
    tl.store(ends_ptr + plane + chunks, imaginary, mask=live)


@jit
def _combined(a_across, a_turn, a_real, a_imaginary, b_across, b_turn, b_real, b_imaginary):
    """`c → a c + b` after an earlier one, as one."""
    across, turn = _turned(b_across, b_turn, a_across, a_turn)
    real, imaginary = _turned(b_across, b_turn, a_real, a_imaginary)
    return across, turn, real + b_real, imaginary + b_imaginary


@jit
def _power(across, turn, exponent, MOST: tl.constexpr):
    """λ to a whole number up to MOST, a power of two."""
    real = across * 0.0 + 1.0
    imaginary = across * 0.0
    bit: tl.constexpr = 1
    for i in tl.static_range(32):
        if (1 << i) <= MOST:
            more, turned = _turned(across, turn, real, imaginary)
            taken = (exponent >> i) % 2 == 1
            real = tl.where(taken, more, real)
            imaginary = tl.where(taken, turned, imaginary)
            across, turn = _turned(across, turn, across, turn)
    return real, imaginary


@jit
def _carries_kernel(
    ends_ptr,
    eigenvalues_ptr,
    boundary_ptr,
    carries_ptr,
    last_ptr,
    T,
    K,
    count,
    LENGTH: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
    STATES: tl.constexpr,
):
    """The state before each chunk, from what the chunks add; reversed, what comes back into each one's last step."""
    state = (tl.program_id(0) * STATES + tl.arange(0, STATES))[None, :]
    item = tl.program_id(1).to(tl.int64)
    there = state < K
    across = tl.load(eigenvalues_ptr + 2 * state, mask=there, other=0.0).to(tl.float64)
    turn = tl.load(eigenvalues_ptr + 2 * state + 1, mask=there, other=0.0).to(tl.float64)
    if REVERSE:
        turn = -turn
    whole, whole_turn = _power(across, turn, LENGTH, LENGTH)
    # Only the last chunk may be shorter, from which what comes back begins.
    rest, rest_turn = _power(across, turn, T - (count - 1) * LENGTH, LENGTH)
    boundary = (item * K + state) * 2
    first = tl.load(boundary_ptr + boundary, mask=there, other=0.0).to(tl.float64)
    first_imaginary = tl.load(boundary_ptr + boundary + 1, mask=there, other=0.0).to(tl.float64)
    plane = tl.num_programs(1).to(tl.int64) * count * K
    carried = tl.zeros([1, STATES], tl.float64)
    carried_imaginary = tl.zeros([1, STATES], tl.float64)
    total = count + 1 if REVERSE else count
    for start in range(0, total, BLOCK):
        n = (start + tl.arange(0, BLOCK))[:, None]
        if REVERSE:
            before, own = count - n, count - 1 - n
        else:
            before, own = n - 1, n
        mask = there & (n > 0) & (n < total)
        offset = (item * count + before) * K + state
        real = tl.load(ends_ptr + offset, mask=mask, other=0.0).to(tl.float64)
        imaginary = tl.load(ends_ptr + plane + offset, mask=mask, other=0.0).to(tl.float64)
        real = tl.where(n == 0, first, real)
        imaginary = tl.where(n == 0, first_imaginary, imaginary)
        short = (n == 1) & REVERSE
        a = tl.where(short, rest, tl.broadcast_to(whole, [BLOCK, STATES]))
        a_turn = tl.where(short, rest_turn, tl.broadcast_to(whole_turn, [BLOCK, STATES]))
        a, a_turn, real, imaginary = tl.associative_scan((a, a_turn, real, imaginary), 0, _combined)
        more, turned = _turned(a, a_turn, carried, carried_imaginary)
        real += more
        imaginary += turned
        own_mask = there & (own >= 0) & (n < total)
        offset = (item * count + own) * K + state
        tl.store(carries_ptr + offset, real.to(tl.float32), mask=own_mask)
        tl.store(carries_ptr + plane + offset, imaginary.to(tl.float32), mask=own_mask)
        if REVERSE:
            end = there & (n == count)
            tl.store(last_ptr + boundary + 0 * n, real.to(tl.float32), mask=end)
            tl.store(last_ptr + boundary + 1 + 0 * n, imaginary.to(tl.float32), mask=end)
        final = n == start + BLOCK - 1
        carried = tl.sum(tl.where(final, real, 0.0), 0)[None, :]
        carried_imaginary = tl.sum(tl.where(final, imaginary, 0.0), 0)[None, :]


@jit
def _outputs_kernel(
    beta_ptr,
    eigenvalues_ptr,
    carries_ptr,
    every_ptr,
    final_ptr,
    T,
    K,
    count,
    LENGTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    STATES: tl.constexpr,
):
    """A chunk's steps from the state before it."""
    chunk, state, live, steps, chunks = _where(T, K, count, LENGTH, CHUNKS, STATES)
    across = tl.load(eigenvalues_ptr + 2 * state, mask=state < K, other=0.0)
    turn = tl.load(eigenvalues_ptr + 2 * state + 1, mask=state < K, other=0.0)
    plane = tl.num_programs(2).to(tl.int64) * count * K
    real = tl.load(carries_ptr + chunks, mask=live, other=0.0)
    imaginary = tl.load(carries_ptr + plane + chunks, mask=live, other=0.0)
    for i in tl.static_range(LENGTH):
        there = chunk * LENGTH + i < T
        beta = tl.load(beta_ptr + steps + i * K, mask=live & there, other=0.0).to(tl.float32)
        more, turned = _turned(across, turn, real, imaginary)
        real = tl.where(there, more + beta, real)
        imaginary = tl.where(there, turned, imaginary)
        tl.store(every_ptr + steps + i * K, real.to(every_ptr.dtype.element_ty), mask=live & there)
    final = final_ptr + (tl.program_id(2).to(tl.int64) * K + state) * 2 + 0 * chunk
    ends = live & (chunk == count - 1)
    tl.store(final, real, mask=ends)
    tl.store(final + 1, imaginary, mask=ends)


@jit
def _gradients_kernel(
    beta_ptr,
    grad_ptr,
    eigenvalues_ptr,
    carries_ptr,
    later_ptr,
    d_beta_ptr,
    parts_ptr,
    T,
    K,
    count,
    LENGTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    STATES: tl.constexpr,
):
    """A chunk's part of both gradients, from the state before it and from what comes back into its last step.

    λ's is the sum of g_t times the conjugate of c_{t−1}. Going forward, it is the sum of what comes into each step,
    times the conjugate of dc_t/dλ within the chunk: so no state has to be kept for the way back.
    """
    chunk, state, live, steps, chunks = _where(T, K, count, LENGTH, CHUNKS, STATES)
    across = tl.load(eigenvalues_ptr + 2 * state, mask=state < K, other=0.0)
    turn = tl.load(eigenvalues_ptr + 2 * state + 1, mask=state < K, other=0.0)
    plane = tl.num_programs(2).to(tl.int64) * count * K
    real = tl.load(carries_ptr + chunks, mask=live, other=0.0)
    imaginary = tl.load(carries_ptr + plane + chunks, mask=live, other=0.0)
    back = tl.load(later_ptr + chunks, mask=live, other=0.0)
    back_imaginary = tl.load(later_ptr + plane + chunks, mask=live, other=0.0)
    slope = tl.zeros([CHUNKS, STATES], tl.float32)
    slope_imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    part = tl.zeros([CHUNKS, STATES], tl.float32)
    part_imaginary = tl.zeros([CHUNKS, STATES], tl.float32)
    grads = ()
    for i in tl.static_range(LENGTH):
        there = chunk * LENGTH + i < T
        beta = tl.load(beta_ptr + steps + i * K, mask=live & there, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + steps + i * K, mask=live & there, other=0.0).to(tl.float32)
        grads += (grad,)
        more, turned = _turned(across, turn, slope, slope_imaginary)
        slope = tl.where(there, more + real, slope)
        slope_imaginary = tl.where(there, turned + imaginary, slope_imaginary)
        real, imaginary = _turned(across, turn, real, imaginary)
        real += beta
        part += grad * slope
        part_imaginary -= grad * slope_imaginary
    part += back * slope + back_imaginary * slope_imaginary
    part_imaginary += back_imaginary * slope - back * slope_imaginary
    tl.store(parts_ptr + chunks, part, mask=live)
    tl.store(parts_ptr + plane + chunks, part_imaginary, mask=live)
    for i in tl.static_range(LENGTH):
        there = chunk * LENGTH + (LENGTH - 1 - i) < T
        real = back + grads[LENGTH - 1 - i]
        tl.store(
            d_beta_ptr + steps + (LENGTH - 1 - i) * K, real.to(d_beta_ptr.dtype.element_ty), mask=live & there
        )
        more, turned = _turned(across, -turn, real, back_imaginary)
        back = tl.where(there, more, back)
        back_imaginary = tl.where(there, turned, back_imaginary)
