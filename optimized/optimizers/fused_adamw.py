"""AdamW over all parameters in one kernel (leak_cnn, technique 001.2; ups, technique 002.8a)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from optimized.addresses import Addresses, are_aligned
from optimized.kernels import ceil_div, jit, launching, tl, use_triton

# 8 values per thread: with four arrays, these are eight 16-byte loads in flight, and few enough registers for full
# occupancy.
BLOCK = 2048
NUM_WARPS = 8


def adamw(
    params: Sequence[torch.Tensor],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> "TorchAdamW | _TritonAdamW":
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), moments starting at 0:
    `p *= 1 - lr * weight_decay`, then `p -= lr * m_hat / (sqrt(v_hat) + eps)`.

    If all parameters are float32 on one GPU, one Triton kernel updates them through a table of addresses. It is
    deterministic and needs no host synchronisation. The powers of beta stay on the device, so a CUDA graph can capture
    a step, provided that the gradients keep their addresses. All other parameters use `adamw_torch`.

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
) -> "TorchAdamW":
    """Build `adamw` with torch.optim.AdamW, on any device and dtype.

    Contiguous parameters use `fused=True`, the others `foreach=True`.
    """
    return TorchAdamW(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class TorchAdamW:
    """Step of `adamw_torch`, with its state."""

    def __init__(self, params: Sequence[torch.Tensor], options: dict[str, Any]) -> None:
        self.params = list(params)
        # fused=True assumes contiguous tensors. For any other it is silently wrong on the CPU.
        flat = [p for p in self.params if p.is_contiguous()]
        strided = [p for p in self.params if not p.is_contiguous()]
        self.optimizers = []
        if flat:
            self.optimizers.append(torch.optim.AdamW(flat, fused=True, **options))
        if strided:
            self.optimizers.append(torch.optim.AdamW(strided, foreach=True, **options))
        self.steps = 0

    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        self.steps += 1
        for p, grad in zip(self.params, grads, strict=True):
            # The fused kernel compares strides even along a dimension of size 1, where they have no meaning.
            same = p.stride() == grad.stride() or not p.is_contiguous()
            p.grad = grad if same else torch.empty_like(p).copy_(grad)
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of both moments of each parameter, and the number of steps; the reference can load them."""
        merged = {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}
        moments = [moments_of(merged.get(p, {}), p) for p in self.params]
        return {"first": [m for m, _ in moments], "second": [v for _, v in moments], "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, by copying."""
        self.steps = state["steps"]
        moments = dict(zip(self.params, zip(state["first"], state["second"], strict=True), strict=True))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    optimizer.state[p] = torch_state(p, self.steps, *moments[p], fused=bool(group["fused"]))


def moments_of(state: Mapping[str, Any], p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of both moments from torch.optim.AdamW's state of a parameter; zeros before the first step."""
    if not state:
        return torch.zeros_like(p), torch.zeros_like(p)
    return state["exp_avg"].clone(), state["exp_avg_sq"].clone()


def torch_state(
    p: torch.Tensor, steps: int, first: torch.Tensor, second: torch.Tensor, *, fused: bool
) -> dict[str, torch.Tensor]:
    """Build torch.optim.AdamW's state of a parameter, by copying; empty before the first step."""
    if not steps:
        return {}
    return {
        "step": torch.tensor(float(steps), dtype=torch.float32, device=p.device if fused else "cpu"),
        "exp_avg": torch.empty_like(p).copy_(first),
        "exp_avg_sq": torch.empty_like(p).copy_(second),
    }


def adamw_triton(
    params: Sequence[torch.Tensor],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> "_TritonAdamW":
    """Build `adamw` with one Triton kernel for all parameters, which are float32 and on one device."""
    return _TritonAdamW(params, lr, betas, eps, weight_decay)


class _TritonAdamW:
    """Step of `adamw_triton`, with its tables: the addresses of each tensor, and each program's tensor and offset."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        self.params = list(params)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.first = [torch.zeros_like(p) for p in self.params]
        self.second = [torch.zeros_like(p) for p in self.params]
        # The moments of a dense parameter have its strides, so that all four arrays are read in memory order. For a
        # parameter with gaps, a dense copy is updated and copied back.
        self.copies = {
            i: torch.empty_like(m)
            for i, (p, m) in enumerate(zip(self.params, self.first, strict=True))
            if p.stride() != m.stride() and p.numel()
        }
        self.live = [i for i, p in enumerate(self.params) if p.numel()]
        device = self.params[0].device if self.params else torch.device("cpu")
        # On the device, so that replays of a CUDA graph are counted, too.
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        if not self.live:
            return
        owner, offset = [], []
        for row, i in enumerate(self.live):
            blocks = ceil_div(self.params[i].numel(), BLOCK)
            owner.append(torch.full((blocks,), row, dtype=torch.int32))
            offset.append(torch.arange(blocks, dtype=torch.int64) * BLOCK)
        self.owner, self.offset = torch.cat(owner).to(device), torch.cat(offset).to(device)
        sizes = [self.params[i].numel() for i in self.live]
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self._locate_moments()
        self.addresses = Addresses(device)
        # beta ** step is float64: in float32, 1 - beta ** step would lose most of its digits in the first steps.
        self.powers = torch.ones(2, dtype=torch.float64, device=device)
        self.factors = torch.tensor(self.betas, dtype=torch.float64, device=device)

    def _locate_moments(self) -> None:
        """Make the table of the moments' addresses."""
        moments = [t[i].data_ptr() for t in (self.first, self.second) for i in self.live]
        self.moments = torch.tensor(moments, dtype=torch.int64, device=self.steps.device)
        self.moments_aligned = are_aligned(moments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a deep copy or a pickled step, whose moments have addresses of their own."""
        self.__dict__.update(state)
        if self.live:
            self._locate_moments()

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad
        self.steps.add_(1)
        if not self.live:
            return
        # Keep both lists alive until the launch, so that the memory of temporaries is not reused before it.
        updated, dense = [], []
        for i in self.live:
            p, grad, m = self.params[i], grads[i], self.first[i]
            updated.append(self.copies[i].copy_(p) if i in self.copies else p)
            dense.append(grad if grad.stride() == m.stride() else torch.empty_like(m).copy_(grad))
        self.addresses.send([*updated, *dense])
        beta1, beta2 = self.betas
        self.powers.mul_(self.factors)
        with launching(self.powers):
            _adamw_kernel[(self.owner.shape[0],)](
                self.addresses.table,
                self.moments,
                self.sizes,
                self.owner,
                self.offset,
                self.powers,
                len(self.live),
                self.lr,
                1 - self.lr * self.weight_decay,
                beta1,
                1 - beta1,
                beta2,
                1 - beta2,
                self.eps,
                BLOCK=BLOCK,
                ALIGNED=self.moments_aligned and self.addresses.aligned,
                num_warps=NUM_WARPS,
            )
        for i, copy in self.copies.items():
            self.params[i].copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of both moments of each parameter, and the number of steps; the reference can load them."""
        moments = {"first": [m.clone() for m in self.first], "second": [v.clone() for v in self.second]}
        return {**moments, "steps": int(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, by copying."""
        for own, given in zip((*self.first, *self.second), (*state["first"], *state["second"]), strict=True):
            own.copy_(given)
        self.steps.fill_(state["steps"])
        if self.live:
            self.powers.fill_(1.0)
            for _ in range(state["steps"]):  # multiply as the steps do, for the same rounding
                self.powers.mul_(self.factors)


@jit
def _adamw_block(
    p_ptr, g_ptr, m_ptr, v_ptr,
    offset, size, rate, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root2, eps,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Update the BLOCK elements of one parameter from `offset` on, as `_adamw_kernel` says."""
    at = offset + tl.arange(0, BLOCK)
    # A mask would split the vector accesses, so whole blocks have none.
    mask = None if WHOLE else at < size
    p = tl.load(p_ptr + at, mask=mask)
    g = tl.load(g_ptr + at, mask=mask)
    m = tl.load(m_ptr + at, mask=mask)
    v = tl.load(v_ptr + at, mask=mask)
    m = m * beta1 + one_minus_beta1 * g
    v = v * beta2 + one_minus_beta2 * g * g
    p = p * decay - rate * (m / (tl.sqrt(v) * inverse_root2 + eps))
    tl.store(p_ptr + at, p, mask=mask)
    tl.store(m_ptr + at, m, mask=mask)
    tl.store(v_ptr + at, v, mask=mask)


@jit
def _adamw_kernel(
    addresses_ptr, moments_ptr, sizes_ptr, owner_ptr, offset_ptr, powers_ptr,
    tensors, lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2 and p = decay p - rate m / (root + eps).

    rate = lr / (1 - beta1^t) and root = sqrt(v) / sqrt(1 - beta2^t). Each program updates BLOCK elements of one tensor:
    row `owner[program]` of the address table, from element `offset[program]` on.
    """
    row = tl.load(owner_ptr + tl.program_id(0))
    # The offset is a multiple of BLOCK, which the compiler cannot infer for a loaded value.
    offset = tl.multiple_of(tl.load(offset_ptr + tl.program_id(0)), BLOCK)
    size = tl.load(sizes_ptr + row)
    p_ptr = tl.load(addresses_ptr + row).to(tl.pointer_type(tl.float32))
    g_ptr = tl.load(addresses_ptr + tensors + row).to(tl.pointer_type(tl.float32))
    m_ptr = tl.load(moments_ptr + row).to(tl.pointer_type(tl.float32))
    v_ptr = tl.load(moments_ptr + tensors + row).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        p_ptr = tl.multiple_of(p_ptr, 16)
        g_ptr = tl.multiple_of(g_ptr, 16)
        m_ptr = tl.multiple_of(m_ptr, 16)
        v_ptr = tl.multiple_of(v_ptr, 16)
    correction1 = 1.0 - tl.load(powers_ptr)
    correction2 = 1.0 - tl.load(powers_ptr + 1)
    rate = lr / correction1.to(tl.float32)
    inverse_root2 = 1.0 / tl.sqrt_rn(correction2.to(tl.float32))
    scalars = (rate, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root2, eps)
    if offset + BLOCK <= size:
        _adamw_block(p_ptr, g_ptr, m_ptr, v_ptr, offset, size, *scalars, BLOCK=BLOCK, WHOLE=True)
    else:
        _adamw_block(p_ptr, g_ptr, m_ptr, v_ptr, offset, size, *scalars, BLOCK=BLOCK, WHOLE=False)
