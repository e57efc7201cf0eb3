"""Initial adapters and checkpoint state of both trainers. The state has the same names in both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from perfsuite.errors import PerfsuiteError
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
    """Add adapters to the model, with initial weights that depend on the seed only. Return name → adapter.

    PerfsuiteError if the model's layers cannot be adapted by `layer`.
    """
    try:
        adapters = attach(model, settings, layer)
    except ValueError as error:
        raise PerfsuiteError(f"quantization: {error}; use another model, or quantization: none") from None
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters.values():
        bound = adapter.lora_a.shape[1] ** -0.5
        first = (2 * torch.rand(adapter.lora_a.shape, generator=generator) - 1) * bound  # as kaiming_uniform_(a=√5)
        adapter.lora_a.data = first.to(adapter.lora_a.device, dtype)
        adapter.lora_b.data = adapter.lora_b.data.to(dtype)
    return adapters


def drop(adapters: Mapping[str, LoRALinear], dropout: Dropout | None) -> None:
    """Set the dropout of all adapters; None turns it off."""
    for adapter in adapters.values():
        adapter.dropout = dropout


def weights_of(adapters: Mapping[str, LoRALinear]) -> dict[str, torch.Tensor]:
    """Return the trained tensors, name → tensor."""
    return {
        f"{name}.{part}": getattr(adapter, part) for name, adapter in adapters.items() for part in ("lora_a", "lora_b")
    }


def state_of(trainer: Any) -> dict[str, Any]:
    """Return everything that a trainer's next step depends on, its configuration, and the source of its models.

    weights       name → tensor, of the adapters
    optimizer     state of the optimizer and loss scale: moments, steps, scale
    steps         number of completed steps, on which all random numbers depend
    model         a folder, or the size of a model with random weights
    model_digest  digest of the model
    encoder       a folder, or "" for the encoder with random weights
    config        fields of the configuration
    """
    return {
        "weights": copies(trainer.weights),
        "optimizer": optimizer_copies(trainer.optimizer.state_dict()),
        "steps": trainer.steps,
        "model": trainer.data.model,
        "model_digest": trainer.data.model_digest,
        "encoder": str(trainer.data.encoder or ""),
        "config": dataclasses.asdict(trainer.config),
    }


def restore(trainer: Any, state: Mapping[str, Any]) -> None:
    """Copy the weights and the optimizer's state into a trainer's tensors. The trainer sets its `steps` itself.

    ValueError if a shape differs, a weight is missing, or the checkpoint is of another model.
    """
    whole(state, "steps")
    check_weights(trainer.weights, state["weights"])
    if state["model_digest"] != trainer.data.model_digest:
        raise ValueError(f"it was trained on another model than that in {trainer.data.model}")
    with torch.no_grad():
        for name, weight in state["weights"].items():
            trainer.weights[name].copy_(weight)
    trainer.optimizer.load_state_dict(state["optimizer"])
