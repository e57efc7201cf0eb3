"""A network that keeps every activation for the backward pass (leak_cnn, technique 001.F3; ups, technique 002.2)."""

import torch

from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss
from suite.ups.model import Operator


def activation_checkpoint(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the loss of a batch, 0-d.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.F3.
    """
    return training_loss(weights, segments, labels, class_weights)


def activation_checkpoint_operator(
    operator: Operator, latents: torch.Tensor, dt: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Step latents in time with the operator, [B, T, L].

    operator  the model, of any depth; L is the width of its latents
    latents   [B, T, L]
    dt        [B]
    scales    [depth, 2, B], drop-path multipliers of the sublayers

    Source: ups, technique 002.2.
    """
    stepped: torch.Tensor = operator(latents, dt, scales)
    return stepped
