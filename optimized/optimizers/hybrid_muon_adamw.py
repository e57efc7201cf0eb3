"""Muon for the matrices and AdamW for the other parameters, both over all tensors at once (ups, technique 002.8)."""

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

    Muon updates the two-dimensional tensors. AdamW updates all others: biases, norms, and tensors of more dimensions.
    Both use the same learning rate and weight decay.

    params  tensors of any shapes, changed in place
    dtype   dtype in which Muon orthogonalizes float32 matrices
    grads   one for each parameter, of its shape

    Source: ups, technique 002.8.
    """
    return Hybrid(
        params,
        functools.partial(muon, lr=lr, weight_decay=weight_decay, dtype=dtype),
        functools.partial(adamw, lr=lr, weight_decay=weight_decay),
    )
