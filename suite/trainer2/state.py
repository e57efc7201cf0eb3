"""The checkpoint state of trainer2. Both trainers use the same names, so each reads the other's checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from suite.batching import whole
from suite.runtime.weights import check_weights

TENSORS = (
    "field",
    "momentum",
    "rest",
    "metric",
    "theta",
    "memory_coordinates",
    "memory_states",
    "memory_filled",
)
"""Tensors that training changes, and `rest`, toward which the forces pull the field. The weights are stored separately.
"""


def state_of(trainer: Any) -> dict[str, Any]:
    """Return all that a trainer's next window depends on, and its configuration."""
    return {
        **{name: getattr(trainer, name).clone() for name in TENSORS},
        "weights": trainer.weights,
        "written": trainer.written,
        "windows": trainer.windows,
        "config": dataclasses.asdict(trainer.config),
    }


def restore(trainer: Any, state: Mapping[str, Any]) -> None:
    """Copy a state into a trainer's own tensors. ValueError if a shape differs or a weight is missing."""
    for name in TENSORS:
        own, saved = getattr(trainer, name), state[name]
        if own.shape != saved.shape:
            raise ValueError(f"{name} has shape {list(saved.shape)} in the checkpoint and {list(own.shape)} here")
    check_weights(trainer.weights, state["weights"])
    written, windows = whole(state, "written"), whole(state, "windows")
    for name in TENSORS:
        getattr(trainer, name).copy_(state[name])
    for name, weight in state["weights"].items():
        trainer.weights[name].copy_(weight)
    trainer.written, trainer.windows = written, windows
