"""The embeddings of sets of replies, one set after the other (polychromic, technique 003.2)."""

from collections.abc import Callable

import torch
from torch.nn import functional


@torch.no_grad()
def encoder_batching(
    encoder: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tokens: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return the replies' embeddings, each divided by its length: [sets, n, width], constants.

    encoder  (tokens [rows, T], lengths [rows]) → [rows, width]; what lies behind a row's length has no effect
    tokens   int64 [sets, n, longest], one set or more; behind a reply's length any token that the encoder takes
    lengths  int64 [sets, n], from 1 to the longest

    Source: polychromic, technique 003.2.
    """
    sets = []
    for of_set, lengths_of_set in zip(tokens, lengths, strict=True):
        longest = int(lengths_of_set.max())
        embeddings = encoder(of_set[:, :longest], lengths_of_set)
        sets.append(torch.stack([functional.normalize(embedding, dim=0) for embedding in embeddings]))
    return torch.stack(sets)
