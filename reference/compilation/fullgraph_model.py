"""Networks run eagerly, one operation at a time (leak_cnn, technique 001.5; ups, technique 002.1a)."""

import torch

from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss
from suite.ups.model import Operator


def fullgraph_model(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """Return the loss of a batch, 0-d, computed eagerly.

    weights        name → tensor, with the shapes of `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.5.
    """
    return training_loss(weights, segments, labels, class_weights)


def fullgraph_operator(
    operator: Operator, latents: torch.Tensor, dt: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Return the latents one time step later, [B, T, L], computed eagerly.

    operator  of any depth, for latents L wide
    latents   [B, T, L]
    dt        [B]
    scales    [depth, 2, B], drop-path multipliers of the sublayers

    Source: ups, technique 002.1a.
    """
    stepped: torch.Tensor = operator(latents, dt, scales)
    return stepped


def fullgraph_coder(coder: torch.nn.Module, values: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Call an encoder on fields, or a decoder on latents, at these points, eagerly.

    coder   `suite.ups.model.Encoder` or `Decoder`
    values  [B, *grid, C] for an encoder, [B, T, L] for a decoder
    points  [*grid, d] for an encoder, [Q, d] for a decoder

    Source: ups, technique 002.1a.
    """
    coded: torch.Tensor = coder(values, points)
    return coded
