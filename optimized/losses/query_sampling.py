"""The decoder's error at some points of the grid, decoded only at these points (ups, technique 002.3)."""

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

    The cost of the decoder is proportional to the number of query points. The source expects a gain from 1024 points
    instead of 2048. On a grid of 1024 points both select all points, and nothing is gained. Nothing is gained either if
    the whole grid is decoded for another loss, as in `inverse_losses`.

    decode   (latents, points [N, d]) → [B, N, C]; the value at a point must not depend on the other points
    latents  [B, T, latent width]
    field    [B, *grid, C], the true values
    points   [*grid, d], coordinates
    queries  [Q] int64, indices into the flattened grid; at least one

    Source: ups, technique 002.3.
    """
    decoded = decode(latents, points.flatten(0, -2).index_select(0, queries))
    return functional.mse_loss(decoded, field.flatten(1, -2).index_select(1, queries))
