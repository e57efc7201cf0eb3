"""The state that both trainers keep in a checkpoint, under the same names, so that each reads the other's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from suite.batching import whole
from suite.runtime.weights import check_weights, copies, optimizer_copies


def state_of(trainer: Any) -> dict[str, Any]:
    """All that a trainer's next step depends on, its configuration, and what text is written with.

    weights    name → tensor, `suite.eigenstate_lm.model.shapes`
    optimizer  of the scaler's step: moments, steps, scale
    steps      made so far, which the learning rate is looked up by
    tokenizer  the tokenizers library's JSON; empty where the tokens are random
    best       of held-out sequences, if there are: `suite.eigenstate_lm.held_out.HeldOut.state`
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

    ValueError where a shape is another, or a weight is missing; `steps` the trainer sets itself.
    """
    whole(state, "steps")
    own, given = trainer.weights, state["weights"]
    here, there = len(own["embedding"]), len(given["embedding"])
    if here != there:
        raise ValueError(f"its vocabulary has {there} tokens, and that of the data {here}")
    check_weights(own, given)
    with torch.no_grad():
        for name, weight in given.items():
            own[name].copy_(weight)
    trainer.held_out.restore(state.get("best"))
    trainer.optimizer.load_state_dict(state["optimizer"])
