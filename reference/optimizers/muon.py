"""Muon, one matrix and one operation at a time (ups, technique 002.8)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7


def muon(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    momentum: float = 0.95,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> "Muon":
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    Muon with Nesterov momentum and decoupled weight decay (Jordan, 2024), momenta starting at 0:
    `m += (1 - momentum) * (g - m)`; o is `g + momentum * (m - g)`, orthogonalized; `p *= 1 - lr * weight_decay`, then
    `p -= lr * sqrt(max(1, rows / columns)) * o`.

    params  matrices [rows, columns], changed in place
    dtype   dtype in which float32 matrices are orthogonalized; torch.optim.Muon uses bfloat16
    grads   one for each parameter, of its shape

    Source: ups, technique 002.8.
    """
    return Muon(params, lr, momentum, weight_decay, dtype)


class Muon:
    """Step of `muon`, with its state."""

    def __init__(
        self, params: Sequence[torch.Tensor], lr: float, momentum: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        self.params, self.dtype = list(params), dtype
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.momenta = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        lr, momentum = self.lr, self.momentum
        for p, grad, m in zip(self.params, grads, self.momenta, strict=True):
            p.grad = grad
            if not p.numel():
                continue
            m.add_((1 - momentum) * (grad - m))
            update = grad + momentum * (m - grad)
            update = orthogonalized(update.to(self.dtype) if p.dtype == torch.float32 else update)
            rows, columns = p.shape
            p.mul_(1 - lr * self.weight_decay)
            p.sub_(lr * max(1.0, rows / columns) ** 0.5 * update.to(p.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the momenta, one for each matrix; `optimized` can load them, too."""
        return {"momenta": [m.clone() for m in self.momenta]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, by copying."""
        for own, given in zip(self.momenta, state["momenta"], strict=True):
            own.copy_(given)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix [rows, columns] with its singular values moved near 1, by five Newton–Schulz steps."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x
