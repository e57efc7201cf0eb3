"""Figures of claims, formatted as words."""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.report import units
from suite.ablation import Ratio

MB, GB = 1e6, 1e9


def amount(size: float) -> str:
    """Format bytes in decimal units, MB or GB, as the source does."""
    return f"{units.significant(size / GB)} GB" if size >= GB else f"{units.significant(size / MB)} MB"


def times(r: Ratio) -> str:
    """Format a speedup and its interval."""
    return f"{r.value:.3g} times as fast ({r.low:.3g} to {r.high:.3g})"


def listed(parts: Sequence[str], between: str = ", ") -> str:
    """Join the parts; with commas, join the last one by "and"."""
    if between != ", " or len(parts) < 2:
        return between.join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
