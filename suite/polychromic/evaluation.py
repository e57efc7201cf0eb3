"""Evaluation of a trained model: its loss on held-out replies, and the diversity of the replies it samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from suite.polychromic.batches import IGNORED, Prompts, batch_of, prompts_of
from suite.polychromic.chat import Encoded
from suite.polychromic.data import TrainerData, uniforms
from suite.polychromic.llama import Llama
from suite.polychromic.lora import without
from suite.polychromic.objective import rows_of, sets_of, texts, widened_loss
from suite.polychromic.sentences import Sentences
from suite.techniques import implementation

REPLIES = 5
"""Replies sampled per prompt."""
PROMPTS = 64
"""Maximum number of prompts for which replies are sampled."""
EXAMPLES = 8
"""Examples per batch."""


def quality(trainer: Any, trainer_data: TrainerData) -> Mapping[str, float]:
    """Return the metrics on the validation examples; an empty dict if there are none.

    held_out_loss   mean cross-entropy over the tokens of their replies
    diversity       mean pairwise distance of five sampled replies to the same prompt
    log_likelihood  mean over the sampled tokens under the model without its adapters; low for gibberish
    """
    if not trainer_data.validation:
        return {}
    config, model, end = trainer.config, trainer.model, trainer_data.chat.end
    sentences = trainer.sentences or trainer_data.sentences(trainer.device)
    prompts = list({e.tokens[: e.prompt]: e for e in trainer_data.validation}.values())[:PROMPTS]
    distances, likelihood, count = [], 0.0, 0
    for at in range(0, len(prompts), EXAMPLES):
        asked, drawn = replies_to(
            model, prompts[at : at + EXAMPLES], REPLIES, config.new_tokens, config.temperature, config.top_p, end, at
        )
        distances += distances_of(sentences, texts(trainer_data.chat, drawn), REPLIES, trainer.device)
        with without(trainer.adapters.values()):
            own, tokens = log_likelihood(model, asked, drawn, end)
        likelihood, count = likelihood + own, count + tokens
    return {
        "held_out_loss": held_out_loss(model, trainer_data.validation, end),
        "diversity": sum(distances) / len(distances),
        "log_likelihood": likelihood / count,
    }


@torch.no_grad()
def held_out_loss(model: Llama, examples: Sequence[Encoded], end: int) -> float:
    """Return the mean cross-entropy over all tokens of the examples' replies."""
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


def replies_to(
    model: Llama,
    examples: Sequence[Encoded],
    replies: int,
    new_tokens: int,
    temperature: float,
    top_p: float,
    end: int,
    seed: int,
) -> tuple[Prompts, torch.Tensor]:
    """Sample `replies` replies per prompt. Return (prompts, reply tokens [prompts, replies, new_tokens])."""
    generate = implementation("generation.batched_generation", "batched_generation", optimized=True)
    device = model.lm_head.weight.device
    prompts = prompts_of(examples, end, device)
    numbers = uniforms(seed, 0, (len(examples), replies, new_tokens), device)
    return prompts, generate(model, prompts.tokens, prompts.lengths, numbers, temperature, top_p, end)


@torch.no_grad()
def log_likelihood(model: Llama, prompts: Prompts, drawn: torch.Tensor, end: int) -> tuple[float, int]:
    """Return (sum of the log-probabilities of the replies' tokens, number of these tokens).

    Only tokens up to the end token of each reply count, the end token included.
    """
    cross_entropy = implementation("losses.chunked_cross_entropy", "chunked_cross_entropy", optimized=True)
    rows = rows_of(prompts, drawn, end)
    hidden = model.hidden(rows.tokens)
    before = hidden.gather(1, rows.before[..., None].expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
    labels = rows.drawn.masked_fill(~rows.sampled, IGNORED).flatten()
    with widened_loss(before):
        loss = cross_entropy(before, model.lm_head.weight, labels)
    count = int(rows.sampled.sum())
    return -float(loss) * count, count


def distances_of(sentences: Sentences, said: list[str], replies: int, device: torch.device) -> list[float]:
    """Return the mean pairwise distance of the replies in each set."""
    embed = implementation("diversity.encoder_batching", "encoder_batching", optimized=True)
    mean = implementation("diversity.mean_pairwise_cosine", "mean_pairwise_cosine", optimized=True)
    return [float(mean(of_set)) for of_set in embed(sentences.encoder, *sets_of(sentences, said, replies, device))]
