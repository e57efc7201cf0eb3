"""lior and speed from one quadratic form, with a fused forward and backward (trainer2, technique 000.3)."""

import torch

from optimized.kernels import ceil_div, jit, launching, tl, use_triton

# A thread holds whole rows and the metric in registers. A metric of 8 x 8 = 64 entries is the largest that fits well.
# Larger metrics are compute-bound and need a matrix product instead.
MAX_COORDINATES = 8
# (rows per tile, tiles loaded before the first is used, warps), chosen by a sweep at 2^22 rows of 8 coordinates on an
# H200. A copy of the same number of bytes takes 45.0 us there. Several rows per thread keep enough bytes in flight to
# saturate the memory bandwidth.
FULL_FORWARD = (512, 2, 4)  # 45.5 us; 52.4 us with (128, 2, 4) and programs that loop over the rows
DIAGONAL_FORWARD = (256, 1, 8)  # 44.5 us
# Each program of the backward loops over the rows, keeps a running sum for each entry of the metric, and writes one
# partial sum. An H200 (132 multiprocessors) holds this number of programs at once.
BACKWARD = (128, 2, 4)
BACKWARD_PROGRAMS = 4 * 132


def lior_and_speed(
    velocity: torch.Tensor,
    curvature: torch.Tensor,
    metric: torch.Tensor | None,
    metric_diag: torch.Tensor | None = None,
    eps: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (lior, speed), each [B]: speed is the length of the velocity in the metric, lior is curvature * speed.

    speed is `sqrt(max(v' g v, 0) + eps)`, or with `metric_diag` `sqrt(max(sum g_i v_i^2, 0) + eps)`.

    Triton kernels run for float32 tensors on CUDA with n <= 8 and one metric for all rows. Their forward and backward
    are deterministic; they have no second derivative. All other inputs use the vectorised form. For the forward with a
    diagonal metric, torch.compile of the reference is equally fast: both are limited by memory bandwidth.

    velocity     [B, n]
    curvature    [B], R_sc
    metric       [n, n] or [B, n, n]; None if metric_diag is given
    metric_diag  [n] or None; if given, it is used instead of metric

    Source: trainer2, technique 000.3.
    """
    form = metric if metric_diag is None else metric_diag
    if form.dim() < 3 and 0 < velocity.shape[1] <= MAX_COORDINATES and use_triton(velocity, curvature, form):
        return lior_and_speed_triton(velocity, curvature, metric, metric_diag, eps)
    return lior_and_speed_vectorised(velocity, curvature, metric, metric_diag, eps)


def lior_and_speed_vectorised(
    velocity: torch.Tensor,
    curvature: torch.Tensor,
    metric: torch.Tensor | None,
    metric_diag: torch.Tensor | None = None,
    eps: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `lior_and_speed` in PyTorch operations, with one quadratic form, on any device and dtype."""
    if metric_diag is not None:
        form = (metric_diag * velocity * velocity).sum(-1)
    elif metric.dim() == 3:
        form = (torch.bmm(velocity[:, None], metric).squeeze(1) * velocity).sum(-1)
    else:
        form = ((velocity @ metric) * velocity).sum(-1)
    speed = torch.sqrt(torch.clamp(form, min=0) + eps)
    return curvature * speed, speed


def lior_and_speed_triton(
    velocity: torch.Tensor,
    curvature: torch.Tensor,
    metric: torch.Tensor | None,
    metric_diag: torch.Tensor | None = None,
    eps: float = 1e-8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `lior_and_speed` with a fused Triton kernel and its own backward, in float32.

    n > 8 and a metric for each row use the vectorised form.
    """
    form = metric if metric_diag is None else metric_diag
    if not 0 < velocity.shape[1] <= MAX_COORDINATES or form.dim() == 3:
        return lior_and_speed_vectorised(velocity, curvature, metric, metric_diag, eps)
    return _LiorAndSpeed.apply(velocity, curvature, form, eps)


class _LiorAndSpeed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, velocity, curvature, form, eps):
        rows, n = velocity.shape
        # The kernels load contiguous rows in 16-byte pieces.
        velocity, form = velocity.contiguous(), form.contiguous()
        lior = torch.empty(rows, dtype=velocity.dtype, device=velocity.device)
        speed = torch.empty_like(lior)
        ctx.save_for_backward(velocity, curvature, form)
        ctx.eps = eps
        if rows:
            block, tiles, warps = DIAGONAL_FORWARD if form.dim() == 1 else FULL_FORWARD
            with launching(velocity):
                _forward_kernel[(ceil_div(rows, block * tiles),)](
                    velocity,
                    curvature,
                    form,
                    lior,
                    speed,
                    rows,
                    curvature.stride(0),
                    eps,
                    N=n,
                    BLOCK=block,
                    TILES=tiles,
                    DIAGONAL=form.dim() == 1,
                    num_warps=warps,
                )
        return lior, speed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_lior, d_speed):
        velocity, curvature, form = ctx.saved_tensors
        rows, n = velocity.shape
        diagonal = form.dim() == 1
        d_velocity = torch.empty_like(velocity)
        d_curvature = torch.empty(rows, dtype=velocity.dtype, device=velocity.device)
        if not rows:
            return d_velocity, d_curvature, torch.zeros_like(form), None
        block, tiles, warps = BACKWARD
        programs = min(ceil_div(rows, block * tiles), BACKWARD_PROGRAMS)
        form_needed = ctx.needs_input_grad[2]
        partial = torch.empty((programs, *form.shape) if form_needed else 1, dtype=torch.float32, device=form.device)
        with launching(velocity):
            _backward_kernel[(programs,)](
                velocity,
                curvature,
                form,
                d_lior,
                d_speed,
                d_velocity,
                d_curvature,
                partial,
                rows,
                curvature.stride(0),
                d_lior.stride(0),
                d_speed.stride(0),
                ctx.eps,
                N=n,
                LOG2_CELLS=(n if diagonal else n * n).bit_length() if n > 1 else 1,
                BLOCK=block,
                TILES=tiles,
                DIAGONAL=diagonal,
                FORM_NEEDED=form_needed,
                num_warps=warps,
            )
        # The sum has a fixed order and uses no atomics, so every run gives the same gradient.
        return d_velocity, d_curvature, partial.sum(0) if form_needed else None, None


@jit
def _load_rows(velocity_ptr, row, rows, N: tl.constexpr, BLOCK: tl.constexpr):
    """Load BLOCK rows as a tuple of coordinates, each [BLOCK], padded with zeros to a multiple of 4.

    A load reads 16 bytes of a row, and one thread holds the whole row.
    """
    four = tl.arange(0, 4)
    v = ()
    for chunk in tl.static_range((N + 3) // 4):
        column = chunk * 4 + four
        inside = (row < rows)[:, None] & (column < N)[None, :]
        quad = tl.load(velocity_ptr + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(quad, (BLOCK, 2, 2)))
        v0, v2 = tl.split(even)
        v1, v3 = tl.split(odd)
        v += (v0, v1, v2, v3)
    return v


@jit
def _forward_kernel(
    velocity_ptr, curvature_ptr, form_ptr, lior_ptr, speed_ptr,
    rows, stride_curvature, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Compute q = v' g v (DIAGONAL: sum g_i v_i^2), speed = sqrt(max(q, 0) + eps) and lior = curvature * speed.

    Program p computes TILES adjacent tiles of BLOCK rows, from row p * TILES * BLOCK. It loads all of its tiles before
    it computes the first. Each thread keeps the whole metric in registers.
    """
    g = ()
    for cell in tl.static_range(N if DIAGONAL else N * N):
        g += (tl.load(form_ptr + cell).to(tl.float32),)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TILES) + tl.arange(0, BLOCK)
    vs = ()
    curvatures = ()
    for tile in tl.static_range(TILES):
        row = first + tile * BLOCK
        vs += (_load_rows(velocity_ptr, row, rows, N, BLOCK),)
        curvature = tl.load(curvature_ptr + row * stride_curvature, mask=row < rows, other=0.0)
        curvatures += (curvature.to(tl.float32),)
    for tile in tl.static_range(TILES):
        row = first + tile * BLOCK
        v = vs[tile]
        q = tl.zeros((BLOCK,), dtype=tl.float32)
        for j in tl.static_range(N):
            if DIAGONAL:
                along = v[j] * g[j]
            else:
                along = v[0] * g[j]
                for i in tl.static_range(1, N):
                    along += v[i] * g[i * N + j]
            q += along * v[j]
        # tl.maximum would drop a NaN, which must propagate.
        speed = tl.sqrt_rn(tl.where(q < 0, 0.0, q) + eps)
        tl.store(lior_ptr + row, curvatures[tile] * speed, mask=row < rows)
        tl.store(speed_ptr + row, speed, mask=row < rows)


@jit
def _backward_kernel(
    velocity_ptr, curvature_ptr, form_ptr, d_lior_ptr, d_speed_ptr, d_velocity_ptr, d_curvature_ptr, partial_ptr,
    rows, stride_curvature, stride_d_lior, stride_d_speed, eps,
    N: tl.constexpr, LOG2_CELLS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, DIAGONAL: tl.constexpr,
    FORM_NEEDED: tl.constexpr,
):  # fmt: skip
    """Compute d_velocity = d_q * (g + g') v, d_curvature = d_lior * speed and d_g = sum over rows of d_q * v v'.

    d_q = (d_speed + d_lior * curvature) / (2 * speed). With DIAGONAL, d_velocity = d_q * 2 g v and d_g = sum of
    d_q * v^2. A program loads TILES tiles of BLOCK rows at a time, and advances by the rows of all programs. It writes
    its own sum of d_g to row `program` of `partial`, if FORM_NEEDED.
    """
    CELLS: tl.constexpr = N if DIAGONAL else N * N
    PADDED: tl.constexpr = 1 << LOG2_CELLS
    zero = tl.zeros((BLOCK,), dtype=tl.float32)
    # The gradients depend on g only through g + g', and d_g is symmetric: entries with i <= j are enough for both.
    g = ()
    d_g = ()
    for i in tl.static_range(N):
        if DIAGONAL:
            g += (tl.load(form_ptr + i).to(tl.float32) * 2.0,)
            d_g += (zero,)
        else:
            for j in tl.static_range(N):
                if i <= j:
                    upper = tl.load(form_ptr + i * N + j).to(tl.float32)
                    g += (upper + tl.load(form_ptr + j * N + i).to(tl.float32),)
                    d_g += (zero,)
                else:
                    g += (g[j * N + i],)
    four = tl.arange(0, 4)
    for start in range(tl.program_id(0) * (BLOCK * TILES), rows, tl.num_programs(0) * (BLOCK * TILES)):
        first = (start + tl.arange(0, BLOCK)).to(tl.int64)
        vs = ()
        scalars = ()
        for tile in tl.static_range(TILES):
            row = first + tile * BLOCK
            mask = row < rows
            vs += (_load_rows(velocity_ptr, row, rows, N, BLOCK),)
            curvature = tl.load(curvature_ptr + row * stride_curvature, mask=mask, other=0.0).to(tl.float32)
            d_lior = tl.load(d_lior_ptr + row * stride_d_lior, mask=mask, other=0.0).to(tl.float32)
            d_speed = tl.load(d_speed_ptr + row * stride_d_speed, mask=mask, other=0.0).to(tl.float32)
            scalars += ((curvature, d_lior, d_speed),)
        for tile in tl.static_range(TILES):
            row = first + tile * BLOCK
            v = vs[tile]
            curvature, d_lior, d_speed = scalars[tile]
            q = zero
            slope = ()
            for j in tl.static_range(N):
                if DIAGONAL:
                    s = v[j] * g[j]
                else:
                    s = v[0] * g[j]
                    for i in tl.static_range(1, N):
                        s += v[i] * g[i * N + j]
                # Halve each term before the addition: 2 * q may overflow where q does not.
                q += (0.5 * s) * v[j]
                slope += (s,)
            speed = tl.sqrt_rn(tl.where(q < 0, 0.0, q) + eps)
            # As in torch.clamp(min=0), the gradient is 0 for q < 0 and passes at q = 0. Rows past the end are masked:
            # with eps = 0 they would be 0 / 0, and d_g would be NaN.
            d_q = tl.where((q >= 0) & (row < rows), tl.div_rn(d_speed + d_lior * curvature, 2.0 * speed), 0.0)
            tl.store(d_curvature_ptr + row, d_lior * speed, mask=row < rows)
            for chunk in tl.static_range((N + 3) // 4):
                quad = ()
                for c in tl.static_range(4):
                    if chunk * 4 + c < N:
                        quad += (d_q * slope[chunk * 4 + c],)
                    else:
                        quad += (zero,)
                column = chunk * 4 + four
                inside = (row < rows)[:, None] & (column < N)[None, :]
                d_v = tl.reshape(tl.join(tl.join(quad[0], quad[2]), tl.join(quad[1], quad[3])), (BLOCK, 4))
                tl.store(d_velocity_ptr + row[:, None] * N + column[None, :], d_v, mask=inside)
            if FORM_NEEDED:
                new = ()
                for i in tl.static_range(N):
                    weighted = d_q * v[i]
                    if DIAGONAL:
                        new += (d_g[i] + weighted * v[i],)
                    else:
                        for j in tl.static_range(i, N):
                            new += (d_g[i * N - i * (i - 1) // 2 + j - i] + weighted * v[j],)
                d_g = new
    if FORM_NEEDED:
        # Join all entries into one tensor, so that one reduction over the threads sums them all.
        cells = ()
        for i in tl.static_range(N):
            if DIAGONAL:
                cells += (d_g[i],)
            else:
                for j in tl.static_range(N):
                    if i <= j:
                        cells += (d_g[i * N - i * (i - 1) // 2 + j - i],)
                    else:
                        cells += (d_g[j * N - j * (j - 1) // 2 + i - j],)
        for _ in tl.static_range(CELLS, PADDED):
            cells += (zero,)
        for level in tl.static_range(LOG2_CELLS):
            joined = ()
            for cell in tl.static_range(PADDED >> (level + 1)):
                joined += (tl.join(cells[cell], cells[cell + (PADDED >> (level + 1))]),)
            cells = joined
        total = tl.sum(tl.reshape(cells[0], (BLOCK, PADDED)), axis=0)
        cell = tl.arange(0, PADDED)
        tl.store(partial_ptr + tl.program_id(0) * CELLS + cell, total, mask=cell < CELLS)
