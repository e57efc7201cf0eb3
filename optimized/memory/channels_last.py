"""The network in channels-last layout (leak_cnn, technique 001.9)."""

import torch

from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss


def channels_last(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the loss of a batch, 0-d, with segments and convolution weights in channels-last layout.

    cuDNN's tensor core kernels read this layout. A trainer keeps its weights in it; here each call converts 0.4 MB of
    weights. The source claims 20–30% of the convolutions' time, together with TF32 and autocast.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.9.
    """
    return training_loss(laid_out(weights), with_channels_last(segments), labels, class_weights)


def laid_out(weights: Weights) -> dict[str, torch.Tensor]:
    """Return the weights with those of the convolutions in channels-last layout."""
    return {
        name: weight.contiguous(memory_format=torch.channels_last) if weight.dim() == 4 else weight
        for name, weight in weights.items()
    }


def with_channels_last(segments: torch.Tensor) -> torch.Tensor:
    """Return segments [N, 1, H, 1] with strides that make the result of the first convolution channels-last.

    With one channel, the memory order of both layouts is the same. torch distinguishes them by the stride of the
    channel, which is 1 here.
    """
    segments = segments.contiguous()
    return segments.as_strided(segments.shape, (segments.shape[1:].numel(), 1, *segments.stride()[2:]))
