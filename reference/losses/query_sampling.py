"""The decoder's error at some points of the grid, from a field decoded at all of them (ups, technique 002.3)."""

from collections.abc import Callable

import torch
from torch.nn import functional


def query_sampling(
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    latents: torch.Tensor,
    field: torch.Tensor,
    points: torch.Tensor,
    queries: torch.Tensor,
) -> torch.Tensor:
    """Return the mean squared error of the decoded field at the query points, 0-d.

    decode   (latents, points [N, d]) → [B, N, C]; the value at a point must not depend on the other points
    latents  [B, T, latent width]
    field    [B, *grid, C], the true values
    points   [*grid, d], coordinates
    queries  [Q] int64, indices into the flattened grid; at least one

    Source: ups, technique 002.3.
    """
    decoded = decode(latents, points.flatten(0, -2))
    return functional.mse_loss(decoded[:, queries], field.flatten(1, -2)[:, queries])
