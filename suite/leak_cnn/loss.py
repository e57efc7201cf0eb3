"""The loss of leak_cnn, and the weights of its classes."""

from __future__ import annotations

import torch
from torch.nn import functional

from suite.leak_cnn.classes import LEAK

LEAK_WEIGHT = 0.5
"""Weight of the binary cross-entropy on the leak logit."""


def class_weights(counts: torch.Tensor) -> torch.Tensor:
    """Return inverse frequencies with mean 1, float32 [classes], from integer counts [classes].

    The mean is over the classes with segments. A class without segments has weight 1.
    """
    present = counts > 0
    inverse = torch.where(present, 1.0 / counts.clamp(min=1).double(), 0.0)
    mean = inverse.sum() / present.sum().clamp(min=1)
    return torch.where(present, inverse / mean, 1.0).float()


def leak_cnn_loss(
    classes: torch.Tensor, leak: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the weighted cross-entropy of the classes plus half the binary cross-entropy of LEAK; a 0-d tensor.

    classes  [N, classes] logits
    leak     [N] logit
    labels   [N] int64
    weights  [classes]: the cross-entropy is the weighted mean over the segments
    """
    is_leak = (labels == LEAK).to(leak.dtype)
    binary = functional.binary_cross_entropy_with_logits(leak, is_leak)
    return functional.cross_entropy(classes, labels, weight=weights) + LEAK_WEIGHT * binary
