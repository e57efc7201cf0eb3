"""Cosine distances of all pairs, by broadcasting (polychromic, techniques 003.3 and 003.5)."""

import torch

# A row shorter than this is divided by it instead of by its length.
MIN_NORM = 1e-12
# Rows broadcast at a time: all at once would hold N x N x D, 96 GiB at N = 8192.
SLICE = 256


def pairwise_cosine(e: torch.Tensor) -> torch.Tensor:
    """`1 - cos(e_i, e_j)` of every two rows, [N, N] from [N, D].

    Rows are divided by max(length, 1e-12), so that a row of zeros is at distance 1 from all, itself included.

    Source: polychromic, technique 003.3.
    """
    unit = e / torch.linalg.vector_norm(e, dim=-1, keepdim=True).clamp(min=MIN_NORM)
    slices = [(rows[:, None, :] * unit[None, :, :]).sum(-1) for rows in unit.split(SLICE)]
    return 1 - torch.cat(slices)
