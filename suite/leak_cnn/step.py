"""The loss and gradients of a training step of leak_cnn, for techniques that do not change the function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from suite.leak_cnn.loss import leak_cnn_loss
from suite.leak_cnn.model import Activation, Weights, forward

Step = Callable[[Weights, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(weights, segments, labels, class weights) → loss, as `training_loss`."""


def training_loss(
    weights: Weights,
    segments: torch.Tensor,
    labels: torch.Tensor,
    class_weights: torch.Tensor,
    activation: Activation = functional.relu,
) -> torch.Tensor:
    """Return the loss of a batch without dropout, 0-d: segments [N, 1, H, 1], labels int64 [N], class_weights [5]."""
    classes, leak = forward(weights, segments, activation=activation)
    return leak_cnn_loss(classes, leak, labels, class_weights)


def with_gradients(
    step: Step, weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return (loss, name → gradient of the weight). The forward and backward pass run under the same settings."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    with torch.enable_grad():
        loss = step(leaves, segments, labels, class_weights)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), dict(zip(leaves, gradients, strict=True))
