"""The losses of ups that need no decoder, the inputs of the inverse losses, and the sum of all losses.

loss = MSE(ẑ₁, z₁) + λ_enc · MSE(D(z)(x_q), u(x_q)) + λ_dec · MSE(E(D(z)), stop(z)) + spectral and boundary errors,
each with its weight. The first and the last two terms compare the operator's latents. The inverse losses depend only on
cached latents z, the encoder and the decoder, so none of their gradients reaches the operator. z is z₀ or z₁ of each
example, drawn at random: the decoder must know the latents that the operator predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from suite.ups.config import UpsConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class InverseTask:
    """A task's part of a batch, for the inverse losses."""

    encode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Encoder with the signature of `suite.ups.model.Encoder`."""
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Decoder with the signature of `suite.ups.model.Decoder`."""
    latents: torch.Tensor
    """[B, T, latent width], cached."""
    field: torch.Tensor
    """[B, *grid, C], the fields that the latents were encoded from."""
    points: torch.Tensor
    """[*grid, d], the coordinates of the field."""
    queries: torch.Tensor
    """[Q] int64, indices into the flattened grid."""


def query_indices(points: int, queries: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw `queries` distinct indices below `points`, int64 [queries]; all in order if there are no more points."""
    if points <= queries:
        return torch.arange(points)
    return torch.randperm(points, generator=generator)[:queries]


def spectral_error(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of the amplitudes of the latents' Fourier series along the tokens, 0-d.

    The series is orthonormal. With PyTorch's default scale this term outweighs the error of the latents, and a mean of
    the wrong sign is then a minimum that training does not leave (docs/trainers/ups.md).

    predicted, target  [B, T, latent width]
    """
    series = (torch.view_as_real(torch.fft.rfft(z, dim=1, norm="ortho")) for z in (predicted, target))
    # Not abs(), whose kernel for complex numbers is compiled at run time and kept in a cache that processes share.
    found, wanted = (torch.linalg.vector_norm(z, dim=-1) for z in series)
    return functional.mse_loss(found, wanted)


def boundary_tokens(tokens: Sequence[int]) -> torch.Tensor:
    """Return the mask of the tokens at the boundary of their grid, bool [T].

    tokens  number of tokens along each dimension, e.g. (128,) or (16, 8)
    """
    at_boundary = torch.zeros(tuple(tokens), dtype=torch.bool)
    for axis, count in enumerate(tokens):
        at_boundary.index_fill_(axis, torch.tensor([0, count - 1]), True)
    return at_boundary.flatten()


def boundary_error(predicted: torch.Tensor, target: torch.Tensor, at_boundary: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of the tokens at the boundary, 0-d.

    The source does not define the term. It is computed on the latent tokens, since the operator has no field.

    predicted, target  [B, T, latent width]
    at_boundary        [T] bool, as returned by `boundary_tokens`, or the int64 indices of its true entries
    """
    return functional.mse_loss(predicted[:, at_boundary], target[:, at_boundary])


def ups_loss(
    config: UpsConfig,
    predicted: torch.Tensor,
    target: torch.Tensor,
    at_boundary: torch.Tensor,
    inverse: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Sum all losses of a batch with their weights, 0-d.

    predicted, target  [B, T, latent width], the latents after the step
    inverse            the two terms of `inverse_losses`
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
    """Sum all losses of a batch of several tasks, 0-d; each task is weighted by its share of the examples.

    predicted, target  [B, T, latent width], task after task
    parts              number of examples of each task, and its tokens at the boundary as for `boundary_error`
    inverse            the two terms of `inverse_losses`, of the whole batch
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
