"""Attention that stores all scores (polychromic, technique 003.1)."""

import itertools
import math

import torch


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None = None, causal: bool = True
) -> torch.Tensor:
    """Return `softmax(q kᵀ / √d) v`, [B, H, T, d], with the softmax in float32 or wider; 0 past a row's length.

    q        [B, H, T, d]
    k, v     [B, K, T, d]; H is a multiple of K, and each key head serves H / K query heads
    lengths  int64 [B], from 1 to T: tokens past it are padding, which no token attends to; None: no padding
    causal   whether a token attends only to itself and to earlier tokens

    Source: polychromic, technique 003.1.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    place = torch.arange(q.shape[2], device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(wide) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(place > place[:, None], -torch.inf)
    if lengths is None:
        return scores.softmax(-1).to(v.dtype) @ v
    inside = place < lengths[:, None]
    weights = scores.masked_fill(~inside[:, None, None], -torch.inf).softmax(-1)
    return (weights.to(v.dtype) @ v).masked_fill(~inside[:, None, :, None], 0.0)


def flash_attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    causal: bool = True,
    longest: int | None = None,
) -> torch.Tensor:
    """Return the attention within each of several concatenated sequences, [N, H, d].

    q        [N, H, d]
    k, v     [N, K, d]; H is a multiple of K
    offsets  int32 [sequences + 1], non-decreasing from 0 to N: the start of each sequence, and the end of the last one
    causal   whether a token attends only to itself and to earlier tokens
    longest  number of tokens of the longest sequence, or more; unused here

    Source: polychromic, technique 003.1.
    """
    del longest
    found = []
    ends = offsets.tolist()
    for first, end in itertools.pairwise(ends):
        own = (x[first:end].transpose(0, 1)[None] for x in (q, k, v))
        found.append(flash_attention(*own, causal=causal)[0].transpose(0, 1))
    return torch.cat(found) if found else torch.zeros_like(q)
