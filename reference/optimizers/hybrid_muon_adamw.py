"""Muon for the matrices and AdamW for the other parameters, one after the other (ups, technique 002.8)."""

from collections.abc import Callable, Sequence

import torch

from reference.optimizers.fused_adamw import adamw
from reference.optimizers.muon import muon


def hybrid_muon_adamw(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[Sequence[torch.Tensor]], None]:
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    Tensors of two dimensions are Muon's; biases, norms and what has more dimensions are AdamW's. Both have the same
    learning rate and weight decay.

    params  tensors of any shapes, changed in place
    dtype   what Muon orthogonalizes float32 matrices in
    grads   one for each parameter, of its shape

    Source: ups, technique 002.8.
    """
    matrices = [i for i, p in enumerate(params) if p.dim() == 2]
    others = [i for i, p in enumerate(params) if p.dim() != 2]
    of_matrices = muon([params[i] for i in matrices], lr, weight_decay=weight_decay, dtype=dtype)
    of_others = adamw([params[i] for i in others], lr, weight_decay=weight_decay)

    def step(grads: Sequence[torch.Tensor]) -> None:
        if len(grads) != len(params):
            raise ValueError(f"{len(grads)} gradients for {len(params)} parameters; give one for each")
        of_matrices([grads[i] for i in matrices])
        of_others([grads[i] for i in others])

    return step
