"""The frozen weights and the initial field of trainer2, which both trainers share."""

from __future__ import annotations

import math

import torch

from suite.trainer2.config import FIELD_CHANNELS, TrainConfig

LINEARS = {"qkv": (3, 1), "project": (1, 1), "expand": (4, 1), "contract": (1, 4)}
"""Linear layers of a block: name → (outputs, inputs) in multiples of the width."""


def make_weights(config: TrainConfig, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return name → float32 tensor on the CPU, drawn from `config.seed`. The weights are never trained.

    They are `embedding` [V, D] and `condition` [D, 256]; for block i `i.qkv` [3D, D], `i.project` [D, D], `i.expand`
    [4D, D] and `i.contract` [D, 4D], each with a bias ("i.expand.bias"), and the scales and shifts of two layer norms
    ("i.norm1", "i.norm1.bias"); last `norm` and `norm.bias`. With D = 256 and six blocks they have about 5 M parameters
    without the embedding.
    """
    generator = torch.Generator().manual_seed(config.seed)
    D = config.width

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    channels = FIELD_CHANNELS[0] * FIELD_CHANNELS[1]
    weights = {
        "embedding": torch.randn(vocabulary, D, generator=generator),
        "condition": normal(D, channels),
    }
    for block in range(config.blocks):
        for name, (rows, columns) in LINEARS.items():
            weights[f"{block}.{name}"] = normal(rows * D, columns * D)
            weights[f"{block}.{name}.bias"] = 0.1 * torch.randn(rows * D, generator=generator)
        for norm in ("norm1", "norm2"):
            weights[f"{block}.{norm}"] = torch.ones(D)
            weights[f"{block}.{norm}.bias"] = torch.zeros(D)
    weights["norm"] = torch.ones(D)
    weights["norm.bias"] = torch.zeros(D)
    return weights


def make_field(config: TrainConfig) -> torch.Tensor:
    """Return the initial field, complex64 [lattice, lattice, 16, 16] on the CPU, drawn from `config.seed`."""
    generator = torch.Generator().manual_seed(config.seed + 1)
    shape = (config.lattice, config.lattice, *FIELD_CHANNELS)
    return torch.complex(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)) / 2
