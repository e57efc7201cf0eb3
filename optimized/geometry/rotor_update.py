"""Rotor update without a host synchronisation: one Triton kernel on CUDA (trainer2, technique 000.2)."""

import math

import torch

from optimized.kernels import ceil_div, jit, launching, tl, use_triton

MIN_LENGTH = 1e-6

# A program owns a tile of slots, loops over all pairs in tiles, and compares each pair's slot with its own slots. The
# trainer's few slots and pairs need one warp and one iteration. 32 x 64 is the largest tile that fits registers well.
SMALL = {"BLOCK_SLOTS": 16, "BLOCK_PAIRS": 16, "num_warps": 1}
LARGE = {"BLOCK_SLOTS": 32, "BLOCK_PAIRS": 64, "num_warps": 4}
# The kernel makes k * P comparisons. Above this number (about 20 us) the linear index_add_ is the better choice,
# although its atomics vary the order of accumulation on CUDA.
MAX_COMPARISONS = 1 << 24

# Write a constant to the right of a tensor: the interpreter does not convert a constant on the left.
TWO_PI = tl.constexpr(2 * math.pi)
PI = tl.constexpr(math.pi)
HALF_PI = tl.constexpr(math.pi / 2)
QUARTER_PI = tl.constexpr(math.pi / 4)
TAN_PI_8 = tl.constexpr(math.tan(math.pi / 8))


def rotor_update(
    theta: torch.Tensor,
    velocity: torch.Tensor,
    index: torch.Tensor,
    loss_delta: torch.Tensor,
    eta: float = 10.0,
) -> torch.Tensor:
    """Update the listed rotor angles in place, against the change of the loss, and return `theta`.

    For each row (i, j, slot) of `index`:
    `theta[slot] += 0.01 * eta * (-loss_delta) * atan2(v_j, v_i) * hypot(v_i, v_j)`. A row is skipped if hypot is below
    1e-6, an index is out of range, or the added value is not finite. The values of a repeated slot add up. Finally,
    every angle is wrapped to [-pi, pi).

    The host never waits for the device. The deterministic Triton kernel runs for float32 tensors on CUDA if k * P is at
    most 2^24. All other inputs use the vectorised form.

    theta       [k], radians, changed in place
    velocity    [n], mean velocity over batch and window
    index       [P, 3] int64, rows (i, j, slot)
    loss_delta  0-d, nudged loss minus free loss

    Source: trainer2, technique 000.2.
    """
    if use_triton(theta, velocity, loss_delta) and theta.shape[0] * index.shape[0] <= MAX_COMPARISONS:
        return rotor_update_triton(theta, velocity, index, loss_delta, eta)
    return rotor_update_vectorised(theta, velocity, index, loss_delta, eta)


def rotor_update_vectorised(
    theta: torch.Tensor,
    velocity: torch.Tensor,
    index: torch.Tensor,
    loss_delta: torch.Tensor,
    eta: float = 10.0,
) -> torch.Tensor:
    """Compute `rotor_update` in PyTorch operations on all pairs at once, on any device and dtype."""
    slots, n, pairs = theta.shape[0], velocity.shape[0], index.shape[0]
    if slots and n and pairs:
        i, j, slot = index.unbind(1)
        valid = (i >= 0) & (i < n) & (j >= 0) & (j < n) & (slot >= 0) & (slot < slots)
        # Clamp and zero instead of a boolean index: the host would have to wait for the size of its result.
        v_i = velocity[i.clamp(0, n - 1)]
        v_j = velocity[j.clamp(0, n - 1)]
        length = torch.hypot(v_i, v_j)
        delta = 0.01 * eta * (-loss_delta) * torch.atan2(v_j, v_i) * length
        # Compare in float64, as the reference does: 1e-6 rounded to float32 is less than 1e-6.
        valid &= (length.double() >= MIN_LENGTH) & torch.isfinite(delta)
        theta.index_add_(0, slot.clamp(0, slots - 1), torch.where(valid, delta, 0.0).to(theta.dtype))
    turns = torch.floor((theta + math.pi) / (2 * math.pi))
    wrapped = theta - 2 * math.pi * turns
    wrapped = torch.where(wrapped >= math.pi, -math.pi, wrapped)
    theta.copy_(torch.where(wrapped < -math.pi, -math.pi, wrapped))
    return theta


