"""AdamW, one parameter and one operation at a time (leak_cnn, technique 001.2; ups, technique 002.8a)."""

from collections.abc import Callable, Sequence

import torch


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

    params  tensors of any shapes, changed in place
    grads   one for each parameter, of its shape

    Source: leak_cnn, technique 001.2.
    """
    beta1, beta2 = betas
    first = [torch.zeros_like(p) for p in params]
    second = [torch.zeros_like(p) for p in params]
    steps = 0

    @torch.no_grad()
    def step(grads: Sequence[torch.Tensor]) -> None:
        nonlocal steps
        steps += 1
        for p, grad, m, v in zip(params, grads, first, second, strict=True):
            p.grad = grad
            p.mul_(1 - lr * weight_decay)
            m.mul_(beta1).add_((1 - beta1) * grad)
            v.mul_(beta2).add_((1 - beta2) * grad * grad)
            m_hat = m / (1 - beta1**steps)
            v_hat = v / (1 - beta2**steps)
            p.sub_(lr * m_hat / (v_hat.sqrt() + eps))

    return step
