"""Unscaling, clipping, AdamW and the update of the scale, decided by the host (leak_cnn, technique 001.2b)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perfsuite.errors import PerfsuiteError
from suite.scaling import CLIP_EPS, Scaling


class ScalerStep:
    """An optimizer step on the gradients of a scaled loss, with the rules of `torch.amp.GradScaler`.

    The host reads whether all gradients are finite, and decides. If a gradient is not finite, parameters and moments do
    not change, and `scale *= backoff_factor`. Otherwise the gradients are divided by the scale and clipped to a global
    norm of `max_norm`, and AdamW (decoupled weight decay) makes a step. After `growth_interval` such steps in a row,
    `scale *= growth_factor`, unless that would overflow.

    params  tensors of any shapes, at least one, all on one device; changed in place
    lr      a number, or a 0-d tensor. Each step reads it, so a schedule can change it in place
    scale   0-d float32, the factor by which the loss must be multiplied; changed in place

    PerfsuiteError if there are no parameters.

    Source: leak_cnn, technique 001.2b.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_norm: float = 1.0,
        scaling: Scaling | None = None,
    ) -> None:
        self.params = list(params)
        if not self.params:
            raise PerfsuiteError("params: there are none; give the model's parameters")
        self.lr, self.betas, self.eps, self.weight_decay, self.max_norm = lr, betas, eps, weight_decay, max_norm
        self.scaling = scaling or Scaling()
        self.scale = torch.full((), self.scaling.init_scale, dtype=torch.float32, device=self.params[0].device)
        self.first = [torch.zeros_like(p) for p in self.params]
        self.second = [torch.zeros_like(p) for p in self.params]
        self.steps = 0
        self.growth = 0

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        """Make a step with one gradient for each parameter, of its shape. The gradients may be overwritten."""
        if torch.stack([g.isfinite().all() for g in grads]).all().item():
            # In float16 small gradients and eps would be 0, and large gradients' norm would overflow.
            wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
            self._adamw(self._clipped([g / self.scale for g in wide]))
            self.growth += 1
            if self.growth == self.scaling.growth_interval:
                grown = self.scale * self.scaling.growth_factor
                if grown.isfinite().item():
                    self.scale.copy_(grown)
                self.growth = 0
        else:
            self.scale.mul_(self.scaling.backoff_factor)
            self.growth = 0

    def _clipped(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        norm = torch.stack([g.norm() for g in grads]).norm()
        factor = (self.max_norm / (norm + CLIP_EPS)).clamp(max=1.0)
        return [g * factor for g in grads]

    def _adamw(self, grads: Sequence[torch.Tensor]) -> None:
        beta1, beta2 = self.betas
        self.steps += 1
        for p, grad, m, v in zip(self.params, grads, self.first, self.second, strict=True):
            wide = [t.to(grad.dtype) for t in (p, m, v)]  # p, m and v themselves, except in half precision
            param, first, second = wide
            param.mul_(1 - self.lr * self.weight_decay)
            first.mul_(beta1).add_((1 - beta1) * grad)
            second.mul_(beta2).add_((1 - beta2) * grad * grad)
            m_hat = first / (1 - beta1**self.steps)
            v_hat = second / (1 - beta2**self.steps)
            param.sub_(self.lr * m_hat / (v_hat.sqrt() + self.eps))
            for own, new in zip((p, m, v), wide, strict=True):
                own.copy_(new)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of moments, number of steps, scale, and steps towards its growth; `optimized` can load it."""
        return {
            "first": [m.clone() for m in self.first],
            "second": [v.clone() for v in self.second],
            "steps": torch.tensor(float(self.steps)),
            "scale": self.scale.clone(),
            "growth": torch.tensor(self.growth, dtype=torch.int32),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. Its tensors are copied."""
        for own, given in ((self.first, state["first"]), (self.second, state["second"])):
            for tensor, value in zip(own, given, strict=True):
                tensor.copy_(value)
        self.steps, self.growth = int(state["steps"].item()), int(state["growth"].item())
        self.scale.copy_(state["scale"])
