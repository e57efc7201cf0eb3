"""Check that the measurements of a workload are complete, finite, and of one and the same thing."""

from __future__ import annotations

import math

from perfsuite.records import Measurement

RATIO_MAX = 20.0
"""Log-ratio beyond which a clock is broken: no side is half a billion times as fast."""


def disagreement(run: tuple[Measurement, ...]) -> str:
    """Return the field on which the processes of one workload disagree, with two values; empty where they agree."""
    for name in ("device", "clock", "direction", "dtype", "sizes", "items", "unit"):
        values = [getattr(m, name) for m in run]
        if any(v != values[0] for v in values):
            return f"its processes disagree on {name}: {values[0]!r}, {next(v for v in values if v != values[0])!r}"
    return ""


def incomplete(run: tuple[Measurement, ...], other: str) -> str:
    """Return the side without a sound time or ratio to `other`; empty where every side has one."""
    for m in run:
        # The reference may be missing beside the accepted side, but what is there must be sound.
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
