"""Models with random weights, for timings and tests in which the generated text does not matter."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from perfsuite.errors import PerfsuiteError
from suite.polychromic.chat import Chat
from suite.polychromic.encoder import EncoderShape, SentenceEncoder
from suite.polychromic.llama import Llama, Shape
from suite.polychromic.sentences import Sentences
from suite.seeding import seeded_on_cpu

SPECIAL = ("<|start|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(vocabulary=258, width=32, hidden=64, layers=1, heads=4, kv_heads=2, head_width=8, positions=512),
    "135m": Shape(
        vocabulary=49152,
        width=576,
        hidden=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_width=64,
        positions=8192,
        rope_theta=100_000.0,
    ),
    "8b": Shape(
        vocabulary=128_256,
        width=4096,
        hidden=14_336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_width=128,
        positions=8192,
        rope_theta=500_000.0,
        tied=False,
    ),
}
"""Name → sizes. 135m has those of SmolLM2-135M, and 8b those of Llama 3 8B."""
TINY_ENCODER = EncoderShape(vocabulary=258, width=32, hidden=64, layers=2, heads=4, positions=512)


def tokenizer() -> Any:
    """Build a byte-level tokenizer, with two special tokens that begin and end a message."""
    try:
        import tokenizers
    except ImportError:
        raise PerfsuiteError("tokenizers is not installed; pip install 'perfsuite[train]'") from None
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate((*SPECIAL, *alphabet))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return made


def chat() -> Chat:
    """Build a byte-level chat tokenizer; PerfsuiteError if its files cannot be written to the temporary folder."""
    made, config = tokenizer().to_str(), {"eos_token": SPECIAL[1], "chat_template": TEMPLATE}
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "tokenizer.json").write_text(made)
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            return Chat(folder)
    except OSError as error:
        where = tempfile.gettempdir()
        raise PerfsuiteError(f"cannot write to {where}: {error.strerror}; free space there, or set TMPDIR") from None


def language_model(name: str, seed: int, dtype: torch.dtype, device: torch.device | str) -> Llama:
    """Build a model of `SHAPES`, with random weights drawn on `device`.

    Weights are drawn in half precision for a half-precision `dtype`, otherwise in float32. The two give different
    weights for the same seed.
    """
    on = torch.device(device)
    with torch.random.fork_rng(devices=[on] if on.type == "cuda" else []):
        (torch.default_generator if on.type == "cpu" else torch).manual_seed(seed)
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype if dtype.itemsize == 2 else torch.float32)
            with on:
                return Llama(SHAPES[name]).to(dtype)
        finally:
            torch.set_default_dtype(before)


def sentences(seed: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Sentences:
    """Build a small byte-level sentence encoder, with random weights drawn on the CPU."""
    with seeded_on_cpu(seed):
        encoder = SentenceEncoder(TINY_ENCODER)
        for weight in encoder.parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, std=TINY_ENCODER.width**-0.5)
    words = tokenizer()
    words.enable_truncation(TINY_ENCODER.positions)
    return Sentences(encoder.to(device, dtype).requires_grad_(False), words)
