"""What the pairs of ups share: the sizes of training, and modules of any size."""

from __future__ import annotations

from suite.ups.model import Decoder, Encoder, Operator

BATCH = 24
"""Examples of a training batch on one GPU."""
LATENTS = {"T": 128, "L": 128}
"""Latent tokens and their width."""
HEADS = {"heads": 8, "head_width": 48}
LAYERS = 3
"""Cross-attention layers of a decoder."""
DEPTH = 12
LINE = 1024
"""Points of advection1d's grid."""
PLANE = 128
"""Points of darcy2d's grid along each dimension."""


def operator(L: int, heads: int, head_width: int, depth: int) -> Operator:
    """Build an operator with this many blocks."""
    return Operator(L, heads * head_width, depth, heads)


def line_encoder(L: int, T: int) -> Encoder:
    """Build an encoder of fields on a line."""
    return Encoder((T,), 1, L)


def line_decoder(L: int, heads: int, head_width: int, layers: int) -> Decoder:
    """Build a decoder of fields on a line."""
    return Decoder(1, 1, L, heads * head_width, layers, heads)


def plane_encoder(L: int, rows: int, columns: int) -> Encoder:
    """Build an encoder of fields on a plane."""
    return Encoder((rows, columns), 1, L)


def plane_decoder(L: int, heads: int, head_width: int, layers: int) -> Decoder:
    """Build a decoder of fields on a plane."""
    return Decoder(2, 1, L, heads * head_width, layers, heads)
