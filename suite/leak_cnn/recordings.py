"""Recordings in a folder: functions to find them, read them as mono at 4096 Hz and cut them into pieces of 10 s."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy

from perfsuite.errors import PerfsuiteError
from suite.building import digest_of
from suite.leak_cnn.features import SAMPLE_RATE, SAMPLES, Array
from suite.leak_cnn.sounds import gain, rms
from suite.leak_cnn.storage import VERSION

SUFFIXES = (".wav", ".flac")
RATES = (SAMPLE_RATE, 768_000)
"""Minimum and maximum sample rate in Hz. A lower rate lacks part of the band; no microphone has a higher rate."""
SILENT_DB = -60.0
"""Level in dB relative to full scale. A stretch is silent if its RMS is lower."""
LOUDEST = 1000.0
"""Amplitude limit, 60 dB above full scale. A recording with a sample this large is damaged."""
SHORTEST = SAMPLE_RATE // 10
"""Minimum length of a stretch or recording, in samples: 0.1 s."""
FADE = SAMPLE_RATE // 200
"""Length of the fade at both ends of a stretch, in samples: 5 ms. It avoids clicks, which the class CRACK has."""
UNKNOWN = (0, 0xFFFFFFFF)
"""Placeholder sizes in the header of a WAV file, left by a program that could not seek back to write the size."""


class UnusableError(Exception):
    """A recording cannot be used. The message is "category: reason"; unusable recordings are counted by category."""


@dataclass(frozen=True)
class Stretch:
    """A section of a recording, 10 s or shorter, from sample `start`. A stretch is in only one split."""

    recording: int
    start: int
    length: int


def found(root: Path, option: str = "--from") -> list[str]:
    """Return the recordings in a folder and its subfolders, as sorted relative paths with `/`.

    PerfsuiteError if there are none, or if the folder cannot be read.
    """
    try:
        if not root.is_dir():
            raise PerfsuiteError(f"{option} {root} is no folder; name one that holds WAV or FLAC recordings")
        with os.scandir(root):  # os.walk skips a folder that cannot be read
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise PerfsuiteError(f"{option}: cannot read {root}: {reason}; make it readable, or name another") from None
    names = [
        Path(folder, name).relative_to(root).as_posix()
        for folder, _, inside in os.walk(root)
        for name in inside
        if name.lower().endswith(SUFFIXES)
    ]
    if not names:
        raise PerfsuiteError(f"{option} {root} holds no WAV or FLAC recording, nor do the folders in it; name another")
    return sorted(names)


def in_order(names: Sequence[str], seed: int) -> list[str]:
    """Sort names by a hash of the seed and the name. The relative order of two names does not depend on the others."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed}/".encode() + os.fsencode(name)).digest())


def library() -> Any:
    """Import and return soundfile; PerfsuiteError if that fails."""
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: libsndfile is missing
        raise PerfsuiteError(
            "recordings need the package soundfile, which cannot be imported; pip install 'perfsuite[train]', "
            "or leave --from out for synthetic recordings"
        ) from None
    return soundfile


