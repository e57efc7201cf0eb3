"""Parts that the pairs of ups share: the training sizes, builders of modules, and the cost of the operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from perfsuite import Cost, floats, module, sampled, tensor
from suite.ups.model import FREQUENCIES, Decoder, Encoder, Operator

BATCH = 24
"""Examples per training batch on one GPU."""
LATENTS = {"T": 128, "L": 128}
"""Number of latent tokens, and their width."""
HEADS = {"heads": 8, "head_width": 48}
LAYERS = 3
"""Number of cross-attention layers in a decoder."""
DEPTH = 12
"""Number of blocks in the operator."""
OPERATOR = {**LATENTS, **HEADS, "B": BATCH, "depth": DEPTH}
LINE = 1024
"""Grid points of advection1d."""
PLANE = 128
"""Grid points of darcy2d along each dimension."""


def operator(L: int, heads: int, head_width: int, depth: int) -> Operator:
    """Build an operator with `depth` blocks."""
    return Operator(L, heads * head_width, depth, heads)


def kept_or_not(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Draw drop-path multipliers for a drop rate of 0.5, each 0 or 2, so that some sublayers are dropped."""
    return 2.0 * torch.randint(2, shape, generator=generator).to(dtype)


def line_encoder(L: int, T: int) -> Encoder:
    """Build an encoder of 1-D fields."""
    return Encoder((T,), 1, L)


def line_decoder(L: int, heads: int, head_width: int, layers: int) -> Decoder:
    """Build a decoder of 1-D fields."""
    return Decoder(1, 1, L, heads * head_width, layers, heads)


def plane_encoder(L: int, rows: int, columns: int) -> Encoder:
    """Build an encoder of 2-D fields."""
    return Encoder((rows, columns), 1, L)


def plane_decoder(L: int, heads: int, head_width: int, layers: int) -> Decoder:
    """Build a decoder of 2-D fields."""
    return Decoder(2, 1, L, heads * head_width, layers, heads)


STEP: Mapping[str, Any] = {
    "operator": module(operator),
    "latents": tensor("B", "T", "L", values=floats(-2, 2)),
    "dt": tensor("B", values=floats(0, 1)),
    "scales": tensor("depth", 2, "B", values=sampled(kept_or_not), differentiable=False),
}
"""Inputs of a pair whose function applies the operator."""


def operator_cost(precision: str = "float32") -> Cost:
    """Return the minimum cost of applying the operator and, in the backward pass, of all its gradients."""

    def parameters(L: int, heads: int, head_width: int, depth: int) -> int:
        """Return the number of entries of the weight matrices."""
        width = heads * head_width
        return depth * 12 * width**2 + 3 * L * width + (1 + 2 * len(FREQUENCIES)) * L

    def traffic(B: int, T: int, L: int, heads: int, head_width: int, depth: int, direction: str) -> float:
        tensors = 4 * (parameters(L, heads, head_width, depth) + B * T * L)
        return tensors + 4 * B * T * L if direction == "forward" else 2 * tensors + 4 * B * T * L

    def arithmetic(B: int, T: int, L: int, heads: int, head_width: int, depth: int, direction: str) -> float:
        width = heads * head_width
        products = B * T * (depth * 12 * width**2 + 2 * L * width) + 2 * depth * B * T * T * width
        return {"forward": 2, "backward": 4, "both": 6}[direction] * products

    return Cost(bytes=traffic, flops=arithmetic, precision=precision)
