"""Plots of the HTML page, as positions for the template: blocks by process, densities, and the roofline.

The template draws them as SVG when the report is written, so that they show without scripts and in print.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Measurement, PromiseRecord
from perfsuite.report import units, workload_rows

WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 440, 12, 12, 18, 8, 22
"""Dimensions of a plot, in units of its SVG view box."""
HEIGHT = 130
"""Height of a plot without rows for processes."""
UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns"))
FLOPS = "FLOP/s"
LABELLED = 88
"""Width reserved for the labels of a vertical axis."""
POINTS = 96
"""Number of points at which a density is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A labelled position on an axis."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A labelled range of an axis."""

    low: float
    high: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessBlocks:
    """The blocks of one process."""

    dots: str
    """SVG path with a point for each block."""
    median: float
    y: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Log-ratios of blocks as dots, a row for each process; x is logarithmic in the ratio."""

    title: str
    subtitle: str
    height: float
    rows: tuple[ProcessBlocks, ...]
    ticks: tuple[Mark, ...]
    guides: tuple[Mark, ...]
    """Vertical lines at 1×, the promise and the margin."""
    band: Band | None
    """Range of the ratios of unchanged code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The density of one side's seconds, as the points of an SVG polygon."""

    name: str
    points: str
    median: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Densities:
    """Densities of the block times of two sides, drawn over each other."""

    title: str
    subtitle: str
    height: float
    curves: tuple[Curve, ...]
    ticks: tuple[Mark, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """The roofline plot of a workload; both axes are logarithmic."""

    subtitle: str
    height: float
    roof: str
    """Points of an SVG polyline."""
    dots: tuple[tuple[float, float, str, str], ...]
    """(x, y, name of the side, label)"""
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]


def blocks(
    measurements: Sequence[Measurement],
    other: str,
    promise: PromiseRecord,
    judged: workload_rows.Comparison | None = None,
    *,
    margin: float | None = None,
    noise: float | None = None,
) -> Blocks | None:
    """Return the plot of the block log-ratios against one other side; None if no process has any.

    judged  the verdict's ratio
    margin  the slowdown that the gate calls a regression, drawn against the accepted side only
    noise   the standard deviation of a process's mean log-ratio between the accepted code and itself
    """
    lines = [m.log_ratios[other] for m in measurements if m.log_ratios.get(other)]
    comparison = judged or workload_rows.compare(measurements, other)
    if not lines or comparison is None:
        return None
    values = [v for line in lines for v in line]
    # At least 0.5% wide, so that noise far below what the gate resolves does not look large.
    middle, half = (min(values) + max(values)) / 2, max((max(values) - min(values)) / 2, 0.0025) * 1.15
    goals = [(0.0, "1×")]
    if other == REFERENCE and promise.speedup is not None:
        goals.append((math.log(promise.speedup), f"promised {units.ratio(promise.speedup)}"))
    if other == ACCEPTED and margin is not None:
        goals.append((-math.log1p(margin), f"margin, {units.percent(margin)} slower"))
    low, high = middle - half, middle + half
    for goal, _ in goals:
        # Against other sides than the accepted one, a goal is shown only if that does not squeeze the dots together.
        if other == ACCEPTED or low - 2 * half <= goal <= high + 2 * half:
            low, high = min(low, goal - half / 4), max(high, goal + half / 4)

    def x(value: float) -> float:
        return _at(value, low, high)

    medians = [math.exp(statistics.median(line)) for line in lines]
    ends = units.interval(min(medians), max(medians))
    return Blocks(
        title=f"{other} / {OPTIMIZED}",
        subtitle=units.ratio(comparison.value) + (f" (medians of the processes {ends})" if len(lines) > 1 else ""),
        height=TOP + ROW * len(lines) + BOTTOM,
        rows=tuple(_row(n, line, x) for n, line in enumerate(lines)),
        ticks=tuple(Mark(x=x(math.log(t)), label=label) for t, label in ticks(math.exp(low), math.exp(high))),
        guides=tuple(Mark(x=x(goal), label=label) for goal, label in goals if low <= goal <= high),
        band=_band(noise, low, high) if other == ACCEPTED and noise is not None else None,
    )


def _row(number: int, line: Sequence[float], x: Callable[[float], float]) -> ProcessBlocks:
    y, median = TOP + ROW * (number + 0.5), statistics.median(line)
    low, high = (f"{math.exp(v):.4f}" for v in (min(line), max(line)))
    return ProcessBlocks(
        dots="".join(f"M{x(v)} {y}h0" for v in line),
        median=x(median),
        y=y,
        label=f"process {number + 1}: median {math.exp(median):.4f}×, blocks {low} to {high}",
    )


def _band(noise: float, low: float, high: float) -> Band | None:
    ends = max(low, -2 * noise), min(high, 2 * noise)
    label = f"95% of processes of unchanged code, when it was accepted, ±{units.percent(math.expm1(2 * noise))}"
    return Band(low=_at(ends[0], low, high), high=_at(ends[1], low, high), label=label) if ends[0] < ends[1] else None


def ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Return at most `most` round values within [low, high], each with its label as a ratio."""
    values, digits = _round_values(low, high, most)
    return [(v, f"{v:.{digits}f}×") for v in values if v > 0]


def _round_values(low: float, high: float, most: int) -> tuple[list[float], int]:
    """Return (at most `most` round values within [low, high], the number of decimals of their labels)."""
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(s * power for s in (1, 2, 2.5, 5, 10, 20) if span / (s * power) <= most - 0.5)
    digits = max(0, (step == 2.5 * power) - math.floor(math.log10(step)))
    return [round(step * n, digits) for n in range(math.ceil(low / step), math.floor(high / step) + 1)], digits


def densities(measurements: Sequence[Measurement]) -> Densities | None:
    """Return the densities of the accepted and the current side; None if either has fewer than 3 different times."""
    import numpy
    from scipy import stats  # here: the import takes half a second, and no other format needs it

    found = {name: _seconds(measurements, name) for name in (ACCEPTED, OPTIMIZED)}
    if any(len(set(values)) < 3 for values in found.values()):
        return None
    every = [v for values in found.values() for v in values]
    low, high = min(every), max(every)
    low, high = low - (high - low) * 0.1, high + (high - low) * 0.1
    grid = numpy.linspace(low, high, POINTS)
    heights = {name: stats.gaussian_kde(values)(grid) for name, values in found.items()}
    top = max(float(h.max()) for h in heights.values())
    base = HEIGHT - BOTTOM

    def points(height: Sequence[float]) -> str:
        line = [f"{_at(v, low, high)},{base - (base - TOP) * h / top:.1f}" for v, h in zip(grid, height, strict=True)]
        return " ".join([f"{_at(low, low, high)},{base}", *line, f"{_at(high, low, high)},{base}"])

    curves = tuple(
        Curve(
            name="accepted" if name == ACCEPTED else "current",
            points=points(heights[name]),
            median=_at(statistics.median(values), low, high),
        )
        for name, values in found.items()
    )
    scale, unit = next((s, u) for s, u in UNITS if high * s >= 1 or u == "ns")
    values, digits = _round_values(low * scale, high * scale, 4)
    medians = [units.seconds(statistics.median(found[name])) for name in (ACCEPTED, OPTIMIZED)]
    return Densities(
        title="seconds a call, blocks of all processes",
        subtitle=f"accepted {medians[0]}, current {medians[1]}",
        height=HEIGHT,
        curves=curves,
        ticks=tuple(Mark(x=_at(v / scale, low, high), label=f"{v:.{digits}f} {unit}") for v in values),
    )


def _seconds(measurements: Iterable[Measurement], name: str) -> list[float]:
    return [s for m in measurements if name in m.sides for s in m.sides[name].blocks_s]


def ceilings(measurements: Iterable[Measurement]) -> dict[str, float]:
    """Return the median ceilings that the run measured: "memory" in bytes per second, and for each dtype of a
    compute-bound workload its operations per second."""
    found: dict[str, list[float]] = {}
    for m in measurements:
        if m.limit is not None:
            found.setdefault(m.limit.by if m.limit.by == "memory" else m.dtype, []).append(m.limit.ceiling)
    return {name: statistics.median(values) for name, values in found.items()}


def roofline(measurements: Sequence[Measurement], known: Mapping[str, float]) -> Roofline | None:
    """Return the roofline plot; None for a workload whose operations or bytes are not known.

    known  `ceilings` of the run; a roof without a measured ceiling is not drawn
    """
    first = next((m for m in measurements if m.limit is not None), None)
    if first is None or first.limit is None or not (first.limit.flops and first.limit.bytes):
        return None
    memory, compute = known.get("memory"), known.get(first.dtype)
    intensity = first.limit.flops / first.limit.bytes
    rates = {
        name: first.limit.flops / seconds
        for name in sorted(
            workload_rows.sides(measurements), key=lambda name: name == OPTIMIZED
        )  # so that it is drawn over the others
        if (seconds := _on_device(measurements, name))
    }
    if not rates:
        return None
    ridge = compute / memory if compute and memory else intensity
    left, right = math.log10(min(intensity, ridge)) - 1, math.log10(max(intensity, ridge)) + 1

    def roof(log_intensity: float) -> float:
        limits = [memory * 10**log_intensity] if memory else []
        return math.log10(min([*limits, compute] if compute else limits))

    bends = sorted({left, right, *([math.log10(ridge)] if compute and memory else [])})
    heights = [roof(at) for at in bends]
    lows = [*heights, *(math.log10(rate) for rate in rates.values())]
    bottom, top = min(lows) - 0.3, max(lows) + 0.3
    base = HEIGHT - BOTTOM

    def x(value: float) -> float:
        return _at(value, left, right, LABELLED)

    def y(value: float) -> float:
        return round(base - (base - TOP) * (value - bottom) / (top - bottom), 1)

    here = x(math.log10(intensity))
    share = rates[OPTIMIZED] / 10 ** roof(math.log10(intensity)) if OPTIMIZED in rates else None
    reached = f"; {OPTIMIZED} reaches {units.percent(share)} of the roof" if share else ""
    return Roofline(
        subtitle=f"{units.significant(intensity)} operations a byte{reached}",
        height=HEIGHT,
        roof=" ".join(f"{x(at)},{y(height)}" for at, height in zip(bends, heights, strict=True)),
        dots=tuple(
            (here, y(math.log10(rate)), name, f"{name}: {units.rate(rate, FLOPS)}") for name, rate in rates.items()
        ),
        x_ticks=tuple(
            Mark(x=x(power), label=f"{10.0**power:g}") for power in range(math.ceil(left), math.floor(right) + 1)
        ),
        y_ticks=tuple(
            Mark(x=y(power), label=units.rate(10.0**power, FLOPS))
            for power in range(math.ceil(bottom), math.floor(top) + 1, max(1, math.ceil((top - bottom) / 4)))
        ),
    )


def _on_device(measurements: Sequence[Measurement], name: str) -> float | None:
    times = [t for m in measurements if (t := workload_rows.seconds_of(m.sides.get(name), "device")) is not None]
    return statistics.median(times) if times else None


def _at(value: float, low: float, high: float, start: int = LEFT) -> float:
    """Return the position of a value on an axis that spans `low` to `high` and begins at `start`."""
    return round(start + (value - low) / (high - low) * (WIDTH - start - RIGHT), 1)
