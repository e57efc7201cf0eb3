"""Sources of the sound in leak_cnn's data: a folder of recordings, or synthetic recordings.

source: leak_cnn, technique 001 (data)
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
"""Most files of a split, of 5 KiB each."""
NAMED = 10
"""Most recordings that are named when they are left out; further ones are only counted."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options that determine a set, together with the recordings."""

    folder: Path | None = None
    """Folder of recordings; None: synthetic recordings."""
    train: int = 500
    validation: int = 125
    snr_db: tuple[float, float] = (-10.0, 10.0)
    seed: int = 0
    reuse: int = 10
    """Most files that use the same stretch of sound."""

    def __post_init__(self) -> None:
        for name in SPLITS:
            files = getattr(self, name)
            if files < len(CLASSES):
                raise PerfsuiteError(
                    f"--{name} {files}: each of the {len(CLASSES)} classes needs a file; give {len(CLASSES)} or more"
                )
            if files > MOST:
                raise PerfsuiteError(f"--{name} {files}: a set is put together in memory; give {MOST} or less")
        low, high = self.snr_db
        if not -100 <= low <= high <= 100:
            raise PerfsuiteError(f"--snr {low:g} {high:g}: give the lower end first, both within ±100 dB")

    @property
    def files(self) -> int:
        """Number of files in both splits."""
        return self.train + self.validation

    def random(self, *key: int) -> sounds.Generator:
        """Return an independent random generator for each key."""
        return numpy.random.default_rng([self.seed, *key])


class Source(Protocol):
    """A source of pieces of 10 s."""

    @property
    def summary(self) -> str:
        """One line that describes the source."""

    def identity(self) -> object:
        """Return all that the pieces depend on, as JSON values."""

    def piece(self, split: int, index: int) -> Array:
        """Return one piece of a split, [40960]."""


@dataclass(frozen=True)
class Synthetic:
    """Recordings made from the seed alone."""

    recipe: Recipe
    summary: str = "synthetic recordings of tones and noise"

    def identity(self) -> object:
        return "synthetic"

    def piece(self, split: int, index: int) -> Array:
        return sounds.synthetic_recording(self.recipe.random(1, split, index))


@dataclass
class Folder:
    """Recordings under a folder, read in an order that depends on the seed until there is enough sound."""

    recipe: Recipe
    root: Path
    parts: Parts
    watcher: Watcher
    summary: str = ""
    _names: list[str] = field(default_factory=list)
    """Names of the recordings' parts. The parts are not kept open, as each would need a file descriptor."""
    _identity: list[list[str]] = field(default_factory=list)
    _pieces: list[list[list[recordings.Stretch]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        recordings.library()
        names = recordings.in_order(recordings.found(self.root), self.recipe.seed)
        given, left_out, looked_at = self._read(names)
        seconds = sum(s.length for s in given) // SAMPLE_RATE
        self.summary = f"{len(self._names)} recordings of {printable(str(self.root))}, {seconds} s"
        if left_out:
            self.summary += f"; left out: {', '.join(f'{n} {what}' for what, n in sorted(left_out.items()))}"
        if looked_at < len(names):
            self.summary += f"; {len(names) - looked_at} more were not needed"
        if not given:
            raise PerfsuiteError(f"--from {self.root} holds no usable sound: {self.summary}")
        self._lay_out(given, seconds)

    def _read(self, names: list[str]) -> tuple[list[recordings.Stretch], Counter[str], int]:
        """Return the stretches, reason → number of recordings left out, and the number of recordings looked at."""
        given: list[recordings.Stretch] = []
        left_out: Counter[str] = Counter()
        seen: set[str] = set()
        wanted = self.recipe.files * SAMPLES
        have = 0
        for looked_at, name in enumerate(names):
            if have >= wanted:
                return given, left_out, looked_at
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
            given += cut
            have += sum(s.length for s in cut)
        return given, left_out, len(names)

    def _part(self, name: str) -> str:
        """Return the name of a recording's part. Read the recording if there is no part, or if the file has changed."""
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

    def _lay_out(self, given: list[recordings.Stretch], seconds: int) -> None:
        recipe = self.recipe
        for split, stretches in enumerate(recordings.divided(given, recipe.validation / recipe.files)):
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
    """Return a path as printable text; bytes that are not UTF-8 become replacement characters."""
    return os.fsencode(name).decode(errors="replace")
