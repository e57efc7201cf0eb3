"""Check that the measurements of a workload are complete, finite and consistent."""

from __future__ import annotations

import math

from perfsuite.records import Measurement

RATIO_MAX = 20.0
"""Absolute log-ratio above which a clock must be broken: no side is half a billion times as fast."""


def disagreement(run: tuple[Measurement, ...]) -> str:
    """Return a message with the field on which the processes of one workload disagree; empty if they agree."""
    for name in ("device", "clock", "direction", "dtype", "sizes", "items", "unit"):
        values = [getattr(m, name) for m in run]
        if any(v != values[0] for v in values):
            return f"its processes disagree on {name}: {values[0]!r}, {next(v for v in values if v != values[0])!r}"
    return ""


def incomplete(run: tuple[Measurement, ...], other: str) -> str:
    """Return a message with the side that lacks a sound time or ratio; empty if every required side has both."""
    for m in run:
        # With the accepted side, the reference may be missing, but if it was timed, its data must be sound.
        reference = {"reference"} if other == "reference" or m.log_ratios.get("reference") else set()
        for name in sorted({other, *reference}):
            ratios = m.log_ratios.get(name, ())
            if not ratios or not all(abs(r) <= RATIO_MAX for r in ratios):
                return f"a process gave no sound ratio to the {name} side"
        for side in ("optimized", *reference):
            blocks = m.sides[side].blocks_s if side in m.sides else ()
            if not blocks or not all(math.isfinite(b) and b > 0 for b in blocks):
                return f"a process gave no time of the {side} side"
    return ""
