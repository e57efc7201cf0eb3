"""Precision, sharding and transfer of the batch for a step of ups, in either trainer."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch

from suite.ups.batches import Mixture, TaskPart
from suite.ups.config import TrainConfig

LOW = {"float32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the autocast context for the precision of a configuration."""
    low = LOW[config.precision]
    return torch.autocast(device.type, low or torch.bfloat16, enabled=low is not None)


def is_sharded(config: TrainConfig, given: Mixture) -> bool:
    """Return whether `use_fsdp2` shards the parameters: over several ranks, in the operator's stage."""
    return config.use_fsdp2 and given.ranks > 1 and config.stage == "operator"


def is_shared(config: TrainConfig, given: Mixture) -> bool:
    """Return whether each rank updates a share of the weights: several ranks, operator's stage, nothing sharded."""
    several = given.ranks > 1 and config.stage == "operator"
    return config.shared_optimizer and several and not is_sharded(config, given)


def note_what_is_ignored(config: TrainConfig, given: Mixture) -> None:
    """Warn of each setting that has no effect, in one line."""
    if config.use_fsdp2 and not is_sharded(config, given):
        reason = "a single process trains" if given.ranks == 1 else f"the stage {config.stage} trains few weights"
        warnings.warn(f"use_fsdp2: {reason}, so that nothing is sharded", RuntimeWarning, stacklevel=3)


def sent(part: TaskPart, device: torch.device, dtype: torch.dtype = torch.float32) -> TaskPart:
    """Copy a part to a device, to a GPU from pinned memory: a copy from pageable memory waits for all queued work."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        to = dtype if tensor.is_floating_point() else None
        if device.type == "cpu":
            return tensor.to(device, to)
        held = tensor if tensor.is_cuda else tensor.pin_memory()
        return held.to(device, to, non_blocking=True)

    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    changed: dict[str, Any] = {name: moved(v) for name, v in values.items() if isinstance(v, torch.Tensor)}
    return dataclasses.replace(part, **changed)
