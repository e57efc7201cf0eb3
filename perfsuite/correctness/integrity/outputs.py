"""Faults of outputs that are no plain tensors holding their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from perfsuite.correctness import execution
from perfsuite.correctness.forms import unusual_kind
from perfsuite.correctness.integrity.probe import Probe


def lazy_output(probe: Probe) -> None:
    """Check that every tensor among the outputs is a plain tensor that already holds its values."""
    for name, leaf in execution.flatten(_returned(probe)):
        fault = not_plain(name, leaf)
        if fault is not None:
            raise probe.fault(fault)


def other_fields(probe: Probe) -> None:
    """Check that named tuples among the outputs have the same fields in the same order as those of the reference, since
    their items are compared by place. A plain tuple has no fields to compare."""
    own = dict(_fields(_returned(probe)))
    if not own:
        return
    for path, theirs in _fields(_returned(probe.of_reference())):
        if own.get(path, theirs) != theirs:
            raise probe.fault(
                f"returns {path} with the fields {', '.join(own[path])} where the reference's are {', '.join(theirs)}: "
                f"a caller that reads a field by name gets another value, or none"
            )


def _returned(probe: Probe) -> Any:
    """Call the side of the probe without gradients. Return what it returns; for a stateful pair, what its first step
    returns."""
    values = probe.drawn()
    execution.poison(probe.pair, values)
    call = execution.callable_of(probe.side)
    with execution.quiet(probe.side):
        if probe.pair.is_stateful:
            return call(*values.values())(*probe.step_inputs(probe.case, 1).values())
        with torch.no_grad():
            return call(*values.values())


def _fields(value: Any, path: str = "output") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (path, names of the fields) of each named tuple in a nested return value."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        yield path, tuple(value._fields)
    if isinstance(value, (tuple, list, Mapping)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _fields(item, f"{path}[{key!r}]")


def _is_data(value: object) -> bool:
    """Return whether the value consists only of numbers, text, None, and built-in containers of them."""
    # Exactly these types, because a subclass may have a finalizer.
    if isinstance(value, dict):
        return type(value) is dict and all(_is_data(k) and _is_data(v) for k, v in value.items())
    if isinstance(value, (tuple, list, set, frozenset)):
        return type(value) in (tuple, list, set, frozenset) and all(map(_is_data, value))
    return type(value) in (bool, int, float, str, bytes, type(None))


def not_plain(name: str, leaf: execution.Leaf) -> str | None:
    """Return what is wrong with an output that is a tensor but not a plain tensor, or None."""
    if not isinstance(leaf, torch.Tensor):
        return None
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return f"returns {name} as a {type(leaf).__name__}, a tensor subclass that may compute when read"
    own = [k for k in vars(leaf) if callable(vars(leaf)[k])]
    if own:
        return f"returns {name} with its method {own[0]} overridden: it may compute when read"
    # torch.compile stores plain data on its outputs, which is allowed. An object is not: its finalizer may do work when
    # the tensor is freed.
    held = [k for k, v in vars(leaf).items() if not _is_data(v)]
    if held and type(leaf) is torch.Tensor:
        return f"returns {name} with an attribute {held[0]} of its own: work may hang on its end"
    if leaf.is_meta:
        return f"returns {name} as a meta tensor: it holds no values yet"
    if unusual := unusual_kind(leaf):
        return f"returns {name} as a {unusual} tensor; only dense tensors are compared: return its values"
    return None
