"""Data set whose examples arrive after a delay, as from remote storage, for timing data loaders."""

from __future__ import annotations

import operator
import pkgutil
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset


class SlowStorage(TensorDataset):
    """Tensor data set in which reading a row takes `milliseconds` without using the CPU.

    It is pickled by its class's name alone. Therefore another process can unpickle both this tree's class and the class
    of an accepted revision that is imported next to it.
    """

    def __init__(self, milliseconds: float, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.milliseconds = milliseconds

    def __getitem__(self, row: int) -> tuple[torch.Tensor, ...]:
        time.sleep(self.milliseconds / 1e3)
        return tuple(tensor[row] for tensor in self.tensors)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return operator.call, (_ByName(f"{__name__}:{type(self).__name__}"), self.milliseconds, *self.tensors)


class _ByName:
    """Object that unpickles to the object that its name refers to."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return pkgutil.resolve_name, (self.name,)
