"""Loads a language model from a folder in transformers' format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from perfsuite.errors import PerfsuiteError
from suite.naming import shown
from suite.polychromic.llama import Llama, Shape
from suite.polychromic.model_files import check_folder, read_json, read_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ASSUMED: Mapping[str, tuple[object, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
}
"""Configuration field → values that `Llama` supports. None means that the field may be missing."""


def shape_of(folder: Path) -> Shape:
    """Return the model's sizes; PerfsuiteError if config.json is damaged or its architecture is not Llama's."""
    path = folder / "config.json"
    check_folder(folder, "a model as transformers stores it")
    config = read_json(path)
    for name, values in ASSUMED.items():
        if config.get(name) not in values:
            raise PerfsuiteError(
                f"{shown(path)}: {name} is {config.get(name)!r}; only models of Llama's architecture are trained "
                f"({name} {' or '.join(map(repr, values))})"
            )
    try:
        theta, kind = _rotation(config)
    except (AttributeError, TypeError, ValueError) as error:
        raise PerfsuiteError(f"{shown(path)} is damaged: rope: {error}") from None
    if kind not in ("default", None):
        raise PerfsuiteError(
            f"{shown(path)}: rotary embeddings of type {kind!r} are not computed here; only the default"
        )
    try:
        heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
        found = Shape(
            vocabulary=int(config["vocab_size"]),
            width=width,
            hidden=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or width // heads),
            positions=int(config.get("max_position_embeddings", 2048)),
            rope_theta=theta,
            eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
        for name, value in dataclasses.asdict(found).items():
            if name != "tied" and not value > 0:
                raise ValueError(f"{name} is {value}, and must be above 0")
        if found.heads % found.kv_heads:
            raise ValueError(f"{found.heads} heads are no multiple of {found.kv_heads} key-value heads")
        if found.head_width % 2:
            raise ValueError(f"the head width is {found.head_width}, and must be even for rotary embeddings")
        return found
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise PerfsuiteError(f"{shown(path)} is damaged: {type(error).__name__}: {error}") from None


def _rotation(config: Mapping[str, Any]) -> tuple[float, str | None]:
    """Return the base of the rotary embedding and its type, from the new field names or the old ones."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = found.get("rope_theta", config.get("rope_theta", 10_000.0))
    return float(theta), found.get("rope_type", found.get("type"))


def load(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Llama:
    """Load the model; PerfsuiteError if a file is missing, damaged, or does not match the configuration."""
    shape = shape_of(folder)
    state: dict[str, torch.Tensor] = {}
    for path in _files(folder):
        state |= read_tensors(path, "; fetch the model again")
    if shape.tied:
        state["lm_head.weight"] = state.get("model.embed_tokens.weight", torch.empty(0))
    with torch.device("meta"):
        model = Llama(shape)
    state = {name: t for name, t in state.items() if not name.endswith("rotary_emb.inv_freq")}  # in older files
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in state.items()}
    for name in (n for n in {**expected, **found} if expected.get(n) != found.get(n)):
        raise PerfsuiteError(
            f"the weights in {shown(folder)} are not of its configuration: {name} is {found.get(name, 'missing')}, "
            f"expected {expected.get(name, 'nothing of that name')}"
        )
    model.load_state_dict({name: t.to(device, dtype) for name, t in state.items()}, assign=True)
    if shape.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def _files(folder: Path) -> list[Path]:
    """Return the weight files: a single file, or the files that an index lists."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise PerfsuiteError(f"{shown(folder / INDEX)} is damaged: it has no weight_map of file names")
    return [folder / name for name in dict.fromkeys(names.values())]
