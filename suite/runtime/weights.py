"""A network's weights, name → tensor, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def check_weights(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """ValueError where a checkpoint's weights are others than a trainer's own, or have other shapes."""
    if others := own.keys() ^ given.keys():
        names = ", ".join(sorted(map(str, others)))
        raise ValueError(f"the weights {names} are only in the checkpoint, or only here")
    for name, weight in given.items():
        if not isinstance(weight, torch.Tensor) or weight.is_complex() != own[name].is_complex():
            raise ValueError(f"{name} is no tensor in the checkpoint, or one of complex numbers")
        if weight.shape != own[name].shape:
            raise ValueError(
                f"{name} has shape {list(weight.shape)} in the checkpoint and {list(own[name].shape)} here"
            )


def copies(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps: no gradient, and no memory that training goes on in."""
    return {name: weight.detach().clone() for name, weight in weights.items()}


def optimizer_copies(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same of an optimizer's state, of tensors and lists of them."""
    return {
        name: [t.clone() for t in value] if isinstance(value, list) else value.clone() for name, value in state.items()
    }
