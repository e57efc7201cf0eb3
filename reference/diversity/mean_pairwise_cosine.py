"""Mean pairwise cosine distance, computed from the distance matrix (polychromic, technique 003.3)."""

import torch

from reference.diversity.pairwise_cosine import pairwise_cosine


def mean_pairwise_cosine(e: torch.Tensor) -> torch.Tensor:
    """Return the mean cosine distance over all pairs i < j of rows of e [N, D], 0-d; NaN if N < 2.

    Source: polychromic, technique 003.3.
    """
    i, j = torch.triu_indices(e.shape[0], e.shape[0], offset=1, device=e.device)
    return pairwise_cosine(e)[i, j].mean()
