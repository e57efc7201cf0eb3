"""Embeddings of sets of replies, with the replies of all sets batched together (polychromic, technique 003.2)."""

from collections.abc import Callable

import torch
from torch.nn import functional

ROWS = 32  # as in the source: `encode(texts, batch_size=32, normalize_embeddings=True)`


@torch.no_grad()
def encoder_batching(
    encoder: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: int = ROWS,
) -> torch.Tensor:
    """Return the L2-normalised embeddings of the replies, [sets, n, width], without gradient.

    The replies of all sets are sorted by length and encoded in batches of `rows`. Each batch is as wide as its longest
    reply, so sorting avoids padding short replies to the length of long ones. Up to 32 replies, such as 3 for each of 4
    prompts, need one call of the encoder. All embeddings are normalised at once. The host waits for the GPU once, to
    read the widths of the batches; the reference waits for each set.

    encoder  (tokens [rows, T], lengths [rows]) → [rows, width]; tokens past a row's length have no effect
    tokens   int64 [sets, n, longest], one set or more; past a reply's length, any token that the encoder accepts
    lengths  int64 [sets, n], from 1 to `longest`
    rows     maximum number of replies in a batch

    ValueError if `rows` is below 1.

    Source: polychromic, technique 003.2.
    """
    if rows < 1:
        raise ValueError(f"rows={rows}: a batch has at least one row")
    ordered, order = lengths.flatten().sort(descending=True, stable=True)
    given = tokens.flatten(0, 1)[order]
    found = [
        encoder(given[start : start + rows, :longest], ordered[start : start + rows])
        for start, longest in zip(range(0, len(order), rows), ordered[::rows].tolist(), strict=True)
    ]
    normalised = functional.normalize(torch.cat(found), dim=-1)
    embeddings = torch.empty_like(normalised)
    embeddings[order] = normalised
    return embeddings.unflatten(0, lengths.shape)
