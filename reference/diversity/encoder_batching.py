"""Embeddings of sets of replies, one set at a time (polychromic, technique 003.2)."""

from collections.abc import Callable

import torch
from torch.nn import functional


@torch.no_grad()
def encoder_batching(
    encoder: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tokens: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return the L2-normalised embeddings of the replies, [sets, n, width], without gradient.

    encoder  (tokens [rows, T], lengths [rows]) → [rows, width]; tokens past a row's length have no effect
    tokens   int64 [sets, n, longest], one set or more; past a reply's length, any token that the encoder accepts
    lengths  int64 [sets, n], from 1 to `longest`

    Source: polychromic, technique 003.2.
    """
    sets = []
    for of_set, lengths_of_set in zip(tokens, lengths, strict=True):
        longest = int(lengths_of_set.max())
        embeddings = encoder(of_set[:, :longest], lengths_of_set)
        sets.append(torch.stack([functional.normalize(embedding, dim=0) for embedding in embeddings]))
    return torch.stack(sets)
