"""A network's weights, name → tensor, as stored in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def check_weights(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if a checkpoint's weights differ from the trainer's in names or shapes, or in being complex."""
    if others := own.keys() ^ saved.keys():
        names = ", ".join(sorted(map(str, others)))
        raise ValueError(f"the weights {names} are only in the checkpoint, or only here")
    for name, weight in saved.items():
        if not isinstance(weight, torch.Tensor) or weight.is_complex() != own[name].is_complex():
            raise ValueError(f"{name} is no tensor in the checkpoint, or one of complex numbers")
        if weight.shape != own[name].shape:
            raise ValueError(
                f"{name} has shape {list(weight.shape)} in the checkpoint and {list(own[name].shape)} here"
            )


def copies(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return detached copies of the weights for a checkpoint."""
    return {name: weight.detach().clone() for name, weight in weights.items()}


def optimizer_copies(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an optimizer's state, whose values are tensors and lists of tensors."""
    return {
        name: [t.clone() for t in value] if isinstance(value, list) else value.clone() for name, value in state.items()
    }
