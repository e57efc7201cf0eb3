"""Precision, sharding and batch transfer for a training step of ups, shared by both trainers."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch

from suite.ups.batches import Mixture, TaskPart
from suite.ups.config import TrainConfig

LOW = {"float32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the autocast context for the configured precision; disabled for float32."""
    low = LOW[config.precision]
    return torch.autocast(device.type, low or torch.bfloat16, enabled=low is not None)


def is_sharded(config: TrainConfig, mixture: Mixture) -> bool:
    """Return whether the parameters are sharded: `use_fsdp2` on, several ranks, and the operator stage."""
    return config.use_fsdp2 and mixture.ranks > 1 and config.stage == "operator"


def is_shared(config: TrainConfig, mixture: Mixture) -> bool:
    """Return whether each rank updates only a part of the weights.

    This needs `shared_optimizer` on, several ranks, the operator stage, and parameters that are not sharded.
    """
    several = mixture.ranks > 1 and config.stage == "operator"
    return config.shared_optimizer and several and not is_sharded(config, mixture)


def note_what_is_ignored(config: TrainConfig, mixture: Mixture) -> None:
    """Warn if `use_fsdp2` is set but has no effect."""
    if config.use_fsdp2 and not is_sharded(config, mixture):
        reason = "a single process trains" if mixture.ranks == 1 else f"the stage {config.stage} trains few weights"
        warnings.warn(f"use_fsdp2: {reason}, so that nothing is sharded", RuntimeWarning, stacklevel=3)


def sent(part: TaskPart, device: torch.device, dtype: torch.dtype = torch.float32) -> TaskPart:
    """Copy a part to a device; floating-point tensors are converted to `dtype`.

    Copies to a GPU go through pinned memory, because a copy from pageable memory waits for all queued work.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        to = dtype if tensor.is_floating_point() else None
        if device.type == "cpu":
            return tensor.to(device, to)
        held = tensor if tensor.is_cuda else tensor.pin_memory()
        return held.to(device, to, non_blocking=True)

    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    changed: dict[str, Any] = {name: moved(v) for name, v in values.items() if isinstance(v, torch.Tensor)}
    return dataclasses.replace(part, **changed)
