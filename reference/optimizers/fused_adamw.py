"""AdamW, one parameter and one operation at a time (leak_cnn, technique 001.2; ups, technique 002.8a)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def adamw(
    params: Sequence[torch.Tensor],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> "AdamW":
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), moments starting at 0:
    `p *= 1 - lr * weight_decay`, then `p -= lr * m_hat / (sqrt(v_hat) + eps)`.

    params  tensors of any shapes, changed in place
    grads   one for each parameter, of its shape

    Source: leak_cnn, technique 001.2.
    """
    return AdamW(params, lr, betas, eps, weight_decay)


class AdamW:
    """Step of `adamw`, with its state."""

    def __init__(
        self, params: Sequence[torch.Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self.params = list(params)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.first = [torch.zeros_like(p) for p in self.params]
        self.second = [torch.zeros_like(p) for p in self.params]
        self.steps = 0

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        lr, (beta1, beta2) = self.lr, self.betas
        self.steps += 1
        for p, grad, m, v in zip(self.params, grads, self.first, self.second, strict=True):
            p.grad = grad
            p.mul_(1 - lr * self.weight_decay)
            m.mul_(beta1).add_((1 - beta1) * grad)
            v.mul_(beta2).add_((1 - beta2) * grad * grad)
            m_hat = m / (1 - beta1**self.steps)
            v_hat = v / (1 - beta2**self.steps)
            p.sub_(lr * m_hat / (v_hat.sqrt() + self.eps))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of both moments of each parameter, and the number of steps; `optimized` can load them, too."""
        moments = {"first": [m.clone() for m in self.first], "second": [v.clone() for v in self.second]}
        return {**moments, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, by copying."""
        for own, given in zip((*self.first, *self.second), (*state["first"], *state["second"]), strict=True):
            own.copy_(given)
        self.steps = state["steps"]
