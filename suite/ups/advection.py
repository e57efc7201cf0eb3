"""Samples of the 1-D advection equation u_t + beta u_x = 0, periodic on [0, 1].

The exact solution, u(x, t) = u0(x - beta t), is evaluated in float64 at the cell centres. PDEBench instead stores the
cell averages of a second-order finite-volume scheme. In a cell of width 1/1024, the average and the centre value of a
wave sin(k x) differ by at most (k/1024)²/24 of its amplitude, which is 1e-4 for k = 16 pi.

Source: ups, technique 002 (data); Takamoto et al., PDEBench (2022)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy

from suite.building import Array

BETAS = (0.1, 0.2, 0.4, 0.7, 1.0, 2.0, 4.0, 7.0)
"""Advection speeds of PDEBench's files."""
FRAMES = 201
FRAME_S = 0.01
"""Time between consecutive frames, in s. The last frame is at t = 2 s."""
WAVES = 2
"""Sine waves in an initial condition."""
MOST_PERIODS = 8
"""Maximum number of periods of a wave in [0, 1]; the minimum is 1. PDEBench draws 1 to 4 and doubles equal draws."""
OPTION_PROBABILITY = 0.1
"""Probability that the absolute value is applied and, independently, that the window is applied."""
EDGE = 0.01
"""Width of the window's edges."""


@dataclass(frozen=True, kw_only=True)
class Initial:
    """An initial condition: sign · f(Σ A sin(2 pi n x + phi)) · w.

    f is the absolute value in 10% of the samples, otherwise the identity. w is a window in 10%, otherwise 1.
    """

    periods: tuple[int, ...]
    amplitudes: tuple[float, ...]
    phases: tuple[float, ...]
    absolute: bool
    sign: float
    window: tuple[float, float] | None
    """Start and end of the window."""


def drawn(seed: int, index: int) -> Initial:
    """Draw the initial condition of a sample. It depends only on the seed and the index.

    It is the same for each beta. PDEBench also uses a single seed for all its files.
    """
    random = numpy.random.default_rng([seed, index])
    periods = random.integers(1, MOST_PERIODS, WAVES, endpoint=True)
    amplitudes = random.uniform(0.0, 1.0, WAVES)
    phases = random.uniform(0.0, 2 * math.pi, WAVES)
    absolute, windowed = random.random(2) < OPTION_PROBABILITY
    sign = random.choice([1.0, -1.0])
    left, right = random.uniform(0.1, 0.45), random.uniform(0.55, 0.9)
    return Initial(
        periods=tuple(periods.tolist()),
        amplitudes=tuple(amplitudes.tolist()),
        phases=tuple(phases.tolist()),
        absolute=bool(absolute),
        sign=float(sign),
        window=(float(left), float(right)) if windowed else None,
    )


def centres(cells: int) -> Array:
    """Return the centres of `cells` equal cells of [0, 1], float64 [cells]."""
    return (numpy.arange(cells) + 0.5) / cells


def times() -> Array:
    """Return the times of the frames, in s, float64 [201]."""
    return numpy.arange(FRAMES) * FRAME_S


def stored_times() -> Array:
    """Return the t-coordinate that PDEBench stores: the times of the frames and an extra 2.01 s; float64 [202]."""
    return numpy.arange(FRAMES + 1) * FRAME_S


def solution(initial: Initial, beta: float, points: int) -> Array:
    """Return the exact solution at the times of the frames and the cell centres, float64 [201, points]."""
    x, shift = centres(points), beta * times()
    u = numpy.zeros((FRAMES, points))
    for periods, amplitude, phase in zip(initial.periods, initial.amplitudes, initial.phases, strict=True):
        # sin(k (x - beta t) + phi) by the angle addition formula: two products per element instead of a sine
        k = 2 * math.pi * periods
        u += (amplitude * numpy.cos(k * shift))[:, None] * numpy.sin(k * x + phase)
        u -= (amplitude * numpy.sin(k * shift))[:, None] * numpy.cos(k * x + phase)
    if initial.absolute:
        u = numpy.abs(u)
    u *= initial.sign
    if initial.window is not None:
        left, right = initial.window
        origin = numpy.mod(x - shift[:, None], 1.0)
        u *= 0.5 * (numpy.tanh((origin - left) / EDGE) - numpy.tanh((origin - right) / EDGE))
    return u
