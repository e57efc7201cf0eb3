"""List properties of tensors and modules other than their values: requires_grad, training modes and hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (description, value) for each such property of the tensors and modules in a nested value."""
    match value:
        case torch.Tensor():
            yield f"requires_grad of {path}", value.requires_grad
            after = getattr(value, "_post_accumulate_grad_hooks", None)
            yield f"the number of hooks on {path}", len(value._backward_hooks or ()) + len(after or ())
        case torch.nn.Module():
            for name, module in value.named_modules():
                inner = f"{path}.{name}" if name else path
                yield f"the training mode of {inner}", module.training
                saved = module._buffers.keys() - module._non_persistent_buffers_set
                yield f"the names of what is saved of {inner}", sorted(saved | module._parameters.keys())
                yield f"the number of hooks on {inner}", sum(len(getattr(module, hooks)) for hooks in HOOKS)
            for name, parameter in value.named_parameters():
                yield f"requires_grad of {path}.{name}", parameter.requires_grad
        case Mapping():
            for key, inner_value in value.items():
                yield from of(inner_value, f"{path}.{key}" if path else str(key))
        case list() | tuple():
            for number, inner_value in enumerate(value):
                yield from of(inner_value, f"{path}[{number}]")
