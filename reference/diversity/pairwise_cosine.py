"""Cosine distances of all pairs of rows, by broadcasting (polychromic, techniques 003.3 and 003.5)."""

import torch

# A row shorter than this is divided by MIN_NORM instead of its length.
MIN_NORM = 1e-12
# Rows broadcast at a time. All rows at once would need an N x N x D tensor: 96 GiB at N = 8192, D = 384.
SLICE = 256


def pairwise_cosine(e: torch.Tensor) -> torch.Tensor:
    """Return `1 - cos(e_i, e_j)` for all pairs of rows of e [N, D], [N, N].

    Rows are divided by max(length, 1e-12), so a row of zeros is at distance 1 from every row, including itself.

    Source: polychromic, technique 003.3.
    """
    # In float16 the length may overflow, and MIN_NORM is 0.
    wide = torch.promote_types(e.dtype, torch.float32)
    length = torch.linalg.vector_norm(e, dim=-1, keepdim=True, dtype=wide)
    unit = (e / length.clamp(min=MIN_NORM)).to(e.dtype)
    slices = [(rows[:, None, :] * unit[None, :, :]).sum(-1) for rows in unit.split(SLICE)]
    return 1 - torch.cat(slices)
