"""A network as one compiled graph (leak_cnn, technique 001.5; ups, technique 002.1a)."""

import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from optimized.compilation.compiled_function import compile_if_possible, replay_begins
from suite.leak_cnn.model import Weights
from suite.leak_cnn.step import training_loss
from suite.ups.model import Operator


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
    # Other strides would each be compiled again.
    batch = (segments.contiguous(), labels.contiguous(), class_weights.contiguous())
    # A mode that watches each operation runs Python code for it, which would count as a graph break.
    if _get_current_dispatch_mode() is not None:
        return training_loss(weights, *batch)
    if not segments.is_cuda:
        return _compiled(training_loss, False)(weights, *batch)
    replay_begins()
    return _compiled(training_loss, True)(weights, *batch).clone()


def fullgraph_operator(
    operator: Operator,
    latents: torch.Tensor,
    dt: torch.Tensor,
    scales: torch.Tensor,
    step: Callable[..., torch.Tensor] | None = None,
    graphs: bool = True,
) -> torch.Tensor:
    """Step latents in time by the operator, [B, T, L], on CUDA compiled for each shape and depth at its first call.

    Operators of the same sizes share the compiled code. Its launches are replayed as CUDA graphs; the result is a
    copy, and the gradients are in the graph's own memory until the next call. Where nothing can be compiled a warning
    says why, once, and the operator runs as it is. So it does on a CPU, where there are no launches to save, and where
    each shape takes up to a minute to compile. The source claims 1.36× over an eager operator, together with NCCL
    settings.

    operator  with L wide latents and any depth
    latents   [B, T, L]
    dt        [B]
    scales    [depth, 2, B], drop-path multipliers of the sublayers
    step      what is compiled, with the same first four arguments; None: `step_operator`
    graphs    whether launches are replayed as CUDA graphs

    Source: ups, technique 002.1a.
    """
    if _get_current_dispatch_mode() is not None or not latents.is_cuda:
        return (step or step_operator)(operator, latents, dt, scales)
    compiled = _compiled(step or step_operator, graphs)
    if not graphs:
        return compiled(operator, latents.contiguous(), dt.contiguous(), scales.contiguous())
    replay_begins()
    return compiled(operator, latents.contiguous(), dt.contiguous(), scales.contiguous()).clone()


def step_operator(operator: Operator, latents: torch.Tensor, dt: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The function that is compiled; arguments as `fullgraph_operator`'s."""
    stepped: torch.Tensor = operator(latents, dt, scales)
    return stepped


def fullgraph_coder(coder: torch.nn.Module, values: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Call an encoder on fields, or a decoder on latents, at these points; on CUDA compiled for each shape.

    Its launches are not replayed as CUDA graphs. All else is as with `fullgraph_operator`.

    coder   `suite.ups.model.Encoder` or `Decoder`
    values  [B, *grid, C] of an encoder, [B, T, L] of a decoder
    points  [*grid, d] of an encoder, [Q, d] of a decoder

    Source: ups, technique 002.1a.
    """
    if _get_current_dispatch_mode() is not None or not values.is_cuda:
        return call_coder(coder, values, points)
    return _compiled(call_coder, False)(coder, values, points)


def call_coder(coder: torch.nn.Module, values: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The function that is compiled; arguments as `fullgraph_coder`'s."""
    coded: torch.Tensor = coder(values, points)
    return coded


@functools.cache
def _compiled(function: Callable[..., torch.Tensor], graphs: bool) -> Callable[..., torch.Tensor]:
    options = {"triton.cudagraphs": True} if graphs else None
    return compile_if_possible(
        function, "fullgraph_model", quiet_calls=True, fullgraph=True, dynamic=False, options=options
    )
