"""A frozen layer of 4-bit weights with a low-rank adapter, operation by operation (polychromic, technique 003.6)."""

import torch

from reference.generation.fused_lora import fused_lora
from suite.polychromic.nf4 import BLOCK, NF4


def fused_lora_nf4(
    x: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    kept: torch.Tensor | None = None,
    keep: float = 1.0,
) -> torch.Tensor:
    """`fused_lora` with a weight in NF4, which is dequantised as a whole to x's dtype.

    codes   uint8 [outputs, inputs / 2]; each byte has two weights, the first in the upper four bits
    absmax  [outputs, inputs / 64], the factor of each block of 64 weights

    The other arguments are those of `fused_lora`; x has any leading dimensions. Inputs are a multiple of 64.

    Source: polychromic, technique 003.6.
    """
    each = torch.stack((codes >> 4, codes & 15), 2).flatten(1).long()
    values = torch.tensor(NF4, dtype=absmax.dtype, device=absmax.device)[each]
    weight = values * absmax.repeat_interleave(BLOCK, 1)
    return fused_lora(x, weight.to(x.dtype), a, b, scale, kept, keep)
