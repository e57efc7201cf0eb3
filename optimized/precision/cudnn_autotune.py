"""The network with cuDNN algorithms chosen by timing (leak_cnn, technique 001.3)."""

from contextlib import AbstractContextManager

import torch

from suite.backends import cudnn_benchmark
from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss, with_gradients


def cudnn_autotune(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of a batch, 0-d, and the gradient of each weight; cuDNN times its algorithms once per shape.

    The setting, torch.backends.cudnn.benchmark, is global. It applies to the forward and backward pass and is restored
    afterwards; the chosen algorithms are kept. The source claims 5–10%, after 1–2 s more in the first call. On a CPU
    the setting has no effect.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.3.
    """
    with algorithms():
        return with_gradients(training_loss, weights, segments, labels, class_weights)


def algorithms() -> AbstractContextManager[None]:
    """Return a context in which cuDNN chooses algorithms by timing them once for each shape."""
    return cudnn_benchmark(on=True)
