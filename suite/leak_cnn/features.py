"""Mel spectra of leak_cnn: 10 s of sound → 40 long windows → 80 short windows → one frame of 32 mels for each.

Source: leak_cnn, technique 001 (data)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy

SAMPLE_RATE = 4096
"""Sample rate in Hz."""
SAMPLES = 40960
"""Samples per file: 10 s."""
LONG_WINDOW = 1024
"""Samples per long window: 250 ms."""
SHORT_WINDOW = 512
"""Samples per short window: 125 ms."""
LONGS = SAMPLES // LONG_WINDOW
"""Long windows per file: 40."""
SHORTS = LONG_WINDOW // SHORT_WINDOW
"""Short windows per long window: 2."""
SEGMENTS = LONGS * SHORTS
"""Segments per file: 80. A segment is the mels of a short window."""
N_FFT = 512
HOP = 128
"""Hop length in samples. It has no effect: without centring, 512 samples give one frame."""
MELS = 32
"""Mel bands per frame."""
FLOOR = 1e-10
"""Minimum mel magnitude before the logarithm."""
SPLITS = ("train", "validation")
"""Splits of a synthetic data set."""
TEST = "test"
ALL_SPLITS = (*SPLITS, TEST)
"""Splits of a data set of labelled recordings."""

Array = numpy.ndarray[Any, numpy.dtype[Any]]


def _mel(hertz: float) -> float:
    return float(2595.0 * numpy.log10(1.0 + hertz / 700.0))


@cache
def filterbank() -> Array:
    """Return triangular filters on the HTK mel scale, float64 [257, 32].

    They span 0 Hz to half the sample rate, and each has a peak of 1 (no norm).
    """
    frequencies = numpy.linspace(0.0, SAMPLE_RATE / 2, N_FFT // 2 + 1)[:, None]
    edges = 700.0 * (10.0 ** (numpy.linspace(0.0, _mel(SAMPLE_RATE / 2), MELS + 2) / 2595.0) - 1.0)
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    bank: Array = numpy.maximum(0.0, numpy.minimum(rising, falling))
    return bank


def log_mel(frames: Array) -> Array:
    """Return the mel magnitudes of each frame in decibels: [..., 512] → [..., 32], float64.

    The steps are a periodic Hann window, the magnitude spectrum (power 1), the filterbank and
    20·log10(max(m, 1e-10)).
    """
    window = 0.5 - 0.5 * numpy.cos(2.0 * numpy.pi * numpy.arange(N_FFT) / N_FFT)
    magnitudes = numpy.abs(numpy.fft.rfft(frames * window))
    # einsum without BLAS, whose summation order depends on the thread count
    mels = numpy.einsum("...f,fm->...m", magnitudes, filterbank())
    decibels: Array = 20.0 * numpy.log10(numpy.maximum(mels, FLOOR))
    return decibels


def features(samples: Array) -> Array:
    """Return the mels of a file in their stored form: [40960] → float16 [40, 2, 32, 1]."""
    return log_mel(samples.reshape(LONGS, SHORTS, SHORT_WINDOW))[..., None].astype(numpy.float16)
