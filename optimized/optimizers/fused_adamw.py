"""AdamW over all parameters in one kernel (leak_cnn, technique 001.2; ups, technique 002.8a)."""

from collections.abc import Callable, Sequence

import torch

from optimized.kernels import ceil_div, interpreting, jit, on_device_of, tl, use_triton

# 8 values a thread: with four arrays, eight 16-byte loads in flight, and registers for a fully occupied
# multiprocessor.
BLOCK = 2048
NUM_WARPS = 8
# Vector accesses need addresses that are multiples of this many bytes.
ALIGNMENT = 16


def adamw(
    params: Sequence[torch.Tensor],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Callable[[Sequence[torch.Tensor]], None]:
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), moments starting at 0:
    `p *= 1 - lr * weight_decay`, then `p -= lr * m_hat / (sqrt(v_hat) + eps)`.

    float32 parameters on CUDA are updated by one Triton kernel over a table of addresses, deterministic and
    without a host synchronisation; the powers of beta stay on the device, so that a step can be captured in a
    CUDA graph as long as the gradients stay where they are. Everything else takes `adamw_torch`.

    params  tensors of any shapes, changed in place
    grads   one for each parameter, of its shape

    Source: leak_cnn, technique 001.2.
    """
    params = list(params)
    if params and use_triton(*params):
        return adamw_triton(params, lr, betas, eps, weight_decay)
    return adamw_torch(params, lr, betas, eps, weight_decay)


def adamw_torch(
    params: Sequence[torch.Tensor],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Callable[[Sequence[torch.Tensor]], None]:
    """`adamw` by torch's own `fused=True`, on any device and dtype."""
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    # fused=True walks the memory of contiguous tensors; given any other it is silently wrong on the CPU.
    flat = [p for p in params if p.is_contiguous()]
    strided = [p for p in params if not p.is_contiguous()]
    optimizers = []
    if flat:
        optimizers.append(torch.optim.AdamW(flat, fused=True, **options))
    if strided:
        optimizers.append(torch.optim.AdamW(strided, foreach=True, **options))

    def step(grads: Sequence[torch.Tensor]) -> None:
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.contiguous() if p.is_contiguous() else grad
        for optimizer in optimizers:
            optimizer.step()

    return step


