"""Muon for the matrices and AdamW for the other parameters, each for all of them at once (ups, technique 002.8)."""

import functools
from collections.abc import Sequence

import torch

from optimized.optimizers.fused_adamw import adamw
from optimized.optimizers.muon import muon
from suite.hybrid_optimizer import Hybrid


def hybrid_muon_adamw(
    params: Sequence[torch.Tensor],
    lr: float = 1.4e-3,
    weight_decay: float = 0.03,
    dtype: torch.dtype = torch.bfloat16,
) -> Hybrid:
    """Build `step(grads)`, which sets each parameter's `.grad` and updates the parameters in place.

    Tensors of two dimensions are Muon's; biases, norms and what has more dimensions are AdamW's. Both have the same
    learning rate and weight decay.

    params  tensors of any shapes, changed in place
    dtype   what Muon orthogonalizes float32 matrices in
    grads   one for each parameter, of its shape

    Source: ups, technique 002.8.
    """
    return Hybrid(
        params,
        functools.partial(muon, lr=lr, weight_decay=weight_decay, dtype=dtype),
        functools.partial(adamw, lr=lr, weight_decay=weight_decay),
    )
