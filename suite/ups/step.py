"""What a step of ups begins with, in either trainer."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from suite.ups.batches import TaskPart
from suite.ups.config import TrainConfig

LOW = {"float32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """The precision of the products that a configuration asks for."""
    low = LOW[config.precision]
    return torch.autocast(device.type, low or torch.bfloat16, enabled=low is not None)


def check_step(batch: Mapping[str, torch.Tensor], steps: int) -> None:
    """ValueError where `batch["step"]` is there and is not the number of steps made."""
    if "step" in batch and int(batch["step"]) != steps:
        raise ValueError(f"step {int(batch['step'])} was given to a trainer that has made {steps}")


def note_what_is_ignored(config: TrainConfig) -> None:
    """Warn, in a line, of settings that a single process has no use for."""
    if config.use_fsdp2:
        warnings.warn("use_fsdp2: a single process trains, so that nothing is sharded", RuntimeWarning, stacklevel=3)


def sent(part: TaskPart, device: torch.device, dtype: torch.dtype = torch.float32) -> TaskPart:
    """The same on a device; a GPU fetches it by itself: a copy from pageable memory waits for all that is queued."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        to = dtype if tensor.is_floating_point() else None
        if device.type == "cpu":
            return tensor.to(device, to)
        held = tensor if tensor.is_cuda else tensor.pin_memory()
        return held.to(device, to, non_blocking=True)

    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    changed: dict[str, Any] = {name: moved(v) for name, v in values.items() if isinstance(v, torch.Tensor)}
    return dataclasses.replace(part, **changed)
