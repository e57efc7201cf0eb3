"""A network whose activations are recomputed in the backward pass (leak_cnn 001.F3; ups, technique 002.2)."""

import functools

import torch
from torch.utils.checkpoint import checkpoint

from suite.leak_cnn.loss import leak_cnn_loss
from suite.leak_cnn.model import Weights, features, head
from suite.ups.model import Operator

# The checkpointed functions draw no random numbers (drop-path multipliers are inputs), so no RNG state is saved.
checkpointed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""(function, *arguments) → the function's result; only the arguments are saved for the backward pass."""


def activation_checkpoint(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the loss of a batch, 0-d. Of the three convolutions, only the input and the final result are kept.

    The activations between them are recomputed in the backward pass. The source claims 30–40% less memory for 10–20%
    more time.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.F3.
    """
    x = checkpointed(features, weights, segments)
    return leak_cnn_loss(*head(weights, x), labels, class_weights)


def activation_checkpoint_operator(
    operator: Operator, latents: torch.Tensor, dt: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Step latents in time with the operator, [B, T, L]; only each sublayer's inputs are saved for the backward pass.

    Attention and MLP sublayers are checkpointed separately, so the backward pass holds the activations of one sublayer
    at a time. The source expects 20% more time, and a batch twice as large in the same memory.

    operator  the model, of any depth; L is the width of its latents
    latents   [B, T, L]
    dt        [B]
    scales    [depth, 2, B], drop-path multipliers of the sublayers

    Source: ups, technique 002.2.
    """
    stepped: torch.Tensor = operator(latents, dt, scales, call=checkpointed)
    return stepped
