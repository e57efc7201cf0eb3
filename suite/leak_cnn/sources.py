"""Sources of sound for leak_cnn's data set: a folder of recordings, or synthetic recordings.

Source: leak_cnn, technique 001 (data)
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy

from perfsuite.errors import PerfsuiteError
from suite.building import Parts, Watcher
from suite.leak_cnn import recordings, sounds
from suite.leak_cnn.classes import CLASSES
from suite.leak_cnn.features import SAMPLE_RATE, SAMPLES, SPLITS, Array

MOST = 100_000
"""Maximum number of files in a split, of 5 KiB each."""
NAMED = 10
"""Maximum number of unusable recordings that are reported by name. Further ones are only counted."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of a data set. Together with the recordings, they determine its content."""

    folder: Path | None = None
    """Folder of recordings; None: synthetic recordings."""
    train: int = 500
    """Number of training files."""
    validation: int = 125
    """Number of validation files."""
    snr_db: tuple[float, float] = (-10.0, 10.0)
    """Range of the signal-to-noise ratio in dB, from which each file's ratio is drawn."""
    seed: int = 0
    reuse: int = 10
    """Maximum number of times that a stretch of sound is used."""

    def __post_init__(self) -> None:
        least = len(CLASSES)
        for name in SPLITS:
            files = getattr(self, name)
            if files < least:
                raise PerfsuiteError(
                    f"{files} {name} files: each of the {least} classes needs a file; give {least} or more"
                )
            if files > MOST:
                raise PerfsuiteError(f"{files} {name} files: a set is put together in memory; give {MOST} or less")
        low, high = self.snr_db
        if not -100 <= low <= high <= 100:
            raise PerfsuiteError(f"--snr {low:g} {high:g}: give the lower end first, both within ±100 dB")

    @property
    def files(self) -> int:
        """Number of files in both splits."""
        return self.train + self.validation

    def random(self, *key: int) -> sounds.Generator:
        """Return a random generator for a key. The generators of different keys are independent."""
        return numpy.random.default_rng([self.seed, *key])


class Source(Protocol):
    """Interface of a source of pieces of 10 s."""

    @property
    def summary(self) -> str:
        """One-line description of the source."""

    def identity(self) -> object:
        """Return everything that the pieces depend on besides the recipe, as JSON values."""

    def piece(self, split: int, index: int) -> Array:
        """Return a piece of a split, [40960]."""


@dataclass(frozen=True)
class Synthetic:
    """Source of synthetic recordings. They depend only on the seed."""

    recipe: Recipe
    summary: str = "synthetic recordings of tones and noise"

    def identity(self) -> object:
        return "synthetic"

    def piece(self, split: int, index: int) -> Array:
        return sounds.synthetic_recording(self.recipe.random(1, split, index))


@dataclass
class Folder:
    """Source of the recordings in a folder. They are read in an order that depends on the seed, until they suffice."""

    recipe: Recipe
    root: Path
    parts: Parts
    watcher: Watcher
    summary: str = ""
    _names: list[str] = field(default_factory=list)
    """Names of the recordings' parts. Parts are opened on demand, because an open part uses a file descriptor."""
    _identity: list[list[str]] = field(default_factory=list)
    """Name and SHA-256 digest of the samples of each recording."""
    _pieces: list[list[list[recordings.Stretch]]] = field(default_factory=list)
    """Split → pieces → stretches."""

    def __post_init__(self) -> None:
        recordings.library()
        names = recordings.in_order(recordings.found(self.root), self.recipe.seed)
        stretches, left_out, looked_at = self._read(names)
        seconds = sum(s.length for s in stretches) // SAMPLE_RATE
        self.summary = f"{len(self._names)} recordings of {printable(str(self.root))}, {seconds} s"
        if left_out:
            self.summary += f"; left out: {', '.join(f'{n} {what}' for what, n in sorted(left_out.items()))}"
        if looked_at < len(names):
            self.summary += f"; {len(names) - looked_at} more were not needed"
        if not stretches:
            raise PerfsuiteError(f"--from {self.root} holds no usable sound: {self.summary}")
        self._lay_out(stretches, seconds)

    def _read(self, names: list[str]) -> tuple[list[recordings.Stretch], Counter[str], int]:
        """Return (stretches, reason → number of recordings left out, number of recordings examined)."""
        stretches: list[recordings.Stretch] = []
        left_out: Counter[str] = Counter()
        seen: set[str] = set()
        wanted = self.recipe.files * SAMPLES
        have = 0
        for looked_at, name in enumerate(names):
            if have >= wanted:
                return stretches, left_out, looked_at
            self.watcher.progress("reading", looked_at, len(names))
            try:
                part = self._part(name)
                samples = self._loaded(part)
                digest = hashlib.sha256(samples.data).hexdigest()
                if digest in seen:
                    raise recordings.UnusableError("repeated: the same sound as another")
            except recordings.UnusableError as reason:
                kind = str(reason).split(":")[0]
                left_out[kind] += 1
                if sum(left_out.values()) <= NAMED:
                    self.watcher.say(f"left out {printable(name)}: {reason}")
                continue
            seen.add(digest)
            cut = recordings.stretches(len(self._names), samples)
            self._names.append(part)
            self._identity.append([printable(name), digest])
            stretches += cut
            have += sum(s.length for s in cut)
        return stretches, left_out, len(names)

    def _part(self, name: str) -> str:
        """Return the name of a recording's part. Create the part if it is missing or the file has changed."""
        path = self.root / name
        part = f"part-recording-{recordings.key_of(path)}"
        if self.parts.load(part) is None:
            self.parts.save(part, recordings.read(path))
        return part

    def _loaded(self, part: str) -> Array:
        samples = self.parts.load(part)
        if samples is None:
            raise OSError(None, f"{self.parts.folder} has lost what was just written there")
        return samples

    def _lay_out(self, usable: list[recordings.Stretch], seconds: int) -> None:
        recipe = self.recipe
        for split, stretches in enumerate(recordings.divided(usable, recipe.validation / recipe.files)):
            wanted = getattr(recipe, SPLITS[split])

            def order(turn: int, split: int = split, count: int = len(stretches)) -> Array:
                return recipe.random(2, split, turn).permutation(count)

            made = recordings.pieces(stretches, wanted, recipe.reuse, order)
            if len(made) < wanted:
                raise PerfsuiteError(
                    f"--from {self.root}: {seconds} s of sound give {len(made)} files for {SPLITS[split]} where each "
                    f"stretch is used {recipe.reuse} times at most, not {wanted}; give more recordings, lower --train "
                    "and --validation, or raise --reuse"
                )
            self._pieces.append(made)

    def identity(self) -> object:
        return self._identity

    def piece(self, split: int, index: int) -> Array:
        return recordings.joined(self._pieces[split][index], lambda number: self._loaded(self._names[number]))


def printable(name: str) -> str:
    """Return a path as printable text. Bytes that are not UTF-8 become replacement characters."""
    return os.fsencode(name).decode(errors="replace")
