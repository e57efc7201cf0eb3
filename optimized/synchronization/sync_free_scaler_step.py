"""Unscale, clip, apply AdamW and update the scale without host decisions (leak_cnn, technique 001.2b)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perfsuite.errors import PerfsuiteError
from suite.scaling import CLIP_EPS, Scaling


class ScalerStep:
    """An optimizer step on the gradients of a scaled loss, with the rules of `torch.amp.GradScaler`.

    If a gradient is not finite, parameters and moments stay unchanged, and `scale *= backoff_factor`. Otherwise the
    gradients are divided by the scale and clipped to a global norm of `max_norm`, and AdamW (decoupled weight decay)
    makes a step. After `growth_interval` such steps in a row, `scale *= growth_factor`, unless that would overflow.

    The device makes all these decisions. A step never waits for it, and can be captured in a CUDA graph if the
    gradients stay at the same addresses. One pass over the gradients computes their norm, which also shows whether they
    are finite. PyTorch's fused AdamW kernel unscales and clips the gradients as it reads them, and skips the update if
    a flag on the device is set.

    params  tensors of any shapes, at least one, all on one device; changed in place
    lr      a number, or a 0-d float32 tensor on that device. Each step reads it, so a schedule can change it in place
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
        device = self.params[0].device
        self.scale = torch.full((), self.scaling.init_scale, dtype=torch.float32, device=device)
        self.growth = torch.zeros((), dtype=torch.int32, device=device)
        self.steps = torch.zeros((), dtype=torch.float32, device=device)
        self.first = [torch.zeros_like(p) for p in self.params]
        self.second = [torch.zeros_like(p) for p in self.params]
        # The fused kernel reads all four arrays in memory order. A parameter with gaps does not have the order of its
        # moments, so a dense copy is updated and copied back.
        self._copies = {
            i: torch.empty_like(m)
            for i, (p, m) in enumerate(zip(self.params, self.first, strict=True))
            if p.stride() != m.stride()
        }

    @torch.no_grad()
    def __call__(self, grads: Sequence[torch.Tensor]) -> None:
        """Make a step with one gradient for each parameter, of its shape. The gradients may be overwritten."""
        # In float64 the sum of squares of float32 values does not overflow, so it is finite if and only if they are.
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)))
        found_inf = norm.isfinite().logical_not().float()
        # g / divisor is g / scale, times max_norm / (‖g / scale‖ + CLIP_EPS) if that factor is below 1.
        scale = self.scale.double()
        divisor = torch.maximum(scale, (norm + CLIP_EPS * scale) / self.max_norm).float()
        self.steps.add_(1 - found_inf)
        self._adamw(grads, divisor, found_inf)
        torch._amp_update_scale_(
            self.scale,
            self.growth,
            found_inf,
            self.scaling.growth_factor,
            self.scaling.backoff_factor,
            self.scaling.growth_interval,
        )

    def _adamw(self, grads: Sequence[torch.Tensor], divisor: torch.Tensor, found_inf: torch.Tensor) -> None:
        updated, dense = [], []
        for i, (p, grad, m) in enumerate(zip(self.params, grads, self.first, strict=True)):
            updated.append(self._copies[i].copy_(p) if i in self._copies else p)
            dense.append(grad if grad.stride() == m.stride() else torch.empty_like(m).copy_(grad))
        torch._fused_adamw_(
            updated,
            dense,
            self.first,
            self.second,
            [],
            [self.steps] * len(updated),
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=found_inf,
        )
        for i, copy in self._copies.items():
            self.params[i].copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the moments, number of steps, scale, and number of steps towards its next growth.

        The reference can load this state.
        """
        return {
            "first": [m.clone() for m in self.first],
            "second": [v.clone() for v in self.second],
            "steps": self.steps.clone(),
            "scale": self.scale.clone(),
            "growth": self.growth.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state by copying its tensors."""
        for own, given in ((self.first, state["first"]), (self.second, state["second"])):
            for tensor, value in zip(own, given, strict=True):
                tensor.copy_(value)
        for name in ("steps", "scale", "growth"):
            getattr(self, name).copy_(state[name])
