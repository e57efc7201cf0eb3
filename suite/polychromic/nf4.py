"""NF4, a 4-bit weight format (Dettmers et al., 2023, QLoRA): 16 values, and a scale for each block of 64 weights."""

from __future__ import annotations

import functools

import torch

BLOCK = 64
"""Consecutive weights of a row that share a scale, which is their largest absolute value."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, scaled to [−1, 1]. These are the float32 values of bitsandbytes."""


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, absmax): each weight rounded to the nearest of the 16 values, scaled by its block's absmax.

    weight  [outputs, inputs]
    codes   uint8 [outputs, inputs / 2]; the upper four bits hold the first weight of each pair
    absmax  float32 [outputs, inputs / 64]; 0 for a block of zeros

    ValueError if the number of inputs is not a multiple of 64.
    """
    outputs, inputs = weight.shape
    if inputs % BLOCK:
        raise ValueError(f"{inputs} inputs: NF4 takes multiples of {BLOCK}")
    blocks = weight.float().view(outputs, inputs // BLOCK, BLOCK)
    absmax = blocks.abs().amax(2)
    values = torch.tensor(NF4, device=weight.device)
    scaled = blocks / absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]
    codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2).to(torch.uint8).view(outputs, inputs)
    return codes[:, ::2] << 4 | codes[:, 1::2], absmax


def dequantised(codes: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Return the weight [outputs, inputs], in absmax's dtype, from the codes and absmax of `quantised`."""
    each = torch.stack((codes >> 4, codes & 15), 2).view(*absmax.shape, BLOCK).long()
    return (values_in(absmax.dtype, absmax.device)[each] * absmax[:, :, None]).flatten(1)


@functools.cache
def values_in(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the 16 values. They are cached, because a CUDA graph cannot capture their copy from the host."""
    return torch.tensor(NF4, dtype=dtype, device=device)
