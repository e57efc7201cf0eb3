"""Divide the inputs among the processes of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from perfsuite.declare.specs import ListSpec, TensorSpec

Change = Callable[[torch.Tensor, int], torch.Tensor]
"""(Tensor, dimension along which it is divided) → tensor that replaces it."""


def of_rank(specs: Mapping[str, Any], values: Mapping[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return the inputs of one rank: its part of the inputs that are `by_rank`, and the whole of all others.

    The part of a contiguous tensor is a new tensor, as if the rank had made it. The part of any other tensor is a view.
    """

    def own(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        view = part(tensor, dim, rank, ranks)
        return view.clone(memory_format=torch.contiguous_format) if tensor.is_contiguous() else view

    return {name: _changed(specs[name], value, own) for name, value in values.items()}


def equal(specs: Mapping[str, Any], values: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return the inputs with every rank's part replaced by that of the first rank."""

    def repeated(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([part(tensor, dim, 0, ranks)] * ranks, dim)

    return {name: _changed(specs[name], value, repeated) for name, value in values.items()}


def part(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    """Return the rank's part of the tensor along this dimension, as a view."""
    length = tensor.shape[dim] // ranks
    return tensor.narrow(dim, rank * length, length)


def _changed(spec: Any, value: Any, change: Change) -> Any:
    if isinstance(spec, TensorSpec):
        return value if spec.by_rank is None else change(value, spec.by_rank)
    if isinstance(spec, ListSpec):
        return [_changed(spec.item, held, change) for held in value]
    if isinstance(spec, (list, tuple)):
        return type(value)(_changed(s, v, change) for s, v in zip(spec, value, strict=True))
    if isinstance(spec, dict):
        return {key: _changed(spec[key], held, change) for key, held in value.items()}
    return value
