"""Figures of the claims of ups, formatted as words."""

from __future__ import annotations

from suite.ablation import Ratio
from suite.claims.words import amount


def ratio(r: Ratio) -> str:
    """Format a ratio and its interval."""
    return f"{r.value:.3g} ({r.low:.3g} to {r.high:.3g})"


def longer(r: Ratio) -> str:
    """Format how much longer something takes, in percent."""
    return f"{100 * (r.value - 1):.3g}% ({100 * (r.low - 1):.3g} to {100 * (r.high - 1):.3g}) longer"


def less(size: float) -> str:
    """Format how many bytes less something takes."""
    return f"{amount(abs(size))} {'less' if size >= 0 else 'more'}"


def differ(distance: float) -> str:
    """Format the share by which two tensors differ."""
    return f"differ by {distance:.2g}" if distance else "are equal to the bit"
