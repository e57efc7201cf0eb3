"""Process groups that find other environment variables when they are made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

CAPTURED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
"""Variables of a group whose collectives a CUDA graph records. During the capture no thread may ask whether a
collective is done, as NCCL's watch for errors and a blocking wait do."""

_made: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()
"""Default group → variables and device → the group that was made of its ranks."""


def group_with(variables: Mapping[str, str], device: torch.device) -> dist.ProcessGroup:
    """A group of all ranks whose first collective, on this device, has found these environment variables.

    A backend reads its own variables when the group is made, and NCCL its ones with the first collective. Afterwards
    the environment is as before. For each default group it is made once; all ranks must call this in the same order.
    """
    made = _made.setdefault(dist.group.WORLD, {})
    key = (*sorted(variables.items()), device)
    if key not in made:
        with environment(variables):
            group = dist.new_group()
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        made[key] = group
    return made[key]


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables are set inside, and afterwards as they were."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
