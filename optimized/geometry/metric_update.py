"""Update the diagonal metric without a host synchronisation: one Triton kernel on CUDA (trainer2)."""

import torch

from optimized.kernels import jit, launching, tl, use_triton

LEAST, MOST = 0.01, 100.0
# One program holds the whole metric; for n = 8 one warp is enough. A larger metric would need several programs, which
# would have to exchange the sum.
MAX_COORDINATES = 4096
# Values per thread: one 16-byte load.
PER_THREAD = 4


def metric_update(
    metric_diag: torch.Tensor,
    velocity_rotated: torch.Tensor,
    loss_delta: torch.Tensor,
    eta: float = 10.0,
) -> torch.Tensor:
    """Update the metric in place from the change of the loss along the velocity, and return `metric_diag`.

    `g += eta * loss_delta * v^2 / (sum v^2 + 1e-8)`, clamped to [0.01, 100]. If any element of that step is not finite,
    because the loss or the velocity is not finite or overflows, the whole metric stays unchanged.

    The host never waits for the device. The Triton kernel runs for float32 tensors on CUDA with n <= 4096. All other
    inputs use the vectorised form.

    metric_diag       [n], changed in place
    velocity_rotated  [n], mean velocity over batch and window, rotated
    loss_delta        0-d, nudged loss minus free loss

    Source: trainer2, metric update.
    """
    if metric_diag.shape[0] <= MAX_COORDINATES and use_triton(metric_diag, velocity_rotated, loss_delta):
        return metric_update_triton(metric_diag, velocity_rotated, loss_delta, eta)
    return metric_update_vectorised(metric_diag, velocity_rotated, loss_delta, eta)


def metric_update_vectorised(
    metric_diag: torch.Tensor,
    velocity_rotated: torch.Tensor,
    loss_delta: torch.Tensor,
    eta: float = 10.0,
) -> torch.Tensor:
    """Compute `metric_update` in PyTorch operations, on any device and dtype."""
    square = velocity_rotated * velocity_rotated
    step = eta * loss_delta * square / (square.sum() + 1e-8)
    moved = torch.clamp(metric_diag + step, LEAST, MOST)
    return metric_diag.copy_(torch.where(torch.isfinite(step).all(), moved, metric_diag))


def metric_update_triton(
    metric_diag: torch.Tensor,
    velocity_rotated: torch.Tensor,
    loss_delta: torch.Tensor,
    eta: float = 10.0,
) -> torch.Tensor:
    """Compute `metric_update` with one Triton kernel, in float32. n > 4096 uses the vectorised form."""
    n = metric_diag.shape[0]
    if n > MAX_COORDINATES:
        return metric_update_vectorised(metric_diag, velocity_rotated, loss_delta, eta)
    if n:
        block = 1 << (n - 1).bit_length()
        with launching(metric_diag):
            _metric_update_kernel[(1,)](
                metric_diag,
                velocity_rotated,
                loss_delta,
                eta,
                n,
                metric_diag.stride(0),
                velocity_rotated.stride(0),
                BLOCK=block,
                num_warps=min(32, max(1, block // (32 * PER_THREAD))),
            )
    return metric_diag


@jit
def _metric_update_kernel(
    metric_ptr, velocity_ptr, loss_delta_ptr, eta, n, stride_metric, stride_velocity, BLOCK: tl.constexpr
):
    """Compute g = clamp(g + step, 0.01, 100) with step = eta * loss_delta * v^2 / (sum v^2 + 1e-8).

    One program updates all n elements; BLOCK is n rounded up to a power of two.
    """
    i = tl.arange(0, BLOCK)
    metric = tl.load(metric_ptr + i * stride_metric, mask=i < n, other=0.0).to(tl.float32)
    v = tl.load(velocity_ptr + i * stride_velocity, mask=i < n, other=0.0).to(tl.float32)
    rate = eta * tl.load(loss_delta_ptr).to(tl.float32)
    square = v * v
    total = tl.sum(square, axis=0) + 1e-8
    step = tl.div_rn(rate * square, tl.zeros_like(square) + total)
    # The comparison is false for NaN too. Elements past the end are ignored, even if the rate is not finite.
    wrong = (i < n) & ~(tl.abs(step) < float("inf"))
    moved = metric + step
    # Both comparisons are false for a NaN in the metric, which stays.
    moved = tl.where(moved < 0.01, 0.01, moved)
    moved = tl.where(moved > 100.0, 100.0, moved)
    keep = tl.max(wrong.to(tl.int32), axis=0) > 0
    tl.store(metric_ptr + i * stride_metric, moved, mask=(i < n) & (keep == 0))
