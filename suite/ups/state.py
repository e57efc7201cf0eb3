"""The state that both trainers keep in a checkpoint, under the same names, so that each reads the other's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from suite.batching import whole
from suite.runtime.weights import check_weights, copies


def state_of(trainer: Any) -> dict[str, Any]:
    """All that a trainer's next step depends on, and its configuration.

    weights     name → tensor, `suite.ups.networks.Networks.weights`
    averages    the same of their exponential moving averages
    kept        name → tensor that is not trained, in the stages after the operator's
    optimizers  group of weights → Muon's and AdamW's state
    scale       of the loss
    steps       made so far, by which the examples of the next are found
    """
    return {
        "weights": copies(trainer.weights),
        "averages": copies(trainer.averages),
        "kept": copies(trainer.refiner.kept()) if trainer.refiner is not None else {},
        "optimizers": {name: optimizer.state_dict() for name, optimizer in trainer.optimizers.items()},
        "scale": trainer.scale.state_dict(),
        "steps": trainer.steps,
        "data": trainer.given.digest,
        "config": dataclasses.asdict(trainer.config),
    }


def restore(trainer: Any, state: Mapping[str, Any]) -> None:
    """Copy a state into a trainer's own tensors. ValueError where a weight is missing or has another shape.

    ValueError also for the checkpoint of another stage.
    """
    stage = state["config"].get("stage")
    if stage != trainer.config.stage:
        raise ValueError(f"it is of the stage {stage}, and this is {trainer.config.stage}")
    pairs = [(trainer.weights, state["weights"]), (trainer.averages, state["averages"])]
    if trainer.refiner is not None:
        pairs.append((trainer.refiner.kept(), state["kept"]))
    for own, given in pairs:
        check_weights(own, given)
        with torch.no_grad():
            for name, weight in given.items():
                own[name].copy_(weight)
    for name, optimizer in trainer.optimizers.items():
        optimizer.load_state_dict(state["optimizers"][name])
    trainer.scale.load_state_dict(state["scale"])
    trainer.steps = whole(state, "steps")
