"""Samples of 2-D Darcy flow: div(a grad u) = -beta on the unit square, with u = 0 at its boundary.

The solver uses cell-centred finite volumes with two-point fluxes. a is constant in each cell. At a face between two
cells, a is the harmonic mean of their values, so that u is second-order accurate even where a jumps. u is 0 at the
boundary, which is half a cell from the nearest centres.

Source: ups, technique 002 (data); a as in Li et al., Fourier Neural Operator (2021)
"""

from __future__ import annotations

import math

import numpy
from scipy import fft

from suite.building import Array

BETAS = (0.01, 0.1, 1.0, 10.0, 100.0)
"""Source terms of PDEBench's files."""
LOW, HIGH = 0.1, 1.0
"""The two values of a."""
MODES = 64
"""Maximum number of cosine modes in each direction. Mode 63 has 1/2000 of the amplitude of mode 1."""
TAU = 3.0
"""Inverse length scale: the covariance of the field is (-Laplacian + TAU²)^-2 with reflecting boundaries."""
TOLERANCE = 1e-12
"""Maximum norm of the residual relative to that of the source. float32, the dtype of the files, resolves 1e-7."""
MOST_STEPS = 300
"""Maximum number of CG steps. About 40 suffice at any resolution: max(a) / min(a) = 10 bounds the condition number."""


def coefficient(seed: int, index: int, cells: int) -> Array:
    """Return the coefficient a at the cell centres, float64 [cells, cells]: 1 where `field` is positive, else 0.1."""
    return numpy.where(field(seed, index, cells) > 0, HIGH, LOW)


def field(seed: int, index: int, cells: int) -> Array:
    """Return a Gaussian random field at the cell centres, float64 [cells, cells].

    The field is Σ w c_m(x) c_n(y) / (pi² (m² + n²) + TAU²) with w ~ N(0, 1), c_0 = 1 and c_m(x) = sqrt(2) cos(m pi x).
    It depends only on the seed and the index; more cells resolve the same field more finely. The constant mode is
    omitted, so that neither value of a dominates most samples.
    """
    white = numpy.random.default_rng([seed, index]).standard_normal((MODES, MODES))
    square = (math.pi * numpy.arange(MODES)) ** 2
    spectrum = white / (square[:, None] + square + TAU**2)
    spectrum[0, 0] = 0.0
    spectrum[1:] /= math.sqrt(2)  # dctn weights cosines by 2 and the constant by 1
    spectrum[:, 1:] /= math.sqrt(2)
    kept = min(MODES, cells)
    padded = numpy.zeros((cells, cells))
    padded[:kept, :kept] = spectrum[:kept, :kept]
    summed: Array = fft.dctn(padded, type=3)
    return summed


def solve(a: Array, source: Array | float) -> Array:
    """Solve div(a grad u) = -source for u at the cell centres; float64 [n, n], like a.

    source  values at the cell centres, [n, n], or a number

    The method is conjugate gradients. The preconditioner is the exact solution for a = 1, computed by a sine transform.
    ArithmeticError if it does not converge within MOST_STEPS steps.
    """
    cells = len(a)
    fluxes = _conductances(a)
    right = numpy.broadcast_to(source, a.shape) / cells**2
    u = numpy.zeros_like(a)
    residual = right.copy()
    wanted = TOLERANCE * _norm(right)
    eigenvalues = 4 * numpy.sin(math.pi * numpy.arange(1, cells + 1) / (2 * cells)) ** 2
    inverse = 1 / (eigenvalues[:, None] + eigenvalues)
    direction = numpy.zeros_like(a)
    before = 1.0
    for _ in range(MOST_STEPS):
        if _norm(residual) <= wanted:
            return u
        step = fft.idstn(fft.dstn(residual, type=2) * inverse, type=2)
        now = float((residual * step).sum())
        direction = step + now / before * direction
        applied = _applied(fluxes, direction)
        length = now / float((direction * applied).sum())
        u += length * direction
        residual -= length * applied
        before = now
    raise ArithmeticError(f"no solution after {MOST_STEPS} steps: the coefficient is not positive, or not finite")


def _conductances(a: Array) -> tuple[Array, Array]:
    """Return the flux through each face per unit difference in u: [n + 1, n] along x and [n, n + 1] along y."""
    cells = len(a)
    along_x, along_y = numpy.empty((cells + 1, cells)), numpy.empty((cells, cells + 1))
    for faces, values in ((along_x, a), (along_y.T, a.T)):
        faces[1:-1] = 2 * values[1:] * values[:-1] / (values[1:] + values[:-1])
        faces[0], faces[-1] = 2 * values[0], 2 * values[-1]  # the boundary is half a cell away
    return along_x, along_y


def _applied(fluxes: tuple[Array, Array], u: Array) -> Array:
    """Return -div(a grad u) · h², where h is the cell width; [n, n]."""
    along_x, along_y = fluxes
    flow_x, flow_y = along_x.copy(), along_y.copy()
    for flow, values in ((flow_x, u), (flow_y.T, u.T)):
        flow[1:-1] *= values[1:] - values[:-1]
        flow[0] *= values[0]
        flow[-1] *= -values[-1]
    return flow_x[:-1] - flow_x[1:] + flow_y[:, :-1] - flow_y[:, 1:]


def _norm(array: Array) -> float:
    return math.sqrt(float((array * array).sum()))
