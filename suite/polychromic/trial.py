"""Models for the tests and timings of polychromic's pairs: models of any size, and the sizes of published ones."""

from __future__ import annotations

import torch

from suite.polychromic.encoder import EncoderShape, SentenceEncoder
from suite.polychromic.llama import Llama, Shape

SMOLLM2 = {"vocabulary": 49152, "layers": 30, "groups": 3, "kv_heads": 3, "pairs": 32}
"""Sizes of SmolLM2-135M."""


def language_model(vocabulary: int, layers: int, groups: int, kv_heads: int, pairs: int) -> Llama:
    """Build a model with `groups` query heads per key head, each head 2 · `pairs` wide.

    The weights' standard deviation is larger than for training, so that attention is far from uniform.
    """
    width = groups * kv_heads * 2 * pairs
    shape = Shape(
        vocabulary=vocabulary,
        width=width,
        hidden=width * 8 // 3 // 8 * 8 or 8,
        layers=layers,
        heads=groups * kv_heads,
        kv_heads=kv_heads,
        head_width=2 * pairs,
        positions=512,
    )
    model = Llama(shape)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layernorm" not in name and weight.dim() == 2:
                weight.normal_(std=width**-0.5)
    return model


MINILM = {"vocabulary": 30522, "layers": 6, "heads": 12, "head_width": 32, "positions": 512}
"""Sizes of all-MiniLM-L6-v2."""


def sentence_encoder(vocabulary: int, layers: int, heads: int, head_width: int, positions: int) -> SentenceEncoder:
    """Build an encoder. Its weights' standard deviation is larger than usual, so that attention is far from uniform."""
    width = heads * head_width
    shape = EncoderShape(
        vocabulary=vocabulary, width=width, hidden=4 * width, layers=layers, heads=heads, positions=positions
    )
    model = SentenceEncoder(shape)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=width**-0.5)
    return model
