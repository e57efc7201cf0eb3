"""Figures as text: three significant digits and a suitable unit."""

from __future__ import annotations

import math

MISSING = "–"


def significant(value: float, digits: int = 3) -> str:
    """Return `value` with this many significant digits and no exponent: 0.0123, 1.23, 12.3, 123, 1230."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    places = digits - 1 - math.floor(math.log10(abs(rounded)))  # 9.996 is now 10.0
    return f"{rounded:.{max(places, 0)}f}"


def seconds(value: float | None) -> str:
    """Return a time as text: "12.3 µs"."""
    if value is None:
        return MISSING
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= 0.9995 * scale:
            return f"{significant(value / scale)} {unit}"
    return f"{significant(value / 1e-9)} ns"


def duration(value: float) -> str:
    """Return a run's duration as text: "48 s", "3 min 20 s"."""
    whole = round(value)
    if whole < 60:
        return f"{whole} s" if value >= 10 else f"{significant(value, 2)} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def ratio(value: float | None) -> str:
    """Return a speedup as text: "5.18×"; near 1, with a third decimal: "1.003×"."""
    return MISSING if value is None else f"{_ratio(value)}×"


def interval(low: float | None, high: float | None) -> str:
    """Return a speedup's interval as text: "5.11–5.24"."""
    return "" if low is None or high is None else f"{_ratio(low)}–{_ratio(high)}"


def _ratio(value: float) -> str:
    return f"{value:.3f}" if 0.9 <= value < 1.1 else significant(value)


def percent(fraction: float | None) -> str:
    """Return a share as text: "85%", "3.4%"."""
    if fraction is None:
        return MISSING
    hundred = 100 * fraction
    return f"{hundred:.0f}%" if abs(hundred) >= 9.95 else f"{hundred:.1f}%"


def bytes_(value: float | None) -> str:
    """Return an amount of memory as text: "1.50 GiB"."""
    if value is None:
        return MISSING
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= scale:
            return f"{significant(value / scale)} {unit}"
    return f"{value:.0f} B"


def rate(value: float, unit: str) -> str:
    """Return a rate as text: "4.25 TB/s" for unit "B/s", "785 TFLOP/s" for "FLOP/s"."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{significant(value / scale)} {prefix}{unit}"
    return f"{significant(value)} {unit}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 proof", "2 proofs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
