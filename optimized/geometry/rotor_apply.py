"""The rotor as one kernel: all rotations of a row in registers (trainer2, technique 000.F4)."""

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
    """Rows (i, j, slot) of the k Givens rotations on n coordinates, int64 [k, 3], in the order they are applied.

    In layer l pair j joins (2j + l) mod n and the coordinate after it, and owns slot l * (n / 2) + j. The last of the
    ceil(k / (n / 2)) layers may lack pairs. ValueError for an odd n, which has no pairing.
    """
    check_even(n)
    if not n:
        return torch.empty((0, 3), dtype=torch.int64, device=device)
    slot = torch.arange(k, device=device)
    layer, pair = slot // (n // 2), slot % (n // 2)
    i = (2 * pair + layer) % n
    return torch.stack([i, (i + 1) % n, slot], dim=1)


def rotor_apply(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x rotated by the rotor, [..., n], in fresh memory.

    One Givens rotation after the other, as `rotor_index` lists them: `a' = c a - s b`, `b' = s a + c b`.

    float32 on CUDA with n <= 16 and k <= 32 takes the Triton kernels, forward and backward, deterministic: all
    rotations of a row in registers. Everything else the vectorised form, a layer at a time. The kernels have no second
    derivative.

    theta  [k], radians; the rotation of a slot beyond k is by 0
    x      [..., n], n even, else ValueError

    Source: trainer2, technique 000.F4.
    """
    if use_triton(theta, x):
        return rotor_apply_triton(theta, x)
    return rotor_apply_vectorised(theta, x)


def rotor_apply_vectorised(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`rotor_apply` in PyTorch operations, all pairs of a layer at once, on any device and dtype."""
    return rotate(theta, x)


def rotor_apply_triton(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`rotor_apply` as one Triton kernel with its own backward, float32, n <= 16 and k <= 32."""
    check_even(x.shape[-1])
    if not serves(theta, x) or not x.numel():
        return rotate(theta, x)
    return _RotorApply.apply(theta, x)


def folded_metric(theta: torch.Tensor, metric: torch.Tensor, n: int) -> torch.Tensor:
    """`R' g R`, [n, n], R the rotor's matrix: the metric in which distances are those of rotated coordinates in g.

    `(R d)' g (R d) = d' (R' g R) d`, so that with it nothing need be rotated at all.

    theta   [k], radians
    metric  [n, n], or [n] for a diagonal one
    """
    # The rows are the rotated unit vectors: R'.
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
        # Summed in a fixed order, with no atomics: the gradient is the same at every run.
        return partial.sum(0), d_x


@jit
def _backward_kernel(
    theta_ptr,
    x_ptr,
    grad_ptr,
    d_x_ptr,
    partial_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = load_columns(x_ptr, row, row < rows, N, 1, N)
    grads = load_columns(grad_ptr, row, row < rows, N, 1, N)
    # The values that each rotation began with. Rotating back would not restore an infinity.
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
    """The gradient of the slot's angle, summed over the rows: those beyond the end are 0."""
    A: tl.constexpr = (2 * (SLOT % (N // 2)) + SLOT // (N // 2)) % N
    B: tl.constexpr = (A + 1) % N
    d_c = tl.sum(grads[A] * before[A] + grads[B] * before[B], axis=0)
    d_s = tl.sum(grads[B] * before[A] - grads[A] * before[B], axis=0)
    return c * d_s - s * d_c
