"""Copy a module and change its tensors. This is much faster than copy.deepcopy, which spends most of its time on
objects that are not tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]

IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
CUSTOM = (
    "__new__",
    "__slots__",
    "__copy__",
    "__deepcopy__",
    "__getstate__",
    "__setstate__",
    "__reduce__",
    "__reduce_ex__",
)
"""Methods by which a class controls how it is copied."""
DEFAULTS_ONLY = (torch.nn.modules.conv._ConvNd,)
"""Module classes whose __setstate__ only adds attributes that an older version did not have."""
NOT_COPIED = ("_compiled_call_impl",)
"""Attributes that are not copied. Module.__getstate__ leaves them out too."""


def changed_copy(module: torch.nn.Module, change: Change) -> torch.nn.Module:
    """Return a copy, as by copy.deepcopy, with `change` applied to the values of each parameter and buffer.

    Tensors that are shared within the module are shared within the copy.
    """
    known: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if id(tensor) not in known:
            known[id(tensor)] = _changed(tensor, change)
    copied: torch.nn.Module = _copied(module, known)
    return copied


def _changed(tensor: torch.Tensor, change: Change) -> torch.Tensor:
    if type(tensor) is torch.nn.Parameter and not vars(tensor):
        return torch.nn.Parameter(change(tensor.data), tensor.requires_grad)
    if type(tensor) is torch.Tensor and not vars(tensor) and not tensor.requires_grad:
        return change(tensor.data)
    copied = copy.deepcopy(tensor)
    copied.data = change(tensor.data)
    return copied


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """Return a copy of a value. `known` is deepcopy's memo: id → copy."""
    kind = type(value)
    if kind in IMMUTABLE or (kind is tuple and all(type(held) in IMMUTABLE for held in value)):
        return value
    if id(value) in known:
        return known[id(value)]
    if kind in (OrderedDict, set) and not value:
        clone: Any = kind()
    elif kind is dict:
        clone = known[id(value)] = {}
        clone.update((name, _copied(held, known)) for name, held in value.items())
    elif isinstance(value, torch.nn.Module) and not _is_custom(kind):
        clone = known[id(value)] = object.__new__(kind)
        # Not setattr, because Module.__setattr__ would register the values.
        vars(clone).update(_attributes(value, known))
    else:
        return copy.deepcopy(value, known)
    known[id(value)] = clone
    return clone


def _attributes(module: torch.nn.Module, known: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, copy) for each attribute of a module."""
    for name, held in vars(module).items():
        if name in NOT_COPIED:
            continue
        if type(held) in IMMUTABLE:
            yield name, held
        elif type(held) is OrderedDict and not held:  # like most dicts of hooks; a call of _copied takes longer
            yield name, known.setdefault(id(held), OrderedDict())
        else:
            yield name, _copied(held, known)


def _is_custom(kind: type) -> bool:
    own = kind.__mro__[: kind.__mro__.index(torch.nn.Module)]
    return any(name in vars(owner) for owner in own if owner not in DEFAULTS_ONLY for name in CUSTOM)
