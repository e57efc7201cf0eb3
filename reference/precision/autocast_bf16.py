"""The network in the precision of its weights (leak_cnn, technique 001.F2; ups, technique 002.6)."""

from collections.abc import Callable

import torch

from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss, with_gradients


def autocast_bf16(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """The loss of a batch, 0-d, in the dtype of the weights.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.F2.
    """
    return training_loss(weights, segments, labels, class_weights)


Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def sgd_step(weights: Weights, lr: float = 0.1) -> Step:
    """Build `step(segments, labels, class_weights)`: a step of SGD in the precision of the weights.

    A step changes the weights in place and returns the loss, 0-d, and the gradient by each weight.

    The source's own "before" is float16 with a gradient scaler. It cannot be the reference of a step in bfloat16: the
    budget comes from the reference's error on inputs in bfloat16, and there a reference under autocast to float16 still
    multiplies in float16, with an eighth of the rounding error. It is a rival of the pair instead.

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
