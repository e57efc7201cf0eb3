"""4-bit weights, NF4 (Dettmers et al., 2023, QLoRA): 16 values, and a factor for each block of 64 weights."""

from __future__ import annotations

import functools

import torch

BLOCK = 64
"""Weights of a row that share a factor, their largest absolute value."""
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
"""Quantiles of a normal distribution, scaled to [−1, 1]: the float32 values of bitsandbytes."""


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each weight to the nearest of its block's 16 values.

    weight  [outputs, inputs], with a multiple of 64 inputs

    Returns codes, uint8 [outputs, inputs / 2], with the first of two weights in the upper four bits, and absmax,
    float32 [outputs, inputs / 64]. A block of zeros has absmax 0.

    ValueError if the number of inputs is no multiple of 64.
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
    """Return the weight [outputs, inputs] of these codes and factors, as `quantised` returns them, in absmax's
    dtype."""
    each = torch.stack((codes >> 4, codes & 15), 2).view(*absmax.shape, BLOCK).long()
    return (values_in(absmax.dtype, absmax.device)[each] * absmax[:, :, None]).flatten(1)


@functools.cache
def values_in(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the 16 values. They are kept, since a CUDA graph cannot record their copy from the host."""
    return torch.tensor(NF4, dtype=dtype, device=device)
