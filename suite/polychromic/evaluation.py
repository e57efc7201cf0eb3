"""Evaluation of a trained model: its loss on held-out replies, and the diversity of its own replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from suite.polychromic.batches import IGNORED, batch_of, prompts_of
from suite.polychromic.chat import Chat, Encoded
from suite.polychromic.data import Given, uniforms
from suite.polychromic.llama import Llama
from suite.polychromic.objective import sets_of, texts, widened_loss
from suite.polychromic.sentences import Sentences
from suite.techniques import implementation

REPLIES = 5
"""Replies drawn to each prompt."""
PROMPTS = 64
"""Most prompts that the model replies to."""
EXAMPLES = 8
"""Examples of a batch."""


def quality(trainer: Any, given: Given) -> Mapping[str, float]:
    """held_out_loss of the validation examples, and diversity of the replies to their prompts; empty without any."""
    if not given.validation:
        return {}
    config = trainer.config
    model, sentences = trainer.model, trainer.sentences or given.sentences(trainer.device)
    prompts = list({e.tokens[: e.prompt]: e for e in given.validation}.values())[:PROMPTS]
    return {
        "held_out_loss": held_out_loss(model, given.validation, given.chat.end),
        "diversity": diversity_of(
            model, sentences, given.chat, prompts, config.new_tokens, config.temperature, config.top_p
        ),
    }


@torch.no_grad()
def held_out_loss(model: Llama, examples: Sequence[Encoded], end: int) -> float:
    """The mean cross-entropy of the examples' replies, over all their tokens."""
    cross_entropy = implementation("losses.chunked_cross_entropy", "chunked_cross_entropy", optimized=True)
    device = model.lm_head.weight.device
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    ordered = sorted(examples, key=lambda e: len(e.tokens))
    for at in range(0, len(ordered), EXAMPLES):
        part = batch_of(ordered[at : at + EXAMPLES], end, device)
        labels = part.labels[:, 1:].flatten()
        trained = int((labels != IGNORED).sum())
        hidden = model.hidden(part.tokens)[:, :-1].flatten(0, 1)
        with widened_loss(hidden):
            total += trained * cross_entropy(hidden, model.lm_head.weight, labels).double()
        count += trained
    return float(total / count)


def diversity_of(
    model: Llama,
    sentences: Sentences,
    chat: Chat,
    examples: Sequence[Encoded],
    new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int = 0,
) -> float:
    """The mean distance of two of five replies to the same prompt, over the examples' prompts."""
    device, found = model.lm_head.weight.device, []
    for at in range(0, len(examples), EXAMPLES):
        said = replies_to(model, chat, examples[at : at + EXAMPLES], REPLIES, new_tokens, temperature, top_p, seed + at)
        found += distances_of(sentences, said, REPLIES, device)
    return sum(found) / len(found)


def replies_to(
    model: Llama,
    chat: Chat,
    examples: Sequence[Encoded],
    replies: int,
    new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> list[str]:
    """Draw `replies` replies to each prompt; return their texts, one prompt after another."""
    generate = implementation("generation.batched_generation", "batched_generation", optimized=True)
    device = model.lm_head.weight.device
    prompts = prompts_of(examples, chat.end, device)
    numbers = uniforms(seed, 0, (len(examples), replies, new_tokens), device)
    drawn = generate(model, prompts.tokens, prompts.lengths, numbers, temperature, top_p, chat.end)
    return texts(chat, drawn)


def distances_of(sentences: Sentences, said: list[str], replies: int, device: torch.device) -> list[float]:
    """The mean distance of two replies of each set."""
    embed = implementation("diversity.encoder_batching", "encoder_batching", optimized=True)
    mean = implementation("diversity.mean_pairwise_cosine", "mean_pairwise_cosine", optimized=True)
    return [float(mean(of_set)) for of_set in embed(sentences.encoder, *sets_of(sentences, said, replies, device))]
