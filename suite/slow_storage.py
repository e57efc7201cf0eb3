"""Data set whose examples arrive after a delay, as from remote storage: for measuring loaders."""

from __future__ import annotations

import operator
import pkgutil
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset


class SlowStorage(TensorDataset):
    """Tensors, a row of which arrives after `milliseconds`, without using a core meanwhile.

    It is pickled by its class's name alone. So another process can unpickle both this tree's class and that of an
    accepted revision, imported beside it.
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
    """Object that is unpickled as whatever its name refers to."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return pkgutil.resolve_name, (self.name,)
