"""Rotations of the rotor, for every technique that rotates: a vectorised form, a kernel, and the kernel's functions.

Pair j of layer l rotates coordinate i = (2j + l) mod n and the next one, (i + 1) mod n, by the angle in slot
l * (n / 2) + j of theta.
"""

import torch

from optimized.kernels import ceil_div, jit, launching, tl

# A thread holds a row and the history of its rotations in registers, and every rotation is unrolled.
MAX_COORDINATES = 16
MAX_ANGLES = 32
# Rows per tile. The trainer's 2048 rows are 16 programs with one row per thread. Not yet swept on a GPU.
BLOCK = 128
NUM_WARPS = 4


def check_even(n: int) -> None:
    """Raise ValueError for an odd number of coordinates, which cannot be paired."""
    if n % 2:
        raise ValueError(f"a rotor joins coordinates in pairs: n must be even, not {n}")


def serves(theta: torch.Tensor, x: torch.Tensor) -> bool:
    """Return whether the kernels support a rotor of this size."""
    return 0 < x.shape[-1] <= MAX_COORDINATES and theta.shape[0] <= MAX_ANGLES


def rotate(theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return x rotated, in PyTorch operations on all pairs of a layer at once, on any device and dtype."""
    n, k = x.shape[-1], theta.shape[0]
    check_even(n)
    half = n // 2
    if not half or not k:
        return x.clone(memory_format=torch.contiguous_format)
    cos, sin = torch.cos(theta).to(x.dtype), torch.sin(theta).to(x.dtype)
    layers = ceil_div(k, half)
    for layer in range(layers):
        # x is rolled by one after each layer, so the pairs are always coordinates (0, 1), (2, 3) and so on.
        slots = slice(layer * half, min(k, (layer + 1) * half))
        c, s = cos[slots], sin[slots]
        pairs = 2 * c.shape[0]
        a, b = x[..., 0:pairs:2], x[..., 1:pairs:2]
        turned = torch.stack([c * a - s * b, s * a + c * b], dim=-1).flatten(-2)
        x = torch.cat([turned, x[..., pairs:]], dim=-1).roll(-1, dims=-1)
    return x.roll(layers, dims=-1)


def rotate_into(theta: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write x rotated to `out` with one kernel, and return `out`. All three tensors are float32 and contiguous."""
    n = x.shape[-1]
    rows = x.numel() // n
    with launching(x):
        _rotor_kernel[(ceil_div(rows, BLOCK),)](
            theta, x, out, rows, N=n, K=theta.shape[0], BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return out


@jit
def turned(columns, c, s, SLOT: tl.constexpr, N: tl.constexpr):
    """Return the columns after the rotation of slot SLOT, by the angle with cosine c and sine s."""
    A: tl.constexpr = (2 * (SLOT % (N // 2)) + SLOT // (N // 2)) % N
    B: tl.constexpr = (A + 1) % N
    new = ()
    for m in tl.static_range(N):
        if m == A:
            new += (c * columns[A] - s * columns[B],)
        elif m == B:
            new += (s * columns[A] + c * columns[B],)
        else:
            new += (columns[m],)
    return new


@jit
def rotate_columns(columns, theta_ptr, N: tl.constexpr, K: tl.constexpr):
    """Return the columns after all K rotations."""
    for slot in tl.static_range(K):
        theta = tl.load(theta_ptr + slot).to(tl.float32)
        columns = turned(columns, tl.cos(theta), tl.sin(theta), slot, N)
    return columns


@jit
def load_columns(rows_ptr, row, mask, stride_row, stride_column, N: tl.constexpr):
    """Load the rows as a tuple of N columns, in float32."""
    columns = ()
    for m in tl.static_range(N):
        columns += (tl.load(rows_ptr + row * stride_row + m * stride_column, mask=mask, other=0.0).to(tl.float32),)
    return columns


@jit
def _rotor_kernel(theta_ptr, x_ptr, out_ptr, rows, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Apply K Givens rotations a' = c a - s b, b' = s a + c b to each row; a program holds BLOCK rows in registers."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = rotate_columns(load_columns(x_ptr, row, row < rows, N, 1, N), theta_ptr, N, K)
    for m in tl.static_range(N):
        tl.store(out_ptr + row * N + m, columns[m], mask=row < rows)
