"""Recordings in a folder: found, read as mono at 4096 Hz, and laid out as pieces of 10 s."""

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
"""Lowest and highest sample rate in Hz. Below, a part of the band would be missing; no microphone samples faster."""
SILENT_DB = -60.0
"""RMS level relative to full scale, in dB, below which a stretch is silent."""
LOUDEST = 1000.0
"""60 dB above full scale. A recording with a sample this large is damaged."""
SHORTEST = SAMPLE_RATE // 10
FADE = SAMPLE_RATE // 200
"""Samples of the fade at a stretch's ends: 5 ms, so that a joint does not click as CRACK does."""
UNKNOWN = (0, 0xFFFFFFFF)
"""Sizes in the header of a WAV file by a program that could not seek back to write the real size."""


class UnusableError(Exception):
    """A recording cannot be used. The message says why; recordings are counted by the text before its colon."""


@dataclass(frozen=True)
class Stretch:
    """At most 10 s of a recording, from the sample `start`. A stretch is never in two splits."""

    recording: int
    start: int
    length: int


def found(root: Path, option: str = "--from") -> list[str]:
    """Return the recordings under a folder, as relative paths with `/`. PerfsuiteError if there are none."""
    if not root.is_dir():
        raise PerfsuiteError(f"{option} {root} is no folder; name one that holds WAV or FLAC recordings")
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
    """Shuffle the names by a hash of the seed and each name. Two names keep their order whatever the others are."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed}/".encode() + os.fsencode(name)).digest())


def library() -> Any:
    """Import and return soundfile; PerfsuiteError if that fails."""
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: without libsndfile
        raise PerfsuiteError(
            "recordings need the package soundfile, which cannot be imported; pip install 'perfsuite[train]', "
            "or leave --from out for synthetic recordings"
        ) from None
    return soundfile


def key_of(path: Path, *kinds: str) -> str:
    """Return a key for the parts made from a recording, which changes with the file.

    UnusableError if the path is no regular file.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise UnusableError(f"damaged: {error.strerror or error}") from None
    if not S_ISREG(stat.st_mode):  # reading a pipe would block
        raise UnusableError("unsuited: no regular file")
    return digest_of([VERSION, *kinds, os.fsencode(path.resolve()).hex(), stat.st_size, stat.st_mtime_ns])[:32]


def read(path: Path) -> Array:
    """Read a recording as mono at 4096 Hz, float32 [samples]; UnusableError if it is damaged, silent or too short.

    Blocks of 10 s are resampled separately, so that an hour needs 120 MB whatever its sample rate.
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
                if not (numpy.abs(block) < LOUDEST).all():  # NaN fails, too
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
    """Raise UnusableError if a WAV file is shorter than its header says: libsndfile would read it without an error."""
    with path.open("rb") as file:
        head = file.read(8)
    size = int.from_bytes(head[4:8], "little")
    if head[:4] == b"RIFF" and size not in UNKNOWN and size + 8 > path.stat().st_size + 1:  # a pad byte may be missing
        raise UnusableError("damaged: cut off")


def _blocks(file: Any, frames: int) -> Iterator[Array]:
    """Yield blocks [frames, channels]; the last one may be shorter."""
    while len(block := file.read(frames, dtype="float64", always_2d=True)):
        yield block


def resampled(samples: Array, rate: int) -> Array:
    """Resample to 4096 Hz by scipy's polyphase filter; 10 s at any integer rate give 40960 samples."""
    if rate == SAMPLE_RATE:
        return samples
    from scipy.signal import resample_poly

    common = gcd(rate, SAMPLE_RATE)
    made: Array = resample_poly(samples, SAMPLE_RATE // common, rate // common)
    return made


def stretches(recording: int, samples: Array) -> list[Stretch]:
    """Cut a recording every 10 s, and leave out stretches that are silent or too short."""
    cut = [Stretch(recording, start, min(SAMPLES, len(samples) - start)) for start in range(0, len(samples), SAMPLES)]
    return [s for s in cut if s.length >= SHORTEST and rms(samples[s.start : s.start + s.length]) >= gain(SILENT_DB)]


def divided(given: Sequence[Stretch], share: float) -> tuple[list[Stretch], list[Stretch]]:
    """Return stretches (for training, for validation); the latter get about `share` of the time.

    With two or more stretches neither list is empty.
    """
    wanted = share * sum(s.length for s in given)
    kept, taken = 0, 0
    for stretch in given[:-1]:
        if kept and taken + stretch.length / 2 > wanted:
            break
        kept, taken = kept + 1, taken + stretch.length
    return list(given[kept:]), list(given[:kept])


def pieces(given: Sequence[Stretch], most: int, reuse: int, order: Callable[[int], Array]) -> list[list[Stretch]]:
    """Return at most `most` pieces of 10 s, made in `reuse` rounds.

    A round uses each stretch once, in the order that `order(round)` gives. A stretch of 10 s is a piece by itself.
    Shorter stretches are joined. The rest of a stretch, if 0.1 s or longer, begins the next piece. An unfinished piece
    is continued in the next round.
    """
    made: list[list[Stretch]] = []
    begun: list[Stretch] = []
    lacking = SAMPLES
    for turn in range(reuse if given else 0):
        for position in order(turn):
            stretch = given[int(position)]
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
    """Return the samples of a piece, float64 [40960], with each stretch faded in and out.

    load  number of a recording → its samples
    """
    ramp = 0.5 - 0.5 * numpy.cos(numpy.pi * (numpy.arange(FADE) + 0.5) / FADE)
    parts = []
    for stretch in piece:
        part = load(stretch.recording)[stretch.start : stretch.start + stretch.length].astype(numpy.float64)
        part[: min(FADE, len(part))] *= ramp[: len(part)]
        part[-min(FADE, len(part)) :] *= ramp[: len(part)][::-1]
        parts.append(part)
    return numpy.concatenate(parts)
