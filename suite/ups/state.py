"""The checkpoint state of both trainers. They use the same names, so each can read the other's checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from suite.batching import whole
from suite.runtime.weights import check_weights, copies


def state_of(trainer: Any) -> dict[str, Any]:
    """Return the configuration, and everything that the next training step depends on.

    weights     name → trained tensor, with the names that the `weights` methods of the networks return
    averages    name → exponential moving average of the weight
    kept        name → tensor that is not trained; empty in the operator stage
    optimizers  weight group → state of Muon and AdamW
    scale       state of the loss scale
    steps       number of completed steps, which determines the next examples
    data        digest of the data
    config      configuration as plain values

    With sharded parameters, all ranks must call it.
    """
    whole = copies if trainer.shards is None else partial(gathered, trainer)
    return {
        "weights": whole(trainer.weights),
        "averages": whole(trainer.averages),
        "kept": copies(trainer.refiner.kept()) if trainer.refiner is not None else {},
        "optimizers": {name: optimizer.state_dict() for name, optimizer in trainer.optimizers.items()},
        "scale": trainer.scale.state_dict(),
        "steps": trainer.steps,
        "data": trainer.mixture.digest,
        "config": dataclasses.asdict(trainer.config),
    }


def gathered(trainer: Any, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather whole tensors from the shards of all ranks. All ranks must call it."""
    found = trainer.shards.whole([parts[name].detach() for name in parts], [trainer.shapes[name] for name in parts])
    return dict(zip(parts, found, strict=True))


@torch.no_grad()
def take(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors `saved` into `own`, by name."""
    for name, weight in saved.items():
        own[name].copy_(weight)


def restore(trainer: Any, state: Mapping[str, Any]) -> None:
    """Copy a checkpoint's state into a trainer's own tensors.

    ValueError if a weight is missing or has another shape, or the checkpoint is from another stage.
    """
    stage = state["config"].get("stage")
    if stage != trainer.config.stage:
        raise ValueError(f"it is of the stage {stage}, and this is {trainer.config.stage}")
    part = (lambda whole: whole) if trainer.shards is None else trainer.shards.part
    shapes = {name: torch.empty(shape, device="meta") for name, shape in trainer.shapes.items()}
    for own, name in ((trainer.weights, "weights"), (trainer.averages, "averages")):
        check_weights(shapes, state[name])
        take(own, {n: part(weight) for n, weight in state[name].items()})
    if trainer.refiner is not None:
        check_weights(trainer.refiner.kept(), state["kept"])
        take(trainer.refiner.kept(), state["kept"])
    for name, optimizer in trainer.optimizers.items():
        optimizer.load_state_dict(state["optimizers"][name])
    trainer.scale.load_state_dict(state["scale"])
    trainer.steps = whole(state, "steps")
