"""The embeddings of sets of replies, of all sets in one batch (polychromic, technique 003.2)."""

from collections.abc import Callable

import torch
from torch.nn import functional

ROWS = 32  # of the source: `encode(texts, batch_size=32, normalize_embeddings=True)`


@torch.no_grad()
def encoder_batching(
    encoder: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    rows: int = ROWS,
) -> torch.Tensor:
    """Return the replies' embeddings, each divided by its length: [sets, n, width], constants.

    The replies of all sets are sorted by length and encoded in batches of `rows`, each as wide as its longest reply:
    up to 32 replies, such as 3 to each of 4 prompts, are one call of the encoder. Sorting keeps long replies from
    padding short ones where there are several batches. All embeddings are normalised at once. The host waits for the
    GPU once, for the batches' widths; the reference does for each set.

    encoder  (tokens [rows, T], lengths [rows]) → [rows, width]; what lies behind a row's length has no effect
    tokens   int64 [sets, n, longest], one set or more; behind a reply's length any token that the encoder takes
    lengths  int64 [sets, n], from 1 to the longest
    rows     in a batch at most

    ValueError for fewer rows than one.

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