def rotor_update_triton(
    theta: torch.Tensor,
    velocity: torch.Tensor,
    index: torch.Tensor,
    loss_delta: torch.Tensor,
    eta: float = 10.0,
) -> torch.Tensor:
    """Compute `rotor_update` with one Triton kernel in float32: deterministic, O(k * P)."""
    slots = theta.shape[0]
    if slots == 0:
        return theta
    config = SMALL if slots <= SMALL["BLOCK_SLOTS"] and index.shape[0] <= SMALL["BLOCK_PAIRS"] else LARGE
    with launching(theta):
        _rotor_update_kernel[(ceil_div(slots, config["BLOCK_SLOTS"]),)](
            theta,
            velocity,
            index,
            loss_delta,
            0.01 * eta,
            slots,
            velocity.shape[0],
            index.shape[0],
            theta.stride(0),
            velocity.stride(0),
            index.stride(0),
            index.stride(1),
            **config,
        )
    return theta


@jit
def _hypot(x, y):
    # Scale by the longer side, so that no square overflows or underflows.
    x, y = tl.abs(x), tl.abs(y)
    longer, shorter = tl.maximum(x, y), tl.minimum(x, y)
    ratio = tl.div_rn(shorter, tl.where(longer > 0, longer, 1.0))
    return longer * tl.sqrt_rn(1.0 + ratio * ratio)


@jit
def _atan2(y, x):
    # The interpreter has no libdevice. atan on [0, tan(pi/8)] is Cephes' atanf; symmetry gives all other values.
    ax, ay = tl.abs(x), tl.abs(y)
    longer, shorter = tl.maximum(ax, ay), tl.minimum(ax, ay)
    t = tl.div_rn(shorter, tl.where(longer > 0, longer, 1.0))
    far = t > TAN_PI_8
    t = tl.where(far, tl.div_rn(t - 1.0, t + 1.0), t)
    z = t * t
    p = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    angle = p * z * t + t
    angle = tl.where(far, angle + QUARTER_PI, angle)
    angle = tl.where(ay > ax, -angle + HALF_PI, angle)
    angle = tl.where(x < 0, -angle + PI, angle)
    # Test the sign bit instead of y < 0: atan2(-0.0, -1) is -pi.
    return tl.where(y.to(tl.int32, bitcast=True) < 0, -angle, angle)


@jit
def _rotor_update_kernel(
    theta_ptr, velocity_ptr, index_ptr, loss_delta_ptr,
    rate, slots, n, pairs, stride_theta, stride_velocity, stride_pair, stride_column,
    BLOCK_SLOTS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Add rate * -loss_delta * atan2(v_j, v_i) * hypot(v_i, v_j) of each pair to theta[slot], and wrap theta.

    A program owns BLOCK_SLOTS slots, and loops over all pairs in tiles of BLOCK_PAIRS. There are no atomics, so the sum
    is deterministic.
    """
    own = tl.program_id(0) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    total = tl.zeros((BLOCK_SLOTS,), dtype=tl.float32)
    scale = rate * -tl.load(loss_delta_ptr).to(tl.float32)
    for start in range(0, pairs, BLOCK_PAIRS):
        pair = (start + tl.arange(0, BLOCK_PAIRS)).to(tl.int64)
        row = index_ptr + pair * stride_pair
        i = tl.load(row, mask=pair < pairs, other=-1)
        j = tl.load(row + stride_column, mask=pair < pairs, other=-1)
        slot = tl.load(row + 2 * stride_column, mask=pair < pairs, other=-1)
        valid = (i >= 0) & (i < n) & (j >= 0) & (j < n)
        v_i = tl.load(velocity_ptr + i * stride_velocity, mask=valid, other=0.0).to(tl.float32)
        v_j = tl.load(velocity_ptr + j * stride_velocity, mask=valid, other=0.0).to(tl.float32)
        length = _hypot(v_i, v_j)
        delta = scale * _atan2(v_j, v_i) * length
        # The comparisons are false for NaN too. Test the components as well: tl.maximum may drop a NaN in one of them.
        infinity = float("inf")
        finite = (tl.abs(v_i) < infinity) & (tl.abs(v_j) < infinity) & (tl.abs(delta) < infinity)
        # 1e-6 is rounded to float32 here, to less than 1e-6: a length that equals the rounded value is too short.
        delta = tl.where(valid & finite & (length > 1e-6), delta, 0.0)
        total += tl.sum(tl.where(slot[None, :] == own[:, None], delta[None, :], 0.0), axis=1)
    address = theta_ptr + own.to(tl.int64) * stride_theta
    angle = tl.load(address, mask=own < slots, other=0.0).to(tl.float32) + total
    angle = angle - tl.floor((angle + PI) / TWO_PI) * TWO_PI
    angle = tl.where(angle >= PI, -PI, angle)
    angle = tl.where(angle < -PI, -PI, angle)
    tl.store(address, angle, mask=own < slots)
