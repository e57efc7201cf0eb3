"""The network and its loss as one compiled graph (leak_cnn, technique 001.5)."""

import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from optimized.compilation.compiled_function import compile_if_possible, replay_begins
from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss


def fullgraph_model(
    weights: Weights, segments: torch.Tensor, labels: torch.Tensor, class_weights: torch.Tensor
) -> torch.Tensor:
    """The loss of a batch, 0-d, compiled for each shape at its first call, with no break in the graph.

    On CUDA its launches are replayed as CUDA graphs (what `mode="reduce-overhead"` asks for); the loss is a copy, for
    the next call writes over the graph's own memory. The gradients are in that memory until then. Where nothing can be
    compiled a warning says why, once, and the network runs as it is. The source claims 3–8% beyond torch.compile
    without `fullgraph`, for 5–10 s more at the first call; where there is no break to begin with they are the same.

    weights        name → tensor, `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.5.
    """
    # Of other strides each would be compiled anew.
    batch = (segments.contiguous(), labels.contiguous(), class_weights.contiguous())
    # What watches each operation runs Python of its own at it, which would be taken for a break in the graph.
    if _get_current_dispatch_mode() is not None:
        return training_loss(weights, *batch)
    if not segments.is_cuda:
        return _compiled(False)(weights, *batch)
    replay_begins()
    return _compiled(True)(weights, *batch).clone()


@functools.cache
def _compiled(graphs: bool) -> Callable[..., torch.Tensor]:
    options = {"triton.cudagraphs": True} if graphs else None
    return compile_if_possible(training_loss, "fullgraph_model", fullgraph=True, dynamic=False, options=options)
