"""Cross-entropy of all logits at once (eigenstate_lm, technique 004.11)."""

import torch
from torch.nn import functional


def chunked_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy of `hidden @ weight.T` against the labels, 0-d; labels of −100 are ignored.

    If all labels are ignored, the loss is NaN.

    hidden  [N, D]
    weight  [V, D]
    labels  [N] int64, below V

    Source: eigenstate_lm, technique 004.11.
    """
    return functional.cross_entropy(functional.linear(hidden, weight), labels)
