"""Synthesis of the sounds of leak_cnn's classes from a recording and a random generator. None was recorded at a pipe.

Files of every class contain faint microphone noise. Otherwise, the silent pauses of a clean recording would distinguish
NORMAL from the other classes.
"""

from __future__ import annotations

import numpy

from suite.leak_cnn.features import SAMPLE_RATE, SAMPLES, Array

Generator = numpy.random.Generator

MADE = {
    "BACKGROUND": "the recording attenuated by 20 to 40 dB under coloured room noise",
    "CRACK": "the recording with short broadband clicks, 4 to 20 a second",
    "LEAK": "the recording with steady, phase-randomised band noise at snr_db",
    "NORMAL": "the recording as it is, with the microphone's noise",
    "UNCLASSIFIED": "the recording with LEAK's band noise, but only for 20 to 60% of the time, in ten stretches",
}
"""Class → description of its synthesis, which is written to the attributes of the file."""
MICROPHONE = "every file of whatever class has white noise 35 to 45 dB below its recording"
MICROPHONE_DB = (-45.0, -35.0)
"""Range of the level of the microphone noise, in dB relative to the recording."""


def mixed(kind: str, recording: Array, snr_db: float, random: Generator) -> Array:
    """Generate a file of class `kind` from a recording, float64 [40960].

    Levels are relative to the RMS of the recording. ValueError for an unknown class.
    """
    level = rms(recording)
    sound = recording.astype(numpy.float64)
    if kind == "BACKGROUND":
        sound *= gain(-random.uniform(20, 40))
        sound += level * gain(-random.uniform(5, 25)) * room_noise(random)
    elif kind == "CRACK":
        sound += level * clicks(random)
    elif kind == "LEAK":
        sound += level * gain(-snr_db) * band_noise(random)
    elif kind == "UNCLASSIFIED":
        sound += level * gain(-snr_db) * band_noise(random) * comes_and_goes(random)
    elif kind != "NORMAL":
        raise ValueError(kind)
    return sound + level * gain(random.uniform(*MICROPHONE_DB)) * random.standard_normal(SAMPLES)


def rms(samples: Array) -> float:
    """Return the root mean square of samples, computed in float64."""
    return float(numpy.sqrt(numpy.mean(numpy.square(samples, dtype=numpy.float64))))


def gain(decibels: float) -> float:
    """Convert a level in decibels to an amplitude factor."""
    return float(10.0 ** (decibels / 20.0))


def band_noise(random: Generator) -> Array:
    """Generate steady band-limited noise with RMS 1, float64 [40960].

    The centre is at 150 to 1500 Hz. The amplitude falls off on both sides as a raised cosine over log-frequency, whose
    full width at half maximum is 0.5 to 2 octaves.
    """
    centre = numpy.exp(random.uniform(numpy.log(150), numpy.log(1500)))
    octaves = random.uniform(0.5, 2.0)
    distance = numpy.abs(numpy.log2(numpy.maximum(_frequencies(), 1.0) / centre)) / octaves
    return _of_magnitudes(0.5 + 0.5 * numpy.cos(numpy.pi * numpy.minimum(distance, 1.0)), random)


def room_noise(random: Generator) -> Array:
    """Generate noise with RMS 1 whose spectrum is between white and brown (power ~ 1/f^0 to 1/f^2), float64 [40960]."""
    exponent = random.uniform(0.0, 2.0)
    return _of_magnitudes(numpy.maximum(_frequencies(), 20.0) ** (-exponent / 2), random)


def _frequencies() -> Array:
    return numpy.fft.rfftfreq(SAMPLES, 1.0 / SAMPLE_RATE)


def _of_magnitudes(magnitudes: Array, random: Generator) -> Array:
    phases = numpy.exp(2j * numpy.pi * random.random(len(magnitudes)))
    spectrum = magnitudes * phases
    spectrum[0] = 0.0
    noise: Array = numpy.fft.irfft(spectrum, SAMPLES)
    return noise / rms(noise)


def clicks(random: Generator) -> Array:
    """Generate 4 to 20 noise bursts per second at random times, float64 [40960].

    Their decay times are 0.5 to 3 ms, and their gains 0 to 15 dB.
    """
    found = numpy.zeros(SAMPLES)
    length = SAMPLE_RATE // 50
    for _ in range(random.poisson(random.uniform(4, 20) * SAMPLES / SAMPLE_RATE)):
        decay = random.uniform(0.0005, 0.003) * SAMPLE_RATE
        burst = random.standard_normal(length) * numpy.exp(-numpy.arange(length) / decay)
        at = int(random.integers(0, SAMPLES - length))
        found[at : at + length] += gain(random.uniform(0, 15)) * burst
    return found


def comes_and_goes(random: Generator) -> Array:
    """Generate an envelope from 0 to 1 that is on for 20 to 60% of the time, float64 [40960].

    It has ten stretches. The ramp at each end of a stretch lasts 20 ms, the length of the Hann window that smooths it.
    """
    share = random.uniform(0.2, 0.6)
    stretches = 10
    lengths = random.uniform(0.5, 1.5, stretches), random.uniform(0.5, 1.5, stretches)
    on, off = (part * length / length.sum() * SAMPLES for part, length in zip((share, 1 - share), lengths, strict=True))
    ends = numpy.cumsum(numpy.stack([off, on], axis=1).reshape(-1)).astype(numpy.int64)
    steps = numpy.zeros(SAMPLES)
    for begin, end in zip(ends[::2], ends[1::2], strict=True):
        steps[begin:end] = 1.0
    steps = numpy.roll(steps, int(random.integers(SAMPLES)))
    flank = numpy.hanning(SAMPLE_RATE // 50)
    return numpy.convolve(steps, flank / flank.sum(), mode="same")


def synthetic_recording(random: Generator) -> Array:
    """Generate 10 s of synthetic sound that resembles a voice in a room, float64 [40960].

    It consists of tones and noise whose levels vary over time.
    """
    times = numpy.arange(SAMPLES) / SAMPLE_RATE
    points = numpy.linspace(0, SAMPLES / SAMPLE_RATE, 40)
    pitch = random.uniform(80, 300) * (1 + 0.2 * numpy.interp(times, points, random.uniform(-1, 1, len(points))))
    phase = 2 * numpy.pi * numpy.cumsum(pitch) / SAMPLE_RATE
    voiced, hissing = (
        numpy.maximum(0.0, numpy.interp(times, points, random.uniform(-0.7, 1, len(points)))) for _ in range(2)
    )
    tones = numpy.zeros(SAMPLES)
    for harmonic in range(1, 7):  # rarely above half the sample rate: at most 6 · 300 · 1.2 = 2160 Hz
        tones += random.uniform(0.2, 1.0) / harmonic * numpy.sin(harmonic * phase)
    sound = voiced * tones + 0.3 * hissing * room_noise(random)
    return gain(random.uniform(-24, -14)) * sound / rms(sound)
