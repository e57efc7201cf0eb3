"""The network of leak_cnn: parameter names and shapes, initial weights, and the parts of the forward pass.

Weights are a plain mapping, name → tensor, as in a checkpoint. Their shapes determine the number of channels and the
width of the hidden layer. A change of the layers also changes the network of `reference.trainers.leak_cnn`, which is
implemented there on its own, and the operation counts in `suite.leak_cnn.costs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from suite.leak_cnn.classes import CLASSES

CHANNELS = (32, 64, 128)
"""Output channels of the three convolutions."""
POOLED_ROWS = 16
"""Rows after the adaptive pooling. A segment of 32 mels has 8 rows before it, so each row appears twice, as in the
source."""
HIDDEN = 256
"""Width of the hidden fully connected layer."""
DROPOUT = 0.25

Weights = Mapping[str, torch.Tensor]
Activation = Callable[[torch.Tensor], torch.Tensor]


def shapes(
    channels: tuple[int, int, int] = CHANNELS, hidden: int = HIDDEN, classes: int = len(CLASSES)
) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the 12 tensors, in forward order. By default, they have 618,758 elements in total."""
    first, second, third = channels
    weights: dict[str, tuple[int, ...]] = {
        "conv1": (first, 1, 3, 3),
        "conv2": (second, first, 3, 3),
        "conv3": (third, second, 3, 3),
        "hidden": (hidden, POOLED_ROWS * third),
        "classes": (classes, hidden),
        "leak": (1, hidden),
    }
    named: dict[str, tuple[int, ...]] = {}
    for name, shape in weights.items():
        named |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return named


def make_weights(seed: int, channels: tuple[int, int, int] = CHANNELS, hidden: int = HIDDEN) -> dict[str, torch.Tensor]:
    """Draw the initial weights, name → float32 tensor on the CPU, uniform in ±1/√fan_in as in `torch.nn`."""
    generator = torch.Generator().manual_seed(seed)
    all_shapes = shapes(channels, hidden)
    weights = {}
    for name, shape in all_shapes.items():
        layer = name.partition(".")[0]
        bound = 1 / math.sqrt(math.prod(all_shapes[f"{layer}.weight"][1:]))
        weights[name] = (2 * torch.rand(shape, generator=generator) - 1) * bound
    return weights


def convolution(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply a 3×3 convolution with padding 1: [N, C, H, 1] → [N, C', H, 1]."""
    return functional.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)


def pool(x: torch.Tensor) -> torch.Tensor:
    """Apply max pooling over pairs of rows: [N, C, H, 1] → [N, C, H // 2, 1]."""
    return functional.max_pool2d(x, (2, 1))


def features(weights: Weights, segments: torch.Tensor, activation: Activation = functional.relu) -> torch.Tensor:
    """Apply the convolutional layers: segments [N, 1, H, 1] with H ≥ 4 → [N, C, H // 4, 1]."""
    x = activation(convolution(weights, "conv1", segments))
    x = pool(activation(convolution(weights, "conv2", x)))
    return pool(activation(convolution(weights, "conv3", x)))


def head(
    weights: Weights, x: torch.Tensor, keep: torch.Tensor | None = None, activation: Activation = functional.relu
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute class logits [N, 5] and leak logits [N] from the output of `features`, [N, C, rows, 1].

    keep  [N, 16 C]: dropout factors, each 0 or 1 / (1 - p); None drops nothing
    """
    x = functional.adaptive_avg_pool2d(x, (POOLED_ROWS, 1)).flatten(1)
    if keep is not None:
        x = x * keep
    x = activation(functional.linear(x, weights["hidden.weight"], weights["hidden.bias"]))
    class_logits = functional.linear(x, weights["classes.weight"], weights["classes.bias"])
    leak_logits = functional.linear(x, weights["leak.weight"], weights["leak.bias"])
    return class_logits, leak_logits.squeeze(1)


def forward(
    weights: Weights, segments: torch.Tensor, keep: torch.Tensor | None = None, activation: Activation = functional.relu
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the network: segments [N, 1, H, 1] → (class logits [N, 5], leak logits [N]); `keep` as for `head`."""
    return head(weights, features(weights, segments, activation), keep, activation)
