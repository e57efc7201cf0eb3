"""Scaled dot-product attention of all queries with all keys (ups, technique 002.8b)."""

import torch
from torch.nn import functional


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return `softmax(q kᵀ / √d) v`, [B, heads, T, d]; not causal.

    q, k, v  [B, heads, T, d]

    Source: ups, technique 002.8b.
    """
    return functional.scaled_dot_product_attention(q, k, v)
