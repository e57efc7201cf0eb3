"""The checkpoint state of both trainers. They use the same names, so each can read the other's checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from suite.batching import whole
from suite.runtime.weights import check_weights, copies, optimizer_copies


def state_of(trainer: Any) -> dict[str, Any]:
    """Return the configuration, the best weights so far, and everything that the next epoch depends on.

    weights    name → tensor
    optimizer  state of the optimizer and the loss scale: moments, steps, scale
    steps      number of completed steps, from which the dropout is hashed
    best       the weights with the highest macro-F1 over the validation files, this F1, and their epoch (counted from
               1). On a tie, the earliest epoch counts. Before the first validation, the F1 is -1 and the epoch 0.
    config     configuration as plain values
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
    """Copy a state's weights into a trainer's own tensors, and load the state of its optimizer.

    The trainer itself restores the number of steps, the best F1 and the best epoch.

    ValueError if a weight is missing or has another shape, or a count is invalid.
    """
    best = state["best"]
    for counts, name in ((state, "steps"), (best, "epoch")):
        whole(counts, name, 0)
    own, saved = trainer.weights, state["weights"]
    check_weights(own, saved)
    check_weights(trainer.best, best["weights"])
    with torch.no_grad():
        for name, weight in saved.items():
            own[name].copy_(weight)
            trainer.best[name].copy_(best["weights"][name])
    trainer.optimizer.load_state_dict(state["optimizer"])


def best_f1_of(state: Mapping[str, Any]) -> float:
    """Return the F1 of a state's best weights; -1 if the state has none, because an older version chose them otherwise.

    ValueError if the value is not an F1.
    """
    found = state["best"].get("f1", -1.0)
    if not isinstance(found, float) or not -1 <= found <= 1:
        raise ValueError(f"best: the F1 is {found!r}; it lies between 0 and 1")
    return found


def stops(trainer: Any) -> str | None:
    """Return the reason to end training, if no validation was better for `patience` epochs; None to continue."""
    patience, done = trainer.config.patience, trainer.steps // trainer.steps_of_epoch
    best = int(trainer.best_epoch) if patience else 0  # waits for the device
    if not best or done - best < patience:
        return None
    return f"no validation was better than that of epoch {best} for {patience} epochs (patience)"
