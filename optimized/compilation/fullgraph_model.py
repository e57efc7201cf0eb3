"""Networks compiled as one graph without breaks (leak_cnn, technique 001.5; ups, technique 002.1a)."""

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
    """Return the loss of a batch, 0-d; compiled without graph breaks at the first call for each shape.

    On CUDA, the launches are replayed as CUDA graphs, as with `mode="reduce-overhead"`. The next call overwrites the
    graph's own memory, so the loss is returned as a copy; the gradients are in that memory until then. If compilation
    fails, one warning says why, and the network runs eagerly.

    The source claims 3–8% over torch.compile without `fullgraph`, at the cost of 5–10 s more in the first call. For a
    network without graph breaks, the two are the same.

    weights        name → tensor, with the shapes of `suite.leak_cnn.model.shapes`
    segments       [N, 1, H, 1]
    labels         [N] int64
    class_weights  [5]

    Source: leak_cnn, technique 001.5.
    """
    # Each new stride pattern would be compiled again.
    batch = (segments.contiguous(), labels.contiguous(), class_weights.contiguous())
    # A dispatch mode runs Python code for each operation, which would be a graph break.
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
    """Return the latents one time step later, [B, T, L]; on CUDA compiled at the first call for each shape and depth.

    Operators of the same sizes share the compiled code. The launches are replayed as CUDA graphs. The result is a copy;
    the gradients are in the graph's own memory until the next call. If compilation fails, one warning says why, and the
    operator runs eagerly. On a CPU it always runs eagerly, because there are no launches to save and each shape needs
    up to a minute to compile. The source claims 1.36× over an eager operator, together with NCCL settings.

    operator  of any depth, for latents L wide
    latents   [B, T, L]
    dt        [B]
    scales    [depth, 2, B], drop-path multipliers of the sublayers
    step      function to compile, with the same first four arguments; None: `step_operator`
    graphs    whether to replay launches as CUDA graphs

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
    """Apply the operator eagerly; `fullgraph_operator` compiles this function."""
    stepped: torch.Tensor = operator(latents, dt, scales)
    return stepped


def fullgraph_coder(coder: torch.nn.Module, values: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Call an encoder on fields, or a decoder on latents, at these points; on CUDA compiled for each shape.

    The launches are not replayed as CUDA graphs. Otherwise it behaves as `fullgraph_operator`.

    coder   `suite.ups.model.Encoder` or `Decoder`
    values  [B, *grid, C] for an encoder, [B, T, L] for a decoder
    points  [*grid, d] for an encoder, [Q, d] for a decoder

    Source: ups, technique 002.1a.
    """
    if _get_current_dispatch_mode() is not None or not values.is_cuda:
        return call_coder(coder, values, points)
    return _compiled(call_coder, False)(coder, values, points)


def call_coder(coder: torch.nn.Module, values: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Call the encoder or decoder eagerly; `fullgraph_coder` compiles this function."""
    coded: torch.Tensor = coder(values, points)
    return coded


@functools.cache
def _compiled(function: Callable[..., torch.Tensor], graphs: bool) -> Callable[..., torch.Tensor]:
    options = {"triton.cudagraphs": True} if graphs else None
    return compile_if_possible(
        function, "fullgraph_model", quiet_calls=True, fullgraph=True, dynamic=False, options=options
    )
