"""The rotor in one kernel, which keeps a row in registers through all rotations (trainer2, technique 000.F4)."""

import torch

from optimized.kernels import ceil_div, jit, launching, tl, use_triton
from optimized.rotor import (
    BLOCK,
    NUM_WARPS,
    check_even,
    load_columns,
    rotate,
    rotate_into,
    serves,
    turned,
)


def rotor_index(n: int, k: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return rows (i, j, slot) of the k Givens rotations on n coordinates, int64 [k, 3], in the order of application.

    Pair j of layer l rotates coordinate i = (2j + l) mod n and the next one, (i + 1) mod n, by the angle in slot
    l * (n / 2) + j. The last of the ceil(k / (n / 2)) layers may have fewer pairs. Raises ValueError if n is odd.
    """
    check_even(n)
    if not n:
        return torch.empty((0, 3), dtype=torch.int64, device=device)
    slot = torch.arange(k, device=device)
    layer, pair = slot // (n // 2), slot % (n // 2)
    i = (2 * pair + layer) % n
    return torch.stack([i, (i + 1) % n, slot], dim=1)


def rotor_apply(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return x rotated by the rotor, [..., n], in a new tensor of x's dtype.

    The Givens rotations are applied one after another, in the order of `rotor_index`: `a' = c a - s b`,
    `b' = s a + c b`.

    Triton kernels run for float32 tensors on CUDA with n <= 16 and k <= 32, and apply all rotations of a row in
    registers. Their forward and backward are deterministic; they have no second derivative. All other inputs use the
    vectorised form, which rotates one layer at a time.

    theta  [k], radians; pairs with slots from k on are not rotated
    x      [..., n], n even, else ValueError

    Source: trainer2, technique 000.F4.
    """
    if use_triton(theta, x):
        return rotor_apply_triton(theta, x)
    return rotor_apply_vectorised(theta, x)


def rotor_apply_vectorised(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute `rotor_apply` in PyTorch operations on all pairs of a layer at once, on any device and dtype."""
    return rotate(theta, x)


def rotor_apply_triton(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute `rotor_apply` with one Triton kernel and its own backward, in float32.

    n > 16, k > 32 and empty x use the vectorised form.
    """
    check_even(x.shape[-1])
    if not serves(theta, x) or not x.numel():
        return rotate(theta, x)
    return _RotorApply.apply(theta, x)


def folded_metric(theta: torch.Tensor, metric: torch.Tensor, n: int) -> torch.Tensor:
    """Return `R' g R`, [n, n], where R is the matrix of the rotor and g the metric.

    A distance in this metric equals the distance between the rotated coordinates in g, because
    `(R d)' g (R d) = d' (R' g R) d`. Coordinates then need no rotation.

    theta   [k], radians
    metric  g, [n, n], or [n] for a diagonal one
    """
    # Row i is the rotated unit vector i, so this matrix is R'.
    transposed = rotor_apply(theta, torch.eye(n, dtype=theta.dtype, device=theta.device))
    along = transposed * metric if metric.dim() == 1 else transposed @ metric
    return along @ transposed.mT


class _RotorApply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, theta, x):
        theta, x = theta.contiguous(), x.contiguous()
        ctx.save_for_backward(theta, x)
        return rotate_into(theta, x, torch.empty_like(x))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        theta, x = ctx.saved_tensors
        k, n = theta.shape[0], x.shape[-1]
        rows = x.numel() // n
        d_x = torch.empty_like(x)
        programs = ceil_div(rows, BLOCK)
        partial = torch.empty((programs, k), dtype=torch.float32, device=x.device)
        with launching(x):
            _backward_kernel[(programs,)](
                theta, x, grad.contiguous(), d_x, partial, rows, N=n, K=k, BLOCK=BLOCK, num_warps=NUM_WARPS
            )
        # The sum has a fixed order and uses no atomics, so every run gives the same gradient.
        return partial.sum(0), d_x


@jit
def _backward_kernel(
    theta_ptr, x_ptr, grad_ptr, d_x_ptr, partial_ptr,
    rows,
    N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute d_x, by applying the inverse rotations to grad in reverse order, and d_theta = c * d_s - s * d_c.

    A program computes BLOCK rows, all in registers. It repeats the forward first, and writes its sum of d_theta over
    the rows to row `program` of `partial`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = load_columns(x_ptr, row, row < rows, N, 1, N)
    grads = load_columns(grad_ptr, row, row < rows, N, 1, N)
    # The inputs of each rotation. An inverse rotation would not restore infinite values.
    history = ()
    cosines = ()
    sines = ()
    for slot in tl.static_range(K):
        theta = tl.load(theta_ptr + slot).to(tl.float32)
        cosines += (tl.cos(theta),)
        sines += (tl.sin(theta),)
        history += (columns,)
        columns = turned(columns, cosines[slot], sines[slot], slot, N)
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * K
    for back in tl.static_range(K):
        c = cosines[K - 1 - back]
        s = sines[K - 1 - back]
        tl.store(partial + (K - 1 - back), _slope(history[K - 1 - back], grads, c, s, K - 1 - back, N))
        grads = turned(grads, c, -s, K - 1 - back, N)
    for m in tl.static_range(N):
        tl.store(d_x_ptr + row * N + m, grads[m], mask=row < rows)


@jit
def _slope(before, grads, c, s, SLOT: tl.constexpr, N: tl.constexpr):
    """Return the gradient of the slot's angle, summed over the rows. Rows past the end are 0."""
    A: tl.constexpr = (2 * (SLOT % (N // 2)) + SLOT // (N // 2)) % N
    B: tl.constexpr = (A + 1) % N
    d_c = tl.sum(grads[A] * before[A] + grads[B] * before[B], axis=0)
    d_s = tl.sum(grads[B] * before[A] - grads[A] * before[B], axis=0)
    return c * d_s - s * d_c
