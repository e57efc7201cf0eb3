"""The state that both trainers keep in a checkpoint, under the same names, so that each reads the other's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from suite.batching import whole
from suite.runtime.weights import check_weights, copies, optimizer_copies


def state_of(trainer: Any) -> dict[str, Any]:
    """All that a trainer's next epoch depends on, its configuration, and the best weights so far.

    weights    name → tensor
    optimizer  of the scaler's step: moments, steps, scale
    steps      made so far, which the dropout is hashed from
    best       the weights that judged the most validation files rightly, how many, and after which epoch (from 1);
               of equals the first. Before a validation -1 files, and epoch 0.
    """
    return {
        "weights": copies(trainer.weights),
        "optimizer": optimizer_copies(trainer.optimizer.state_dict()),
        "steps": trainer.steps,
        "best": {
            "weights": copies(trainer.best),
            "files": int(trainer.best_files),
            "epoch": int(trainer.best_epoch),
        },
        "config": dataclasses.asdict(trainer.config),
    }


def restore(trainer: Any, state: Mapping[str, Any]) -> None:
    """Copy a state into a trainer's own tensors. ValueError where a shape is another, or a weight is missing.

    What is no tensor, the trainer sets itself.
    """
    best = state["best"]
    for counts, name, least in ((state, "steps", 0), (best, "files", -1), (best, "epoch", 0)):
        whole(counts, name, least)
    own, given = trainer.weights, state["weights"]
    check_weights(own, given)
    check_weights(trainer.best, best["weights"])
    with torch.no_grad():
        for name, weight in given.items():
            own[name].copy_(weight)
            trainer.best[name].copy_(best["weights"][name])
    trainer.optimizer.load_state_dict(state["optimizer"])
