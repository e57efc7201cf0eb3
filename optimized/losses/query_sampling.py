"""The decoder's error at some points of the grid, decoded at these alone (ups, technique 002.3)."""

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

    The decoder's cost is proportional to the number of query points. The source expects a gain from 1024 points
    instead of 2048: on a grid of 1024 points both are all points, and nothing is gained. Nor is anything where the
    whole grid is decoded for another loss, as `inverse_losses` does.

    decode   (latents, points [N, d]) → [B, N, C]; no point may depend on another
    latents  [B, T, latent width]
    field    [B, *grid, C], the true values
    points   [*grid, d], coordinates
    queries  [Q] int64, places in the flattened grid; one or more

    Source: ups, technique 002.3.
    """
    decoded = decode(latents, points.flatten(0, -2).index_select(0, queries))
    return functional.mse_loss(decoded, field.flatten(1, -2).index_select(1, queries))
