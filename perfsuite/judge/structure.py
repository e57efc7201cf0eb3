"""Find properties of the template's values that draws do not keep, for the message of a wrong answer."""

from __future__ import annotations

from typing import Any

import torch

from perfsuite.draws import inputs as make

MOST_ROWS, MOST_COLUMNS = 64, 4096
"""Size of the part of a large tensor that is examined."""
FEWEST = 16
"""Fewest numbers that show a property other than by chance."""
NEAR_ONE = 1e-4


def clause_of(template: Any) -> str:
    """Return a clause that names the inputs of `get_inputs()` with such a property, starting with "; ", or an empty
    string."""
    found = [f"get_inputs(){at} {words}" for at, tensor in make.tensors_in(template) if (words := _property(tensor))]
    if not found:
        return ""
    return (
        f"; {', '.join(found)}, and drawn inputs do not keep that: if candidates may rely on it, let Model.forward "
        f"establish it first, as with torch.triu(A)"
    )


def _property(tensor: torch.Tensor) -> str:
    """Return what the values have in common, or an empty string."""
    if tensor.ndim == 0 or tensor.dtype is torch.bool:
        return ""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])[:MOST_ROWS]
    part = rows[:, :MOST_COLUMNS]
    if part.numel() < FEWEST or bool((part == part[0, 0]).all()):
        return ""
    is_square = tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2]
    square = tensor.detach().flatten(0, -3)[0] if tensor.ndim > 2 else tensor.detach()
    words = _of_matrix(square[:MOST_ROWS, :MOST_ROWS]) if is_square else ""
    return words or _of_rows(rows, part)


def _of_matrix(square: torch.Tensor) -> str:
    if torch.equal(square, square.triu()) or torch.equal(square, square.tril()):
        return "is triangular"
    return "is symmetric" if torch.equal(square, square.mT) else ""


def _of_rows(rows: torch.Tensor, part: torch.Tensor) -> str:
    """Return what the values of `rows`, or of the part of them with the first columns, have in common."""
    if part.shape[1] > 2 and bool((part[:, 1:] >= part[:, :-1]).all()):
        return "is sorted"
    if not part.is_floating_point():
        return "has no value twice" if part.unique().numel() == part.numel() else ""
    if bool(((rows.double().sum(1) - 1).abs() < NEAR_ONE).all()):
        return "has rows that sum to 1"
    return "has whole numbers only" if torch.equal(part, part.round()) else ""
