"""The training sizes of leak_cnn, and the minimum cost of the loss of its network and its gradients."""

from __future__ import annotations

from perfsuite import Cost
from suite.leak_cnn.classes import CLASSES
from suite.leak_cnn.features import MELS
from suite.leak_cnn.model import CHANNELS, HIDDEN, POOLED_ROWS

BATCH = 5632
"""Segments per training batch."""
ROWS = 40_000
"""Segments in the training split."""
TRAINING = {"N": BATCH, "H": MELS, "c1": CHANNELS[0], "c2": CHANNELS[1], "c3": CHANNELS[2], "h": HIDDEN}
"""Training sizes for a pair that runs the network. Its inputs are `suite.leak_cnn.trial.INPUTS`."""


def training_cost(precision: str = "float32", *, within: bool = False) -> Cost:
    """Return the minimum cost of the loss and its gradients with respect to the weights. Segments have no gradient.

    precision  precision of the matrix products
    within     whether the call itself includes the backward pass, whatever the direction of the workload
    """

    def traffic(N: int, c1: int, c2: int, c3: int, h: int, direction: str, H: int = MELS) -> float:
        """Count inputs, weights and gradients. Omit activations, because a kernel need not write them to memory."""
        weights = 10 * c1 + (9 * c1 + 1) * c2 + (9 * c2 + 1) * c3 + (POOLED_ROWS * c3 + 1) * h
        weights += (h + 1) * (len(CLASSES) + 1)
        read = 4 * (N * H + weights + len(CLASSES)) + 8 * N
        return read + (4 * weights if within or direction != "forward" else 0)

    def arithmetic(N: int, c1: int, c2: int, c3: int, h: int, direction: str, H: int = MELS) -> float:
        """Count three of the nine taps, because the other six read only padding. Count duplicate pooled rows once."""
        first = N * H * c1 * 3
        forward = first + N * H * c2 * c1 * 3 + N * (H // 2) * c3 * c2 * 3
        forward += N * h * (min(H // 4, POOLED_ROWS) * c3 + len(CLASSES) + 1)
        backward = 2 * forward - first
        both = forward + backward
        return 2 * (both if within else {"forward": forward, "backward": backward, "both": both}[direction])

    return Cost(bytes=traffic, flops=arithmetic, precision=precision)
