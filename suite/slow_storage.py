"""A data set whose examples take their time, as from storage far away: for measuring what loads them."""

from __future__ import annotations

import operator
import pkgutil
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset


class SlowStorage(TensorDataset):
    """Tensors, a row of which is there after `milliseconds`, without a core that works meanwhile.

    To another process it is sent by its class's name alone, so that this tree's class and that of an accepted revision,
    imported beside it, are both understood there.
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
    """Unpickled it is what the name says."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return pkgutil.resolve_name, (self.name,)
