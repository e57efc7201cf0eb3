"""The loss of leak_cnn, and its class weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from suite.leak_cnn.classes import LEAK

LEAK_WEIGHT = 0.5
"""Weight of the binary cross-entropy of the leak logit."""


def class_weights(counts: torch.Tensor) -> torch.Tensor:
    """Return the inverse class frequencies, scaled to a mean of 1, float32 [classes].

    The mean is over the classes that have segments. A class without segments gets weight 1.

    counts  integer [classes]: number of segments of each class
    """
    present = counts > 0
    inverse = torch.where(present, 1.0 / counts.clamp(min=1).double(), 0.0)
    mean = inverse.sum() / present.sum().clamp(min=1)
    return torch.where(present, inverse / mean, 1.0).float()


def leak_cnn_loss(
    classes: torch.Tensor, leak: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted cross-entropy of the classes plus half the binary cross-entropy of LEAK, 0-d.

    classes  [N, classes] logits
    leak     [N] logits
    labels   int64 [N]
    weights  [classes]: class weights of the cross-entropy, which is a weighted mean over the segments
    """
    is_leak = (labels == LEAK).to(leak.dtype)
    binary = functional.binary_cross_entropy_with_logits(leak, is_leak)
    return functional.cross_entropy(classes, labels, weight=weights) + LEAK_WEIGHT * binary
