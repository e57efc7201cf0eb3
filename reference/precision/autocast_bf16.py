"""The network in the dtype of its weights (leak_cnn, technique 001.F2; ups, technique 002.6)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss, with_gradients


def autocast_bf16(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the loss of a batch, 0-d, in the dtype of the weights.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.F2.
    """
    return training_loss(weights, segments, labels, class_weights)


Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def sgd_step(weights: Weights, lr: float = 0.1) -> Step:
    """Build `step(segments, labels, class_weights)`: a step of SGD in the dtype of the weights.

    A step updates the weights in place and returns the loss, 0-d, and the gradient of each weight.

    The source compares with float16 and a gradient scaler. That cannot be the reference of a bfloat16 step: the error
    budget comes from the reference's error on bfloat16 inputs, and under float16 autocast the reference would still
    multiply in float16, with an eighth of the rounding error. It is a rival of the pair instead.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: ups, technique 002.6.
    """

    def step(
        segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, gradients = with_gradients(training_loss, weights, segments, labels, class_weights)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.sub_(lr * gradients[name])
        return loss, gradients

    return step


def context(device: str) -> AbstractContextManager[object]:
    """Return a context that changes no dtype."""
    return nullcontext()
