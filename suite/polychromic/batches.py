"""Batches of prompts with replies: selection of the examples, padding, packing, and labels."""

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
"""Label of tokens without a loss: prompt tokens and padding."""
PADDED_TO = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and labels, int64 [examples, length]. A label is the token at the same position, or `IGNORED`."""

    tokens: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prompts:
    """Right-padded prompts: tokens int64 [prompts, longest], lengths int64 [prompts]."""

    tokens: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """The examples that fit, and the number dropped because their prompt leaves no room for a reply token."""

    examples: tuple[Encoded, ...]
    left_out: int


def prepare(examples: Sequence[Example], chat: Chat, length: int, *, needed: bool = True) -> Prepared:
    """Tokenize the examples and truncate each, prompt included, to `length` tokens.

    PerfsuiteError if `needed`, and no prompt fits.
    """
    encoded = [chat.encode(example) for example in examples]
    kept = tuple(Encoded(e.tokens[:length], e.prompt) for e in encoded if e.prompt < length)
    if needed and encoded and not kept:
        shortest = min(e.prompt for e in encoded)
        raise PerfsuiteError(
            f"length={length}: the shortest prompt alone has {shortest} tokens; give length {shortest + 1} or more"
        )
    return Prepared(kept, len(encoded) - len(kept))


def batch_of(examples: Sequence[Encoded], padding: int, device: torch.device | str) -> Batch:
    """Return the examples as one batch, right-padded to a multiple of 8 tokens."""
    longest = max(len(e.tokens) for e in examples)
    longest = -(-longest // PADDED_TO) * PADDED_TO
    tokens = [[*e.tokens, *[padding] * (longest - len(e.tokens))] for e in examples]
    labels = [[*[IGNORED] * e.prompt, *e.tokens[e.prompt :], *[IGNORED] * (longest - len(e.tokens))] for e in examples]
    return Batch(torch.tensor(tokens).to(device), torch.tensor(labels).to(device))


@dataclass(frozen=True, slots=True)
class Packed:
    """Concatenated examples, N tokens in total, with padding only at the end.

    tokens     int64 [N]
    targets    int64 [N]: the next token if it has a loss, otherwise `IGNORED`
    positions  int64 [N]: position of each token in its example
    places     int64 [N]: number of each token, the counter of its dropout mask
    offsets    int32 [examples + 2]: start of each example, start of the padding, and N
    count      number of tokens with a loss
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor
    count: int


def groups_of(examples: Sequence[Encoded], most: int) -> list[range]:
    """Divide consecutive examples into groups of at most `most` tokens. A longer example forms a group by itself."""
    groups: list[range] = []
    first = total = 0
    for number, example in enumerate(examples):
        if number > first and total + len(example.tokens) > most:
            groups.append(range(first, number))
            first, total = number, 0
        total += len(example.tokens)
    return [*groups, range(first, len(examples))]


def packed(examples: Sequence[Encoded], first: int, padding: int, multiple: int, device: torch.device | str) -> Packed:
    """Concatenate examples, numbered in the step from `first` on, and pad to a multiple of `multiple` tokens."""
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
    one, two, three, four = torch.stack(parts).to(device)  # one copy to the device
    return Packed(one, two, three, four, ends.to(device), count)


def prompts_of(
    examples: Sequence[Encoded], padding: int, device: torch.device | str, beside: int = 0, multiple: int = 1
) -> Prompts:
    """Return the right-padded prompts. The padded length plus `beside` is a multiple of `multiple`."""
    lengths = [e.prompt for e in examples]
    longest = -(-(max(lengths) + beside) // multiple) * multiple - beside
    tokens = [[*e.tokens[: e.prompt], *[padding] * (longest - e.prompt)] for e in examples]
    return Prompts(torch.tensor(tokens).to(device), torch.tensor(lengths).to(device))


def numbers(step: int, size: int, count: int, seed: int) -> list[int]:
    """Return the indices, out of `count`, of the `size` examples of optimizer step `step`.

    Each epoch has its own order. The last step of an epoch continues into the next epoch, so every step has `size`
    examples.
    """
    found: list[int] = []
    at = step * size
    while len(found) < size:
        epoch, first = divmod(at + len(found), count)
        order = permutation(count, seed, epoch, "cpu")[first : first + size - len(found)]
        found += order.tolist()
    return found
