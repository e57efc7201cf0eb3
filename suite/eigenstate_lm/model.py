"""The network of eigenstate_lm: its shapes, its initial weights, and its forward pass over consecutive tokens.

A block mixes along time with cells of eigenstates, which are diagonal complex recurrences, and along the width with two
linear layers. Weights are a plain mapping, name → tensor, as in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

SMALLEST, RANGE = 0.1, 0.89
"""Lower bound of |λ|, and the width of its range: |λ| is between 0.1 and 0.99."""
TURN = 0.01
"""Frobenius norm of the difference between the rotation of the states and the identity."""
EXPANSION = 4
VOCABULARY = 50257

Weights = Mapping[str, torch.Tensor]
Scan = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Project = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Drop = Callable[[torch.Tensor], torch.Tensor]
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a network. The defaults are those of the source's small network."""

    vocabulary: int = VOCABULARY
    width: int = 1024
    layers: int = 8
    eigenstates: int = 128
    """Eigenstates of a cell."""
    cells: int = 2
    """Cells of a block."""


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return name → shape, in forward order. The head is the embedding. There are 123,104,256 parameters by default."""
    D, K, C = sizes.width, sizes.eigenstates, sizes.cells
    found: dict[str, tuple[int, ...]] = {"embedding": (sizes.vocabulary, D)}
    for layer in range(sizes.layers):
        block: dict[str, tuple[int, ...]] = {
            "drive": (C, K, D),
            "decay": (C, K),
            "rotation": (C, K, K),
            "out": (C, D, K),
            "norm1": (D,),
            "norm1.bias": (D,),
            "expand": (EXPANSION * D, D),
            "expand.bias": (EXPANSION * D,),
            "contract": (D, EXPANSION * D),
            "contract.bias": (D,),
            "norm2": (D,),
            "norm2.bias": (D,),
        }
        found |= {f"{layer}.{name}": shape for name, shape in block.items()}
    return found


def parameters(sizes: Sizes) -> int:
    """Return the number of parameters."""
    return sum(math.prod(shape) for shape in shapes(sizes).values())


def make_weights(seed: int, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Return name → float32 tensor on the CPU.

    Linear layers are normal with standard deviation 1/√(inputs), the embedding with 0.02, and M of `rotation` with 1.
    α is uniform within (−3, 0), so that |λ| is at most 0.545 at first. Choices that the source leaves open are those of
    most language models.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(sizes).items():
        kind = name.rpartition(".")[2] if not name.endswith(".bias") else "bias"
        if kind in ("norm1", "norm2"):
            weights[name] = torch.ones(shape)
        elif kind == "bias":
            weights[name] = torch.zeros(shape)
        elif kind == "decay":
            weights[name] = -3 * torch.rand(shape, generator=generator)
        else:
            scale = {"embedding": 0.02, "rotation": 1.0}.get(kind, 1 / math.sqrt(shape[-1]))
            weights[name] = scale * torch.randn(shape, generator=generator)
    return weights


def eigenvalues(decay: torch.Tensor) -> torch.Tensor:
    """Compute λ [cells, K, 2], (real, imaginary), from α [cells, K]. Eigenstate k rotates by 2πk/K per token."""
    count = decay.shape[-1]
    phase = torch.arange(count, dtype=decay.dtype, device=decay.device) * (2 * math.pi / count)
    magnitude = SMALLEST + RANGE * decay.sigmoid()
    return torch.stack((magnitude * phase.cos(), magnitude * phase.sin()), -1)


def rotation(mixing: torch.Tensor) -> torch.Tensor:
    """Compute R = I + 0.01 M / ‖M‖ from M [cells, K, K], with the Frobenius norm of each cell's matrix."""
    norm = torch.linalg.matrix_norm(mixing, keepdim=True)
    identity = torch.eye(mixing.shape[-1], dtype=mixing.dtype, device=mixing.device)
    turned: torch.Tensor = identity + TURN * mixing / norm
    return turned


def first_states(sizes: Sizes, batch: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the states before the first token: zeros, float32 [layers, batch, cells · K, 2]."""
    return torch.zeros(sizes.layers, batch, sizes.cells * sizes.eigenstates, 2, device=device)


def forward(
    weights: Weights,
    tokens: torch.Tensor,
    states: torch.Tensor,
    scan: Scan,
    project: Project,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (the head's input [B, T, D], the states after the tokens) from tokens, int64 [B, T].

    states   the states before the tokens, in the shape of `first_states`, as are those after them
    scan     `reference.recurrence.eigenstate_scan`, or an equivalent function
    project  `reference.recurrence.fused_output_projection`, or an equivalent function
    """
    x = functional.embedding(tokens, weights["embedding"])
    after = []
    for layer, state in enumerate(states):
        own = block_weights(weights, layer)
        real, state = scan(driven(own, x), scanned_by(own), state)
        x = fed(own, mixed(own, x, real, project, undropped), undropped)
        after.append(state)
    return x, torch.stack(after) if after else states


def undropped(x: torch.Tensor) -> torch.Tensor:
    """Return x unchanged, as a `Drop` that drops nothing."""
    return x


_BLOCK = [name.partition(".")[2] for name in shapes(Sizes(layers=1)) if name.startswith("0.")]


def block_weights(weights: Weights, layer: int) -> Weights:
    """Return a block's weights, by their names within the block."""
    return {name: weights[f"{layer}.{name}"] for name in _BLOCK}


def driven(own: Weights, x: torch.Tensor) -> torch.Tensor:
    """Compute the scan's input β for all cells of a block, which are scanned together, [B, T, cells · K]."""
    return functional.linear(x, own["drive"].flatten(0, 1))


def scanned_by(own: Weights) -> torch.Tensor:
    """Compute λ of all cells of a block, [cells · K, 2]."""
    return eigenvalues(own["decay"]).flatten(0, 1)


def mixed(own: Weights, x: torch.Tensor, real: torch.Tensor, project: Project, drop: Drop) -> torch.Tensor:
    """Compute a block's first half, [B, T, D]: the layer norm of x plus the mean of the cells' projected states.

    real  [B, T, cells · K], the real parts of the scanned states
    """
    cells, count = own["decay"].shape
    turned = rotation(own["rotation"])
    parts = [drop(project(part, turned[cell], own["out"][cell])) for cell, part in enumerate(real.split(count, dim=-1))]
    return _norm(own, "norm1", x + drop(torch.stack(parts).mean(0) if cells > 1 else parts[0]))


def fed(own: Weights, x: torch.Tensor, drop: Drop, linear: Linear = functional.linear) -> torch.Tensor:
    """Compute a block's second half, [B, T, D]: the layer norm of x plus the output of the two linear layers."""
    wide = functional.gelu(linear(x, own["expand"], own["expand.bias"]), approximate="tanh")
    return _norm(own, "norm2", x + drop(linear(wide, own["contract"], own["contract.bias"])))


def _norm(own: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], own[name], own[f"{name}.bias"])
