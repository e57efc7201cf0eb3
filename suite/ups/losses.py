"""The losses of ups that need no decoder, the inputs of the inverse losses, and the sum of all losses.

loss = MSE(ẑ₁, z₁) + λ_enc · MSE(D(z)(x_q), u(x_q)) + λ_dec · MSE(E(D(z)), stop(z))
       + w_spectral · spectral error + w_boundary · boundary error

The first and the last two terms compare the operator's prediction ẑ₁ with the latents z₁. The inverse losses, weighted
by λ_enc and λ_dec, depend only on cached latents z, the encoder E and the decoder D. They have no gradient with respect
to the operator. z is z₀ or z₁ of each example, chosen at random, so that the decoder is also trained on latents after a
step, which the operator predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from suite.ups.config import UpsConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class InverseTask:
    """The part of a batch that belongs to one task, for the inverse losses."""

    encode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Encoder with the signature of `suite.ups.model.Encoder`."""
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Decoder with the signature of `suite.ups.model.Decoder`."""
    latents: torch.Tensor
    """[B, T, latent width]: cached latents."""
    field: torch.Tensor
    """[B, *grid, C]: the fields that the latents were encoded from."""
    points: torch.Tensor
    """[*grid, d]: the coordinates of the field's points."""
    queries: torch.Tensor
    """int64 [Q]: indices into the flattened grid."""


def query_indices(points: int, queries: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw `queries` distinct indices below `points`, int64 [queries]. If `points` ≤ `queries`, return all in order."""
    if points <= queries:
        return torch.arange(points)
    return torch.randperm(points, generator=generator)[:queries]


def spectral_error(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of the Fourier amplitudes of the latents along the tokens, 0-d.

    The transform is orthonormal. With PyTorch's default scale, this term outweighs the error of the latents. Latents
    whose mean has the wrong sign are then a local minimum that training does not leave (docs/trainers/ups.md).

    predicted, target  [B, T, latent width]
    """
    series = (torch.view_as_real(torch.fft.rfft(z, dim=1, norm="ortho")) for z in (predicted, target))
    # Not abs(): its complex kernel is compiled at run time and stored in a cache that processes share.
    found, wanted = (torch.linalg.vector_norm(z, dim=-1) for z in series)
    return functional.mse_loss(found, wanted)


def boundary_tokens(tokens: Sequence[int]) -> torch.Tensor:
    """Return a mask of the tokens at the boundary of the token grid, bool [T].

    tokens  number of tokens along each dimension, e.g. (128,) or (16, 8)
    """
    at_boundary = torch.zeros(tuple(tokens), dtype=torch.bool)
    for axis, count in enumerate(tokens):
        at_boundary.index_fill_(axis, torch.tensor([0, count - 1]), True)
    return at_boundary.flatten()


def boundary_error(predicted: torch.Tensor, target: torch.Tensor, at_boundary: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of the tokens at the boundary, 0-d.

    The source does not define this term. It is computed on the latent tokens, because the operator predicts no field.

    predicted, target  [B, T, latent width]
    at_boundary        bool [T], as returned by `boundary_tokens`, or the int64 indices of its true entries
    """
    return functional.mse_loss(predicted[:, at_boundary], target[:, at_boundary])


def ups_loss(
    config: UpsConfig,
    predicted: torch.Tensor,
    target: torch.Tensor,
    at_boundary: torch.Tensor,
    inverse: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of all losses of a batch, 0-d.

    predicted, target  [B, T, latent width], the latents after the step
    at_boundary        as for `boundary_error`
    inverse            the two unweighted inverse losses, as `inverse_losses` returns them
    """
    at_queries, again = inverse
    return (
        functional.mse_loss(predicted, target)
        + config.lambda_enc * at_queries
        + config.lambda_dec * again
        + config.spectral * spectral_error(predicted, target)
        + config.boundary * boundary_error(predicted, target, at_boundary)
    )


def mixed_loss(
    config: UpsConfig,
    predicted: torch.Tensor,
    target: torch.Tensor,
    parts: Sequence[tuple[int, torch.Tensor]],
    inverse: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of all losses of a batch of several tasks, 0-d.

    Each task is weighted by its share of the examples.

    predicted, target  [B, T, latent width], with the examples of one task after those of the other
    parts              number of examples of each task, and its boundary tokens as for `boundary_error`
    inverse            the two unweighted inverse losses of the whole batch
    """
    none = (torch.zeros_like(inverse[0]), torch.zeros_like(inverse[1]))
    total = config.lambda_enc * inverse[0] + config.lambda_dec * inverse[1]
    first = 0
    for count, at_boundary in parts:
        own = slice(first, first + count)
        share = count / len(predicted)
        total = total + share * ups_loss(config, predicted[own], target[own], at_boundary, none)
        first += count
    return total
