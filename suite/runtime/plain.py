"""Validation of checkpoint values: tensors and plain values, which can be read back without running code."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from suite.runtime.errors import CheckpointError, NotANumberError

PLAIN = (bool, int, float, str, bytes, type(None))
KINDS = (torch.dtype, torch.device, torch.Size)
MOST = 1_000_000
"""Maximum number of values in a state. Even a tiny file can refer to one list too many times to traverse."""
DEEPEST = 100
"""Maximum depth of nested containers."""
BITS = 4096
"""Maximum bits of an integer. Python refuses to print much longer ones."""

Where = tuple[str, ...]
"""Name of the state, followed by the keys and indices that lead to a value."""


def check(state: Any, where: str = "state", *, tensors: bool = True, nan: bool = False) -> None:
    """Raise CheckpointError if a state contains values that cannot be read back.

    where    name of the state in the error
    tensors  whether it may hold tensors
    nan      whether a tensor may hold NaN; otherwise NotANumberError
    """
    _Walk(tensors, nan).through(state, (where,))


class _Walk:
    def __init__(self, tensors: bool, nan: bool) -> None:
        self._tensors = tensors
        self._nan = nan
        self._left = MOST

    def through(self, value: Any, where: Where) -> None:
        self._left -= 1
        if self._left < 0 or len(where) > DEEPEST:
            raise CheckpointError(f"{where[0]} holds more than {MOST} values, or {DEEPEST} within each other")
        if isinstance(value, torch.Tensor):
            self._tensor(value, where)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                if type(key) not in PLAIN:
                    raise CheckpointError(
                        f"{_named(where)} has a key of type {type(key).__name__}, which cannot be read back"
                    )
                self.through(key, (*where, " (a key)"))
                self.through(inner, (*where, f"[{reprlib.repr(key)}]"))
        elif type(value) in (list, tuple):
            for index, inner in enumerate(value):
                self.through(inner, (*where, f"[{index}]"))
        elif type(value) is int:
            if value.bit_length() > BITS:
                raise CheckpointError(f"{_named(where)} is an integer of {value.bit_length()} bits; keep it in parts")
        elif type(value) not in PLAIN and not isinstance(value, KINDS):
            raise CheckpointError(
                f"{_named(where)} is a {type(value).__name__}, which cannot be read back; "
                "keep tensors and plain values in state_dict"
            )

    def _tensor(self, tensor: torch.Tensor, where: Where) -> None:
        if not self._tensors:
            raise CheckpointError(f"{_named(where)} is a tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise CheckpointError(f"{_named(where)} is a tensor without plain values; keep a dense one in state_dict")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{_named(where)} is a tensor that repeats its values; keep a clone of it")
        if not self._nan and tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise NotANumberError(f"{_named(where)} holds NaN")


def _named(where: Where) -> str:
    return "".join(where)
