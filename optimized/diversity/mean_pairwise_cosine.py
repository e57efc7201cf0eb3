"""Mean cosine distance without the matrix of distances (polychromic, technique 003.3)."""

import torch

MIN_NORM = 1e-12


def mean_pairwise_cosine(e: torch.Tensor) -> torch.Tensor:
    """The mean distance over all pairs i < j of rows of e [N, D], 0-d; NaN if there is no pair (N < 2).

    Linear in N: the sum of all entries of the matrix of cosines is the squared length of the sum of the unit
    rows, so that the mean is `1 - (|sum_i u_i|^2 - sum_i |u_i|^2) / (N (N - 1))`, where |u_i|^2 is 1 except for
    rows below the least length.

    Source: polychromic, technique 003.3.
    """
    n = e.shape[0]
    if n < 2:
        # Through e, so that there is a gradient: 0, as the mean of nothing has.
        return e.sum() * 0 + float("nan")
    unit = e / torch.linalg.vector_norm(e, dim=-1, keepdim=True).clamp(min=MIN_NORM)
    return 1 - (unit.sum(0).square().sum() - unit.square().sum()) / (n * (n - 1))