def adamw_triton(
    params: Sequence[torch.Tensor],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Callable[[Sequence[torch.Tensor]], None]:
    """`adamw` as one Triton kernel for all float32 parameters of one device."""
    return _TritonAdamW(params, lr, betas, eps, weight_decay)


class _TritonAdamW:
    """A table of addresses, one row (parameter, gradient, first moment, second moment) a tensor, and a map from
    each program to its tensor and place in it; the gradients' column is sent again only when they have moved."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        self.params = list(params)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        # Moments keep the strides of a dense parameter, so that all four can be walked in memory order. Where the
        # parameter is not dense they do not, and a dense copy of it is updated instead.
        self.first = [torch.zeros_like(p) for p in self.params]
        self.second = [torch.zeros_like(p) for p in self.params]
        self.working = [
            p.detach() if p.stride() == m.stride() else torch.empty_like(m)
            for p, m in zip(self.params, self.first, strict=True)
        ]
        self.live = [i for i, p in enumerate(self.params) if p.numel()]
        self.grad_addresses: list[int] | None = None
        if not self.live:
            return
        device = self.params[0].device
        self.programs, owner, offset = 0, [], []
        for row, i in enumerate(self.live):
            blocks = ceil_div(self.params[i].numel(), BLOCK)
            owner.append(torch.full((blocks,), row, dtype=torch.int32))
            offset.append(torch.arange(blocks, dtype=torch.int64) * BLOCK)
            self.programs += blocks
        self.owner, self.offset = torch.cat(owner).to(device), torch.cat(offset).to(device)
        self.sizes = torch.tensor([self.params[i].numel() for i in self.live], dtype=torch.int64, device=device)
        fixed = [[t[i].data_ptr() for t in (self.working, self.first, self.second)] for i in self.live]
        self.aligned = all(address % ALIGNMENT == 0 for row in fixed for address in row)
        self.table = torch.tensor(fixed, dtype=torch.int64, device=device)
        # beta ** step, in float64: 1 - beta ** step has no digits to lose in float32.
        self.powers = torch.ones(2, dtype=torch.float64, device=device)
        self.decay = torch.tensor(betas, dtype=torch.float64, device=device)

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad
        if not self.live:
            return
        dense = []
        for i in self.live:
            m = self.first[i]
            # Held until the launch, so that no copy's memory is reused before.
            dense.append(grads[i] if grads[i].stride() == m.stride() else torch.empty_like(m).copy_(grads[i]))
            if self.working[i].data_ptr() != self.params[i].data_ptr():
                self.working[i].copy_(self.params[i])
        addresses = [grad.data_ptr() for grad in dense]
        if addresses != self.grad_addresses:
            self._send(addresses)
        beta1, beta2 = self.betas
        self.powers.mul_(self.decay)
        with on_device_of(self.powers):
            _adamw_kernel[(self.programs,)](
                self.table,
                self.grad_table,
                self.sizes,
                self.owner,
                self.offset,
                self.powers,
                self.lr,
                1 - self.lr * self.weight_decay,
                beta1,
                1 - beta1,
                beta2,
                1 - beta2,
                self.eps,
                BLOCK=BLOCK,
                ALIGNED=self.aligned and self.grads_aligned,
                num_warps=NUM_WARPS,
            )
        for i in self.live:
            if self.working[i].data_ptr() != self.params[i].data_ptr():
                self.params[i].copy_(self.working[i])

    def _send(self, addresses: list[int]) -> None:
        # From pinned memory, which the copy keeps alive: the host does not wait. The old table, if a kernel still
        # reads it, is reused in stream order only.
        device = self.table.device
        host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.grad_table = host.to(device, non_blocking=True)
        self.grads_aligned = all(address % ALIGNMENT == 0 for address in addresses)
        self.grad_addresses = addresses


@jit
def _adamw_block(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    offset,
    size,
    rate,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    root2,
    eps,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    at = offset + tl.arange(0, BLOCK)
    # A mask would split the vector accesses: whole blocks go without.
    mask = None if WHOLE else at < size
    p = tl.load(p_ptr + at, mask=mask)
    g = tl.load(g_ptr + at, mask=mask)
    m = tl.load(m_ptr + at, mask=mask)
    v = tl.load(v_ptr + at, mask=mask)
    m = m * beta1 + one_minus_beta1 * g
    v = v * beta2 + one_minus_beta2 * g * g
    denominator = tl.div_rn(tl.sqrt_rn(v), root2 + tl.zeros_like(v)) + eps
    p = p * decay - rate * tl.div_rn(m, denominator)
    tl.store(p_ptr + at, p, mask=mask)
    tl.store(m_ptr + at, m, mask=mask)
    tl.store(v_ptr + at, v, mask=mask)


@jit
def _adamw_kernel(
    table_ptr,
    grad_table_ptr,
    sizes_ptr,
    owner_ptr,
    offset_ptr,
    powers_ptr,
    lr,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    row = tl.load(owner_ptr + tl.program_id(0))
    offset = tl.load(offset_ptr + tl.program_id(0))
    size = tl.load(sizes_ptr + row)
    p_address = tl.load(table_ptr + row * 3)
    m_address = tl.load(table_ptr + row * 3 + 1)
    v_address = tl.load(table_ptr + row * 3 + 2)
    g_address = tl.load(grad_table_ptr + row)
    if ALIGNED:
        p_address = tl.multiple_of(p_address, 16)
        m_address = tl.multiple_of(m_address, 16)
        v_address = tl.multiple_of(v_address, 16)
        g_address = tl.multiple_of(g_address, 16)
    p_ptr = p_address.to(tl.pointer_type(tl.float32))
    m_ptr = m_address.to(tl.pointer_type(tl.float32))
    v_ptr = v_address.to(tl.pointer_type(tl.float32))
    g_ptr = g_address.to(tl.pointer_type(tl.float32))
    # Offsets are multiples of the block, which the compiler cannot see in a loaded number.
    offset = tl.multiple_of(offset, BLOCK)
    correction1 = 1.0 - tl.load(powers_ptr)
    correction2 = 1.0 - tl.load(powers_ptr + 1)
    rate = lr / correction1.to(tl.float32)
    root2 = tl.sqrt_rn(correction2.to(tl.float32))
    scalars = (rate, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, root2, eps)
    if offset + BLOCK <= size:
        _adamw_block(p_ptr, g_ptr, m_ptr, v_ptr, offset, size, *scalars, BLOCK=BLOCK, WHOLE=True)
    else:
        _adamw_block(p_ptr, g_ptr, m_ptr, v_ptr, offset, size, *scalars, BLOCK=BLOCK, WHOLE=False)
