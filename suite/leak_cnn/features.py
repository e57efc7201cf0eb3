"""Mel spectra of leak_cnn: 10 s of sound → 40 long windows of two short ones → one frame of 32 mels each.

source: leak_cnn, technique 001 (data)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy

SAMPLE_RATE = 4096
SAMPLES = 40960
"""Samples of a file: 10 s."""
LONG_WINDOW = 1024
SHORT_WINDOW = 512
LONGS = SAMPLES // LONG_WINDOW
SHORTS = LONG_WINDOW // SHORT_WINDOW
SEGMENTS = LONGS * SHORTS
"""Segments of a file: 80 short windows."""
N_FFT = 512
HOP = 128
"""Hop length in samples. It has no effect: with centre off, 512 samples hold one frame."""
MELS = 32
FLOOR = 1e-10
SPLITS = ("train", "validation")
"""The splits of a synthetic set."""
TEST = "test"
ALL_SPLITS = (*SPLITS, TEST)
"""The splits of a set of labelled recordings."""

Array = numpy.ndarray[Any, numpy.dtype[Any]]


def _mel(hertz: float) -> float:
    return float(2595.0 * numpy.log10(1.0 + hertz / 700.0))


@cache
def filterbank() -> Array:
    """Return triangles on the HTK mel scale from 0 Hz to half the rate, peaks of 1 (no norm); float64 [257, 32]."""
    frequencies = numpy.linspace(0.0, SAMPLE_RATE / 2, N_FFT // 2 + 1)[:, None]
    edges = 700.0 * (10.0 ** (numpy.linspace(0.0, _mel(SAMPLE_RATE / 2), MELS + 2) / 2595.0) - 1.0)
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    bank: Array = numpy.maximum(0.0, numpy.minimum(rising, falling))
    return bank


def log_mel(frames: Array) -> Array:
    """Return the decibels of the mel magnitudes of each frame: [..., 512] → [..., 32], in float64.

    The steps are a periodic Hann window, the magnitude spectrum (power 1), the filterbank and
    20·log10(max(m, 1e-10)).
    """
    window = 0.5 - 0.5 * numpy.cos(2.0 * numpy.pi * numpy.arange(N_FFT) / N_FFT)
    magnitudes = numpy.abs(numpy.fft.rfft(frames * window))
    mels = numpy.einsum("...f,fm->...m", magnitudes, filterbank())  # BLAS's summation order depends on its thread count
    decibels: Array = 20.0 * numpy.log10(numpy.maximum(mels, FLOOR))
    return decibels


def features(samples: Array) -> Array:
    """Return a file's mels as they are stored: [40960] → float16 [40, 2, 32, 1]."""
    return log_mel(samples.reshape(LONGS, SHORTS, SHORT_WINDOW))[..., None].astype(numpy.float16)
