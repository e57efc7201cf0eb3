"""Low-rank adapters (LoRA) for a language model's linear layers, stored in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from perfsuite.errors import PerfsuiteError
from suite.batching import STEP, hashed, mixed, signed, word_of
from suite.naming import shown
from suite.polychromic.llama import Llama
from suite.polychromic.model_files import read_json, read_tensors

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block; each gets an adapter."""
PREFIX = "base_model.model."
"""Prefix of the parameter names in PEFT's files."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BITS = 24
LONGEST = 1 << 20
"""Upper limit of an example's number of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Hyperparameters of all adapters: y = x Wᵀ + alpha / rank · dropout(x) Aᵀ Bᵀ."""

    rank: int = 16
    alpha: float = 16.0
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be 1 or more, got {self.rank}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be from 0 to below 1, got {self.dropout}")


@dataclass(frozen=True, slots=True)
class Dropout:
    """Counters of the random words that determine which inputs the adapters drop.

    starts  int64 [adapters]: offset of each adapter's counters, from `starts_of`
    places  int64, same shape as the tokens: number of each token, from `places_of`
    """

    starts: torch.Tensor
    places: torch.Tensor


def starts_of(seed: int, step: int, adapters: int) -> torch.Tensor:
    """Return the offset of each adapter's counters in a step, int64 [adapters]."""
    return hashed(torch.arange(adapters) + signed(mixed(word_of(seed, step))))


