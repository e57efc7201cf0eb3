"""Low-rank adapters for frozen layers whose weights are stored in 4 bits (QLoRA)."""

from __future__ import annotations

import torch
from torch import nn

from suite.polychromic.lora import LoRALinear
from suite.polychromic.nf4 import dequantised, quantised


class NF4LoRALinear(LoRALinear):
    """A frozen linear layer in NF4 with an adapter: 4.5 bits per weight instead of 16 or 32.

    codes   uint8 [outputs, inputs / 2]
    absmax  float32 [outputs, inputs / 64]

    Both come from `suite.polychromic.nf4.quantised`. Each product dequantises the weight to its original dtype.
    ValueError if the number of inputs is not a multiple of 64.
    """

    def freeze(self, weight: torch.Tensor) -> None:
        codes, absmax = quantised(weight.detach())
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.absmax = nn.Parameter(absmax, requires_grad=False)
        self.dtype = weight.dtype

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # a parameter of a plain layer
        """The dequantised weight [outputs, inputs], computed in float32 or the wider dtype and rounded once."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return dequantised(self.codes, self.absmax.to(wide)).to(self.dtype)
