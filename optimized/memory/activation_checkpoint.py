"""A network whose activations are computed again in the backward (leak_cnn 001.F3; ups, technique 002.2)."""

import functools

import torch
from torch.utils.checkpoint import checkpoint

from suite.leak_cnn.loss import leak_cnn_loss
from suite.leak_cnn.model import Weights, features, head
from suite.ups.model import Operator

# Nothing is random in what is called, whose drop-path multipliers are an input: no generator's state need be kept.
checkpointed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""(function, *arguments) → its result, of which only the arguments are kept for the backward."""


def activation_checkpoint(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """The loss of a batch, 0-d; of the three convolutions only what they start from and end in is kept.

    The source claims 30–40% less memory for 10–20% more time.

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
    """Step latents in time by the operator, [B, T, L]; of a sublayer only its inputs are kept for the backward.

    Attention and MLP sublayers are checkpointed apart, so that the backward holds the activations of one of them at a
    time. The source expects 20% more time, and a batch twice as large in the same memory.

    operator  with L wide latents and any depth
    latents   [B, T, L]
    dt        [B]
    scales    [depth, 2, B], drop-path multipliers of the sublayers

    Source: ups, technique 002.2.
    """
    stepped: torch.Tensor = operator(latents, dt, scales, call=checkpointed)
    return stepped
