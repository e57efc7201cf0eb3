"""The adapters with which both trainers begin, and the state that both keep in a checkpoint, under the same names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from suite.batching import whole
from suite.polychromic.llama import Llama
from suite.polychromic.lora import Dropout, LoRALinear, Settings, attach
from suite.runtime.weights import check_weights, copies, optimizer_copies


def adapted(
    model: Llama,
    settings: Settings,
    seed: int,
    dtype: torch.dtype,
    layer: Callable[..., LoRALinear] = LoRALinear,
) -> dict[str, LoRALinear]:
    """Give the model adapters whose first weights follow from the seed alone; return them by name."""
    adapters = attach(model, settings, layer)
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters.values():
        bound = adapter.lora_a.shape[1] ** -0.5
        first = (2 * torch.rand(adapter.lora_a.shape, generator=generator) - 1) * bound  # kaiming_uniform_(a=√5)
        adapter.lora_a.data = first.to(adapter.weight.device, dtype)
        adapter.lora_b.data = adapter.lora_b.data.to(dtype)
    return adapters


def drop(adapters: Mapping[str, LoRALinear], dropout: Dropout | None) -> None:
    """Set the adapters' dropout; None: nothing is dropped."""
    for adapter in adapters.values():
        adapter.dropout = dropout


def weights_of(adapters: Mapping[str, LoRALinear]) -> dict[str, torch.Tensor]:
    """Return the trained tensors, by name."""
    return {
        f"{name}.{part}": getattr(adapter, part) for name, adapter in adapters.items() for part in ("lora_a", "lora_b")
    }


def state_of(trainer: Any) -> dict[str, Any]:
    """All that a trainer's next step depends on, its configuration, and where its models are from.

    weights    name → tensor, of the adapters
    optimizer  of the scaler's step: moments, steps, scale
    steps      made so far, which everything random follows from
    model      a folder, or the size of a drawn one, and a digest of it; encoder: a folder, or "" for the drawn one
    """
    return {
        "weights": copies(trainer.weights),
        "optimizer": optimizer_copies(trainer.optimizer.state_dict()),
        "steps": trainer.steps,
        "model": trainer.given.model,
        "model_digest": trainer.given.model_digest,
        "encoder": str(trainer.given.encoder or ""),
        "config": dataclasses.asdict(trainer.config),
    }


def restore(trainer: Any, state: Mapping[str, Any]) -> None:
    """Copy weights and the optimizer's state into a trainer's own tensors.

    ValueError where a shape is another, or a weight is missing; `steps` the trainer sets itself.
    """
    whole(state, "steps")
    check_weights(trainer.weights, state["weights"])
    if state["model_digest"] != trainer.given.model_digest:
        raise ValueError(f"it was trained on another model than that in {trainer.given.model}")
    with torch.no_grad():
        for name, weight in state["weights"].items():
            trainer.weights[name].copy_(weight)
    trainer.optimizer.load_state_dict(state["optimizer"])
