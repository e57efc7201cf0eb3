"""The checkpoint state of eigenstate_lm. Both trainers use the same names, so each reads the other's checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from suite.batching import whole
from suite.runtime.weights import check_weights, copies, optimizer_copies


def state_of(trainer: Any) -> dict[str, Any]:
    """Return all that a trainer's next step depends on, its configuration, and the tokenizer for text generation.

    weights    name → tensor, `suite.eigenstate_lm.model.shapes`
    optimizer  state of the `ScalerStep`: moments, steps, scale
    steps      number of steps made so far, which determines the learning rate and the next sequences
    tokenizer  JSON of the tokenizers library; empty if the tokens are random
    best       `suite.eigenstate_lm.held_out.HeldOut.state`; only if held-out sequences are validated
    """
    best = {"best": trainer.held_out.state()} if trainer.held_out.is_on else {}
    return {
        **best,
        "weights": copies(trainer.weights),
        "optimizer": optimizer_copies(trainer.optimizer.state_dict()),
        "steps": trainer.steps,
        "tokenizer": trainer.text.tokenizer,
        "config": dataclasses.asdict(trainer.config),
    }


def restore(trainer: Any, state: Mapping[str, Any]) -> None:
    """Copy weights and the optimizer's state into a trainer's own tensors.

    ValueError if a shape differs or a weight is missing. `steps` is not set; the trainer sets it.
    """
    whole(state, "steps")
    own, saved = trainer.weights, state["weights"]
    here, there = len(own["embedding"]), len(saved["embedding"])
    if here != there:
        raise ValueError(f"its vocabulary has {there} tokens, and that of the data {here}")
    check_weights(own, saved)
    with torch.no_grad():
        for name, weight in saved.items():
            own[name].copy_(weight)
    trainer.held_out.restore(state.get("best"))
    trainer.optimizer.load_state_dict(state["optimizer"])