def key_of(path: Path, *kinds: str) -> str:
    """Return a key for the parts of a recording. The key changes when the file changes.

    UnusableError if the path is not a regular file or cannot be accessed.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise UnusableError(f"damaged: {error.strerror or error}") from None
    if not S_ISREG(stat.st_mode):  # reading a pipe would block
        raise UnusableError("unsuited: no regular file")
    return digest_of([VERSION, *kinds, os.fsencode(path.resolve()).hex(), stat.st_size, stat.st_mtime_ns])[:32]


def read(path: Path) -> Array:
    """Read a recording as mono at 4096 Hz, float32 [samples].

    Blocks of 10 s are resampled separately, so that an hour of sound needs 120 MB at any sample rate.

    UnusableError if the recording is damaged, silent or too short, or has an unsuitable sample rate.
    """
    soundfile = library()
    parts: list[Array] = []
    try:
        _whole(path)
        with soundfile.SoundFile(os.fsencode(path)) as file:
            rate, expected = file.samplerate, file.frames
            if not RATES[0] <= rate <= RATES[1]:
                raise UnusableError(f"unsuited: sampled at {rate} Hz, not at {RATES[0]} to {RATES[1]}")
            for block in _blocks(file, 10 * rate):
                expected -= len(block)
                if not (numpy.abs(block) < LOUDEST).all():  # also fails for NaN
                    raise UnusableError("damaged: a sample is no number, or far above full scale")
                parts.append(resampled(block.mean(axis=1), rate).astype(numpy.float32))
    except (OSError, soundfile.SoundFileError) as error:
        reason = getattr(error, "error_string", None) or getattr(error, "strerror", None) or str(error)
        raise UnusableError(f"damaged: {' '.join(reason.split()).rstrip('.')}") from None
    if expected:
        raise UnusableError("damaged: ends before its last sample")
    samples = numpy.concatenate(parts) if parts else numpy.zeros(0, numpy.float32)
    if len(samples) < SHORTEST:
        raise UnusableError(f"short: {len(samples) / SAMPLE_RATE:.2g} s, less than {SHORTEST / SAMPLE_RATE:.1g} s")
    if not stretches(0, samples):
        raise UnusableError(f"silent: below {SILENT_DB:.0f} dB of full scale throughout")
    return samples


def _whole(path: Path) -> None:
    """Raise UnusableError if a WAV file is shorter than its header says; libsndfile would not report it."""
    with path.open("rb") as file:
        head = file.read(8)
    size = int.from_bytes(head[4:8], "little")
    if head[:4] == b"RIFF" and size not in UNKNOWN and size + 8 > path.stat().st_size + 1:  # a pad byte may be missing
        raise UnusableError("damaged: cut off")


def _blocks(file: Any, frames: int) -> Iterator[Array]:
    """Yield blocks [frames, channels]; the last block may be shorter."""
    while len(block := file.read(frames, dtype="float64", always_2d=True)):
        yield block


def resampled(samples: Array, rate: int) -> Array:
    """Resample to 4096 Hz with SciPy's polyphase filter. 10 s at any integer rate give 40960 samples."""
    if rate == SAMPLE_RATE:
        return samples
    from scipy.signal import resample_poly

    common = gcd(rate, SAMPLE_RATE)
    made: Array = resample_poly(samples, SAMPLE_RATE // common, rate // common)
    return made


def stretches(recording: int, samples: Array) -> list[Stretch]:
    """Cut a recording into stretches of 10 s; the last may be shorter. Silent or too short stretches are omitted."""
    cut = [Stretch(recording, start, min(SAMPLES, len(samples) - start)) for start in range(0, len(samples), SAMPLES)]
    return [s for s in cut if s.length >= SHORTEST and rms(samples[s.start : s.start + s.length]) >= gain(SILENT_DB)]


def divided(stretches: Sequence[Stretch], share: float) -> tuple[list[Stretch], list[Stretch]]:
    """Divide stretches into (training, validation). Validation gets about `share` of the total time.

    With two or more stretches, neither list is empty.
    """
    wanted = share * sum(s.length for s in stretches)
    kept, taken = 0, 0
    for stretch in stretches[:-1]:
        if kept and taken + stretch.length / 2 > wanted:
            break
        kept, taken = kept + 1, taken + stretch.length
    return list(stretches[kept:]), list(stretches[:kept])


def pieces(stretches: Sequence[Stretch], most: int, reuse: int, order: Callable[[int], Array]) -> list[list[Stretch]]:
    """Return at most `most` pieces of 10 s, each a list of stretches. They are assembled in up to `reuse` rounds.

    A round uses each stretch once, in the order that `order(round)` returns. A stretch of 10 s is a piece by itself.
    Shorter stretches are joined until they fill a piece. The rest of the last stretch, if it is 0.1 s or longer, begins
    the next piece. The next round continues an unfinished piece.
    """
    made: list[list[Stretch]] = []
    begun: list[Stretch] = []
    lacking = SAMPLES
    for turn in range(reuse if stretches else 0):
        for position in order(turn):
            stretch = stretches[int(position)]
            if stretch.length == SAMPLES:
                made.append([stretch])
            else:
                begun.append(Stretch(stretch.recording, stretch.start, min(stretch.length, lacking)))
                over = stretch.length - lacking
                lacking -= begun[-1].length
                if lacking == 0:
                    made.append(begun)
                    begun, lacking = [], SAMPLES
                    if over >= SHORTEST:
                        begun = [Stretch(stretch.recording, stretch.start + stretch.length - over, over)]
                        lacking -= over
            if len(made) >= most:
                return made[:most]
    return made


def joined(piece: Sequence[Stretch], load: Callable[[int], Array]) -> Array:
    """Return the samples of a piece, float64 [40960]. Each stretch is faded in and out.

    load  function: number of a recording → its samples
    """
    ramp = 0.5 - 0.5 * numpy.cos(numpy.pi * (numpy.arange(FADE) + 0.5) / FADE)
    parts = []
    for stretch in piece:
        part = load(stretch.recording)[stretch.start : stretch.start + stretch.length].astype(numpy.float64)
        part[: min(FADE, len(part))] *= ramp[: len(part)]
        part[-min(FADE, len(part)) :] *= ramp[: len(part)][::-1]
        parts.append(part)
    return numpy.concatenate(parts)
