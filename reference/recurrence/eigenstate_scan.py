"""A diagonal complex recurrence over time, step by step (eigenstate_lm, techniques 004.8 and 004.12)."""

import torch


def eigenstate_scan(
    beta: torch.Tensor, eigenvalues: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `c_t = λ c_{t−1} + β_t` from `c_{−1}`; return (Re c_t of every step [B, T, K], the last c [B, K, 2]).

    The computation runs in the dtype of `state`; the first result is returned in the dtype of `beta`.

    beta         [B, T, K], real
    eigenvalues  [K, 2]: λ as (real, imaginary), |λ| ≤ 1
    state        [B, K, 2]: c_{−1} as (real, imaginary)

    Source: eigenstate_lm, techniques 004.8 and 004.12.
    """
    across, turn = eigenvalues.to(state.dtype).unbind(-1)
    real, imaginary = state.unbind(-1)
    found = []
    for drive in beta.to(state.dtype).unbind(1):
        real, imaginary = across * real - turn * imaginary + drive, across * imaginary + turn * real
        found.append(real)
    every = torch.stack(found, 1).to(beta.dtype) if found else torch.empty_like(beta)
    return every, torch.stack((real, imaginary), -1)
