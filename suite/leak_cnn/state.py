"""The checkpoint state of both trainers. The names are the same, so each trainer reads the other's checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from suite.batching import whole
from suite.runtime.weights import check_weights, copies, optimizer_copies


def state_of(trainer: Any) -> dict[str, Any]:
    """Return all that a trainer's next epoch depends on, its configuration, and the best weights so far.

    weights    name → tensor
    optimizer  state of the scaler's step: moments, steps, scale
    steps      number of steps made so far, from which the dropout is hashed
    best       the weights with the largest macro-F1 of the validation files, that F1, and the epoch (from 1); on a tie
               the first. Before a validation the F1 is -1, and the epoch 0.
    """
    return {
        "weights": copies(trainer.weights),
        "optimizer": optimizer_copies(trainer.optimizer.state_dict()),
        "steps": trainer.steps,
        "best": {
            "weights": copies(trainer.best),
            "f1": float(trainer.best_f1),
            "epoch": int(trainer.best_epoch),
        },
        "config": dataclasses.asdict(trainer.config),
    }


def restore(trainer: Any, state: Mapping[str, Any]) -> None:
    """Copy a state into a trainer's own tensors. ValueError if a shape differs or a weight is missing.

    Values that are no tensors are left to the trainer.
    """
    best = state["best"]
    for counts, name in ((state, "steps"), (best, "epoch")):
        whole(counts, name, 0)
    own, given = trainer.weights, state["weights"]
    check_weights(own, given)
    check_weights(trainer.best, best["weights"])
    with torch.no_grad():
        for name, weight in given.items():
            own[name].copy_(weight)
            trainer.best[name].copy_(best["weights"][name])
    trainer.optimizer.load_state_dict(state["optimizer"])


def best_f1_of(state: Mapping[str, Any]) -> float:
    """Return the F1 of a state's best weights; -1 if they were chosen by another measure, as in older checkpoints.

    ValueError if the value is no F1.
    """
    found = state["best"].get("f1", -1.0)
    if not isinstance(found, float) or not -1 <= found <= 1:
        raise ValueError(f"best: the F1 is {found!r}; it lies between 0 and 1")
    return found


def stops(trainer: Any) -> str | None:
    """Return why training should end now: no better validation for `patience` epochs. None if it should go on."""
    patience, done = trainer.config.patience, trainer.steps // trainer.steps_of_epoch
    best = int(trainer.best_epoch) if patience else 0  # waits for the device
    if not best or done - best < patience:
        return None
    return f"no validation was better than that of epoch {best} for {patience} epochs (patience)"
