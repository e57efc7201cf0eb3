"""The network with cuDNN's algorithms timed and chosen (leak_cnn, technique 001.3)."""

import torch

from suite.backends import cudnn_benchmark
from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss, with_gradients


def cudnn_autotune(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch, 0-d, and its gradient by each weight; cuDNN times its algorithms once a shape.

    The setting is torch's own and global: it holds for the forward and the backward, and is put back; what was found
    is kept. The source claims 5–10%, after 1–2 s more at the first call. On a CPU it changes nothing.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.3.
    """
    with cudnn_benchmark(on=True):
        return with_gradients(training_loss, weights, segments, labels, class_weights)
