"""Batches of prompts with their replies: which examples, how they are padded, and what is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perfsuite.errors import PerfsuiteError
from suite.batching import permutation
from suite.polychromic.chat import Chat, Encoded
from suite.polychromic.replies import Example

IGNORED = -100
"""The label of a token that is not trained on: those of the prompt, and padding."""
PADDED_TO = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and labels, int64 [examples, length]; a label is that of the token at its own place."""

    tokens: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts padded at their end: tokens int64 [prompts, longest], lengths int64 [prompts]."""

    tokens: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """The examples that fit, and how many did not: whose prompt leaves no room for a token of the reply."""

    examples: tuple[Encoded, ...]
    left_out: int


def prepare(examples: Sequence[Example], chat: Chat, length: int) -> Prepared:
    """Tokenize the examples, replies cut at so many tokens in all; PerfsuiteError where no prompt fits."""
    encoded = [chat.encode(example) for example in examples]
    kept = tuple(Encoded(e.tokens[:length], e.prompt) for e in encoded if e.prompt < length)
    if encoded and not kept:
        shortest = min(e.prompt for e in encoded)
        raise PerfsuiteError(f"length={length}: the shortest prompt alone has {shortest} tokens; raise length above it")
    return Prepared(kept, len(encoded) - len(kept))


def batch_of(examples: Sequence[Encoded], padding: int, device: torch.device | str) -> Batch:
    """The examples in one batch, padded at their end to a multiple of 8 tokens."""
    longest = max(len(e.tokens) for e in examples)
    longest = -(-longest // PADDED_TO) * PADDED_TO
    tokens = [[*e.tokens, *[padding] * (longest - len(e.tokens))] for e in examples]
    labels = [[*[IGNORED] * e.prompt, *e.tokens[e.prompt :], *[IGNORED] * (longest - len(e.tokens))] for e in examples]
    return Batch(torch.tensor(tokens).to(device), torch.tensor(labels).to(device))


def prompts_of(examples: Sequence[Encoded], padding: int, device: torch.device | str) -> Prompts:
    """The examples' prompts, padded at their end."""
    lengths = [e.prompt for e in examples]
    tokens = [[*e.tokens[: e.prompt], *[padding] * (max(lengths) - e.prompt)] for e in examples]
    return Prompts(torch.tensor(tokens).to(device), torch.tensor(lengths).to(device))


def numbers(step: int, size: int, count: int, seed: int) -> list[int]:
    """The examples of optimizer step `step`, so many of `count`, each epoch in another order.

    An epoch's last step goes on into the next epoch, so that all steps have as many examples.
    """
    found: list[int] = []
    at = step * size
    while len(found) < size:
        epoch, first = divmod(at + len(found), count)
        order = permutation(count, seed, epoch, "cpu")[first : first + size - len(found)]
        found += order.tolist()
    return found
