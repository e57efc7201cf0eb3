"""Batches of prompts with their replies: choice of the examples, padding, and the tokens that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perfsuite.errors import PerfsuiteError
from suite.batching import permutation
from suite.polychromic.chat import Chat, Encoded
from suite.polychromic.lora import places_of
from suite.polychromic.replies import Example

IGNORED = -100
"""Label of tokens that are not trained on: those of the prompt, and padding."""
PADDED_TO = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and labels, int64 [examples, length]. A label equals the token at its own position, or is `IGNORED`."""

    tokens: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts padded at their end: tokens int64 [prompts, longest], lengths int64 [prompts]."""

    tokens: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """The examples that fit, and the number of those whose prompt leaves no room for a token of the reply."""

    examples: tuple[Encoded, ...]
    left_out: int


def prepare(examples: Sequence[Example], chat: Chat, length: int, *, needed: bool = True) -> Prepared:
    """Tokenize the examples, each cut at `length` tokens in all; PerfsuiteError if some are `needed` and no prompt
    fits."""
    encoded = [chat.encode(example) for example in examples]
    kept = tuple(Encoded(e.tokens[:length], e.prompt) for e in encoded if e.prompt < length)
    if needed and encoded and not kept:
        shortest = min(e.prompt for e in encoded)
        raise PerfsuiteError(
            f"length={length}: the shortest prompt alone has {shortest} tokens; give length {shortest + 1} or more"
        )
    return Prepared(kept, len(encoded) - len(kept))


def batch_of(examples: Sequence[Encoded], padding: int, device: torch.device | str) -> Batch:
    """Return the examples as one batch, padded at their end to a multiple of 8 tokens."""
    longest = max(len(e.tokens) for e in examples)
    longest = -(-longest // PADDED_TO) * PADDED_TO
    tokens = [[*e.tokens, *[padding] * (longest - len(e.tokens))] for e in examples]
    labels = [[*[IGNORED] * e.prompt, *e.tokens[e.prompt :], *[IGNORED] * (longest - len(e.tokens))] for e in examples]
    return Batch(torch.tensor(tokens).to(device), torch.tensor(labels).to(device))


@dataclass(frozen=True, slots=True)
class Packed:
    """Examples one after another, N tokens, with padding only at the end.

    tokens     int64 [N]
    targets    int64 [N]: the next token where it is trained on, otherwise `IGNORED`
    positions  int64 [N]: position of each token in its example
    places     int64 [N]: number of each token, from which its dropout is drawn
    offsets    int32 [examples + 2]: start of each example, start of the padding, and N
    count      number of tokens that are trained on
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor
    count: int


def groups_of(examples: Sequence[Encoded], most: int) -> list[range]:
    """Divide the examples, in their order, into groups of at most `most` tokens; a longer one is a group by itself."""
    groups: list[range] = []
    first = total = 0
    for number, example in enumerate(examples):
        if number > first and total + len(example.tokens) > most:
            groups.append(range(first, number))
            first, total = number, 0
        total += len(example.tokens)
    return [*groups, range(first, len(examples))]


def packed(examples: Sequence[Encoded], first: int, padding: int, multiple: int, device: torch.device | str) -> Packed:
    """Pack the examples, numbered in the step from `first` on, and pad them to a multiple of `multiple` tokens."""
    tokens: list[int] = []
    targets: list[int] = []
    places, positions, offsets = [], [], [0]
    for number, example in enumerate(examples, first):
        length = len(example.tokens)
        tokens += example.tokens
        targets += [*[IGNORED] * (example.prompt - 1), *example.tokens[example.prompt :], IGNORED]
        positions.append(torch.arange(length))
        places.append(places_of(number, (1, length))[0])
        offsets.append(len(tokens))
    behind = -len(tokens) % multiple
    positions.append(torch.arange(behind))
    places.append(torch.zeros(behind, dtype=torch.int64))
    tokens += [padding] * behind
    targets += [IGNORED] * behind
    parts = (torch.tensor(tokens), torch.tensor(targets), torch.cat(positions), torch.cat(places))
    ends = torch.tensor([*offsets, len(tokens)], dtype=torch.int32)
    count = sum(len(e.tokens) - e.prompt for e in examples)
    one, two, three, four = torch.stack(parts).to(device)  # one copy
    return Packed(one, two, three, four, ends.to(device), count)


def prompts_of(
    examples: Sequence[Encoded], padding: int, device: torch.device | str, beside: int = 0, multiple: int = 1
) -> Prompts:
    """Return the prompts, padded at their end. Their length plus `beside` is a multiple of `multiple`."""
    lengths = [e.prompt for e in examples]
    longest = -(-(max(lengths) + beside) // multiple) * multiple - beside
    tokens = [[*e.tokens[: e.prompt], *[padding] * (longest - e.prompt)] for e in examples]
    return Prompts(torch.tensor(tokens).to(device), torch.tensor(lengths).to(device))


def numbers(step: int, size: int, count: int, seed: int) -> list[int]:
    """Return the numbers of the `size` examples of optimizer step `step`, out of `count`.

    Each epoch has another order. An epoch's last step continues into the next epoch, so that all steps have `size`
    examples.
    """
    found: list[int] = []
    at = step * size
    while len(found) < size:
        epoch, first = divmod(at + len(found), count)
        order = permutation(count, seed, epoch, "cpu")[first : first + size - len(found)]
        found += order.tolist()
    return found
