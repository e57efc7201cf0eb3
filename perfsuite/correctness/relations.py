"""Find a simple relation between a wrong answer and the right one: a factor, an offset, a shift."""

from __future__ import annotations

from collections.abc import Iterator

import torch

EXPLAINED = 0.02
"""Largest share of the error that a relation may leave unexplained."""
MOST = 0.9
"""Smallest share of the elements whose error a relation must halve. Otherwise, rounding of a few large equal values
looks like a factor."""
FEWEST = 8
"""Fewest different values. With fewer, many relations hold by chance."""
OF_ROUNDING = 1 / 32
"""Smallest relative error, in units of a precision's eps, that counts as its rounding. That of a single rounding is
0.15."""
STEP = 2.0**-7
"""Difference of two relative errors that count as different, in units of a precision's eps."""
MANY = 64
"""Number of elements from which some have large rounding errors."""
SHIFTS = (1, -1)


def relation(got: torch.Tensor, truth: torch.Tensor) -> str | None:
    """Return in words the simple change of `truth` that gives `got`, of the same shape; None if there is none."""
    if got.shape != truth.shape or not truth.is_floating_point() or truth.numel() < FEWEST:
        return None
    g, t = got.detach().double(), truth.detach().double()
    finite = g.isfinite() & t.isfinite()
    if not bool(finite.all()) or t.unique().numel() < FEWEST:
        return None
    if torch.equal(g, t):
        return None
    return next((words for words, made in _made(g, t) if _explains(made, g, t)), None)


def _explains(made: torch.Tensor, g: torch.Tensor, t: torch.Tensor) -> bool:
    error, left = (g - t).abs(), (g - made).abs()
    return float(left.norm()) < EXPLAINED * float(error.norm()) and float((2 * left <= error).double().mean()) >= MOST


def reaches(got: torch.Tensor, truth: torch.Tensor, eps: float) -> bool:
    """Return whether the error is at least about as large as that of rounding to a precision with this `eps`.

    True for fewer than MANY elements, whose rounding errors may all be small.
    """
    if got.shape != truth.shape or not truth.is_floating_point():
        return False
    g, t = got.detach().double(), truth.detach().double()
    finite = g.isfinite() & t.isfinite()
    if int(finite.sum()) < MANY:
        return True
    return float((g - t)[finite].norm()) >= OF_ROUNDING * eps * float(t[finite].norm())


def has_few_errors(got: torch.Tensor, truth: torch.Tensor, eps: float) -> bool:
    """Return whether there are fewer than FEWEST different relative errors, in steps of STEP times `eps`.

    So few roundings may all be small, or exact, and do not show the precision.
    """
    if got.shape != truth.shape or not truth.is_floating_point():
        return True
    relative = (got.detach().double() / truth.detach().double() - 1) / (STEP * eps)
    return len(relative[relative.isfinite()].round().unique()) < FEWEST


def _made(g: torch.Tensor, t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    size = float((t * t).sum())
    if size > 0.0:
        factor = float((g * t).sum()) / size
        yield f"it is the truth times {factor:.5g}: a constant factor", factor * t
    offset = float((g - t).mean())
    yield f"it is the truth plus {offset:.3g} in each element: a constant offset", t + offset
    if t.ndim >= 2 and t.shape[-1] == t.shape[-2] > 1:
        yield "it is the truth with its last two dimensions exchanged", t.transpose(-1, -2)
    for dim, length in enumerate(t.shape):
        if length > 2:
            for by in SHIFTS:
                yield f"it is the truth, shifted by {by:+d} along dimension {dim}", t.roll(by, dim)
