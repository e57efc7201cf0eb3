"""The state that both trainers keep in a checkpoint, under the same names, so that each reads the other's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def state_of(trainer: Any) -> dict[str, Any]:
    """All that a trainer's next step depends on, its configuration, and what text is written with.

    weights    name → tensor, `suite.eigenstate_lm.model.shapes`
    optimizer  of the scaler's step: moments, steps, scale
    steps      made so far, which the learning rate is looked up by
    tokenizer  the tokenizers library's JSON; empty where the tokens are random
    """
    return {
        "weights": {name: weight.detach().clone() for name, weight in trainer.weights.items()},
        "optimizer": {
            name: [t.clone() for t in value] if isinstance(value, list) else value.clone()
            for name, value in trainer.optimizer.state_dict().items()
        },
        "steps": trainer.steps,
        "tokenizer": trainer.text.tokenizer,
        "config": dataclasses.asdict(trainer.config),
    }


def restore(trainer: Any, state: Mapping[str, Any]) -> None:
    """Copy weights and the optimizer's state into a trainer's own tensors.

    ValueError where a shape is another, or a weight is missing; `steps` the trainer sets itself.
    """
    own, given = trainer.weights, state["weights"]
    here, there = len(own["embedding"]), len(given["embedding"])
    if here != there:
        raise ValueError(f"its vocabulary has {there} tokens, and that of the data {here}")
    if others := own.keys() ^ given.keys():
        raise ValueError(f"the weights {', '.join(sorted(others))} are only in the checkpoint, or only here")
    for name, weight in given.items():
        if weight.shape != own[name].shape:
            raise ValueError(
                f"{name} has shape {list(weight.shape)} in the checkpoint and {list(own[name].shape)} here"
            )
    with torch.no_grad():
        for name, weight in given.items():
            own[name].copy_(weight)
    trainer.optimizer.load_state_dict(state["optimizer"])
