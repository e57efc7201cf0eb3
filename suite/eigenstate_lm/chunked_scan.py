"""The recurrence of eigenstate_lm, computed by chunks of time with plain PyTorch operations, in any precision.

The reference scans token by token, so a training step on sequences of 32,768 tokens takes a minute. The tests compare
this form with the reference at small sizes, and it replaces the reference where the trainers are compared at that
length. It shares no code with the optimized scan, which it helps to check.
"""

import itertools

import torch
from torch.nn import functional

LENGTH = 64
"""Tokens of a chunk."""


def chunked_scan(
    beta: torch.Tensor, eigenvalues: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as `reference.recurrence.eigenstate_scan`, from the same arguments.

    Within a chunk, `c_t = Σ λ^(t−s) β_s + λ^(t+1) c` is a matrix product, where c is the state before the chunk.
    """
    if not beta.shape[1]:
        return torch.empty_like(beta), state.clone()
    drive = beta.to(state.dtype)
    chunks = functional.pad(drive, (0, 0, 0, -drive.shape[1] % LENGTH)).unflatten(1, (-1, LENGTH))
    # Powers are computed in float64, because their rounding error grows with the exponent.
    each = torch.complex(*eigenvalues.to(state.dtype).double().unbind(-1))
    exact = itertools.accumulate([torch.ones_like(each)] + LENGTH * [each], torch.mul)
    powers = torch.stack(list(exact), 1).to(state.dtype.to_complex())
    steps = torch.arange(LENGTH, device=beta.device)
    ages = steps[:, None] - steps
    kernel = torch.where(ages >= 0, powers[:, ages.clamp(min=0)], 0)
    every = torch.einsum("kts,bnsk->bntk", kernel, chunks.to(kernel.dtype))
    before, c = [], torch.complex(*state.unbind(-1))
    for last in every[:, :, -1].unbind(1):
        before.append(c)
        c = powers[:, LENGTH] * c + last
    every = (every + powers[:, 1:].T * torch.stack(before, 1)[:, :, None]).flatten(1, 2)[:, : drive.shape[1]]
    final = every[:, -1]
    return every.real.to(beta.dtype).contiguous(), torch.stack((final.real, final.imag), -1)