def places_of(first: int, shape: tuple[int, int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the number of each token, int64 [examples, length]. Examples are numbered in the step from `first` on.

    Batching and padding change neither the numbers nor the dropped inputs.
    """
    examples, length = shape
    rows = torch.arange(first, first + examples, device=device)
    return rows[:, None] * LONGEST + torch.arange(length, device=device)


def kept(start: torch.Tensor, places: torch.Tensor, inputs: int, rate: float) -> torch.Tensor:
    """Return the dropout mask, bool [..., inputs] for places [...]: True where an input is kept.

    The mask comes from a counter-based generator, as in `suite.batching.permutation`. It depends on the arguments only,
    not on the device.
    """
    counters = places[..., None] * inputs + torch.arange(inputs, device=places.device)
    return (hashed(counters * signed(STEP) + start) & ((1 << BITS) - 1)) >= round(rate * (1 << BITS))


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter. The adapter's output is initially 0.

    `dropout` determines which inputs are dropped; None, as in generation and evaluation, drops none. With `is_off` only
    the frozen layer is computed.
    """

    def __init__(self, base: nn.Linear, settings: Settings, number: int) -> None:
        super().__init__()
        self.freeze(base.weight)
        given: dict[str, Any] = {"dtype": torch.float32, "device": base.weight.device}
        self.lora_a = nn.Parameter(torch.empty(settings.rank, base.in_features, **given))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, settings.rank, **given))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)  # as in PEFT
        self.settings, self.number = settings, number
        self.dropout: Dropout | None = None
        self.is_off = False

    def freeze(self, weight: torch.Tensor) -> None:
        """Store the frozen layer's weight [outputs, inputs]."""
        self.weight = weight.requires_grad_(False)

    @property
    def scale(self) -> float:
        """Factor of the adapter's output, alpha / rank."""
        return self.settings.alpha / self.settings.rank

    def multipliers(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the factor of each input: 1 / (1 - rate) if it is kept, otherwise 0. Return None without dropout."""
        rate = self.settings.dropout
        if self.dropout is None or not rate:
            return None
        own = self.dropout
        return kept(own.starts[self.number], own.places, x.shape[-1], rate).to(x.dtype) / (1 - rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_off:
            return linear(x, self.weight)
        multipliers = self.multipliers(x)
        dropped = x if multipliers is None else x * multipliers
        low = linear(linear(dropped, self.lora_a.to(x.dtype)), self.lora_b.to(x.dtype))
        return linear(x, self.weight) + self.scale * low


def attach(
    model: Llama, settings: Settings, layer: Callable[[nn.Linear, Settings, int], LoRALinear] = LoRALinear
) -> dict[str, LoRALinear]:
    """Freeze the model and add an adapter to each linear layer of its blocks. Return layer name → adapter."""
    model.requires_grad_(False)
    found: dict[str, LoRALinear] = {}
    for i, block in enumerate(model.model.layers):
        for name in LAYERS:
            owner_name = "self_attn" if hasattr(block.self_attn, name) else "mlp"
            owner = getattr(block, owner_name)
            adapter = layer(getattr(owner, name), settings, len(found))
            setattr(owner, name, adapter)
            found[f"model.layers.{i}.{owner_name}.{name}"] = adapter
    return found


@contextmanager
def without(adapters: Iterable[LoRALinear]) -> Iterator[None]:
    """Context in which adapters and gradients are off, so the model is the original one."""
    changed = list(adapters)
    for adapter in changed:
        adapter.is_off = True
    try:
        with torch.no_grad():
            yield
    finally:
        for adapter in changed:
            adapter.is_off = False


def save(adapters: Mapping[str, LoRALinear], folder: Path, base: str) -> None:
    """Write the adapters in PEFT's format; `base` names their model. PerfsuiteError if `folder` cannot be written."""
    from safetensors.torch import save_file

    settings = next(iter(adapters.values())).settings
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted(LAYERS),
        "bias": "none",
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        save_file({name: t.detach().cpu().contiguous() for name, t in _named(adapters).items()}, folder / WEIGHTS)
    except OSError as error:
        raise PerfsuiteError(f"cannot write into {shown(folder)}: {error.strerror or error}") from None


def settings_of(folder: Path) -> Settings:
    """Return the settings of stored adapters; PerfsuiteError unless they are plain LoRA of all linear layers."""
    config = read_json(folder / CONFIG)
    wanted = {"peft_type": ("LORA",), "bias": ("none", None), "use_dora": (False, None), "use_rslora": (False, None)}
    for name, values in wanted.items():
        if config.get(name) not in values:
            raise PerfsuiteError(
                f"{shown(folder / CONFIG)}: {name} is {config.get(name)!r}; plain LoRA adapters are read"
            )
    targets = config.get("target_modules")
    if not isinstance(targets, list) or set(targets) != set(LAYERS):
        raise PerfsuiteError(
            f"{shown(folder / CONFIG)}: the adapters are of {targets!r}; expected one for each of {', '.join(LAYERS)}"
        )
    try:
        return Settings(rank=int(config["r"]), alpha=float(config["lora_alpha"]), dropout=float(config["lora_dropout"]))
    except (KeyError, TypeError, ValueError) as error:
        raise PerfsuiteError(f"{shown(folder / CONFIG)} is damaged: {type(error).__name__}: {error}") from None


def load(adapters: Mapping[str, LoRALinear], folder: Path) -> None:
    """Load stored adapters; PerfsuiteError if they are missing, damaged or of another model."""
    state = read_tensors(folder / WEIGHTS)
    own = _named(adapters)
    for name in (n for n in {**own, **state} if n not in own or n not in state or own[n].shape != state[n].shape):
        found = tuple(state[name].shape) if name in state else "missing"
        expected = tuple(own[name].shape) if name in own else "nothing of that name"
        raise PerfsuiteError(
            f"the adapters in {shown(folder)} are not of this model: {name} is {found}, expected {expected}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def _named(adapters: Mapping[str, LoRALinear]) -> dict[str, Any]:
    """Return the adapters' parameters under PEFT's names."""
    found = {}
    for name, adapter in adapters.items():
        found[f"{PREFIX}{name}.lora_A.weight"] = adapter.lora_a
        found[f"{PREFIX}{name}.lora_B.weight"] = adapter.lora_b
    return found
