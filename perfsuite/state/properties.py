"""List properties of tensors and modules other than their values: requires_grad, training modes, hooks and tensors with
several names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
REQUIRES_GRAD, TRAINING = "requires_grad of ", "the training mode of "
"""Beginnings of the descriptions of flags."""
TENSOR = "the tensor under "
"""Beginning of the description that says whether a parameter or a buffer is one tensor with another."""


def of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (description, value) for each such property of the tensors and modules in a nested value."""
    match value:
        case torch.Tensor():
            yield f"{REQUIRES_GRAD}{path}", value.requires_grad
            after = getattr(value, "_post_accumulate_grad_hooks", None)
            yield f"the number of hooks on {path}", len(value._backward_hooks or ()) + len(after or ())
        case torch.nn.Module():
            for name, module in value.named_modules():
                inner = f"{path}.{name}" if name else path
                yield f"{TRAINING}{inner}", module.training
                saved = module._buffers.keys() - module._non_persistent_buffers_set
                yield f"the names of what is saved of {inner}", sorted(saved | module._parameters.keys())
                yield f"the number of hooks on {inner}", sum(len(getattr(module, hooks)) for hooks in HOOKS)
            for name, parameter in value.named_parameters():
                yield f"{REQUIRES_GRAD}{path}.{name}", parameter.requires_grad
            for name, first in ties(value, path).items():
                yield f"{TENSOR}{name}", f"that of {first}" if first != name else "its own"
        case Mapping():
            for key, inner_value in value.items():
                yield from of(inner_value, f"{path}.{key}" if path else str(key))
        case list() | tuple():
            for number, inner_value in enumerate(value):
                yield from of(inner_value, f"{path}[{number}]")


def ties(module: torch.nn.Module, path: str) -> dict[str, str]:
    """Return the name of each parameter and buffer of a module → the first name of the same tensor."""
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    return {f"{path}.{name}": first.setdefault(id(tensor), f"{path}.{name}") for name, tensor in every}
