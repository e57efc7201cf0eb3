"""Process groups that are created with other environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

CAPTURED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}
"""Variables of a group whose collectives a CUDA graph captures. During the capture no thread may query whether a
collective is done, as NCCL's error watchdog and a blocking wait do."""

_made: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()
"""Default group → (variables and device → the group that was created with all of its ranks)."""


def group_with(variables: Mapping[str, str], device: torch.device) -> dist.ProcessGroup:
    """Return a group of all ranks that was created with these environment variables, for tensors on this device.

    A backend reads its variables when the group is created, and NCCL reads its own at the first collective; both happen
    here. Then the environment is restored. The group is created once for each default group, variables and device. All
    ranks must make these calls in the same order.
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
    """Set these variables inside the context, and restore them afterwards."""
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
