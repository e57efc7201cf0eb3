"""Builder of leak_cnn's data set from labelled recordings, where the folder of a recording names its class.

All pieces of a recording are in the same split. The data set depends only on the recordings, their relative paths and
the options.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from perfsuite.errors import PerfsuiteError
from suite import hdf5
from suite.building import Parts, Watcher, digest_of, digest_of_file, parts_beside
from suite.leak_cnn import features, recordings
from suite.leak_cnn.build import Built, attributes_of_features, other, refuse
from suite.leak_cnn.classes import CLASSES
from suite.leak_cnn.features import ALL_SPLITS, SAMPLES, TEST, Array
from suite.leak_cnn.sources import NAMED, printable
from suite.leak_cnn.storage import FORMAT, VERSION

LABELS = "folders: a recording's class is the name of its folder"
FEWEST = len(ALL_SPLITS)
"""Minimum number of recordings per class: one for each split."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Options of a data set of labelled recordings."""

    folder: Path
    """Folder that contains a folder of recordings for each class."""
    validation: float = 0.15
    """Fraction of the recordings of each class used for validation; at least one recording."""
    test: float = 0.15
    """Fraction of the recordings of each class used for testing; at least one recording."""
    seed: int = 0
    classes: Mapping[str, str] = field(default_factory=dict)
    """Folder name → class, for folders that do not have the name of their class."""

    def __post_init__(self) -> None:
        for name, share in (("validation-share", self.validation), ("test-share", self.test)):
            if not 0 < share < 1:
                raise PerfsuiteError(f"--{name} {share:g}: a share of the recordings; give more than 0, less than 1")
        if self.validation + self.test >= 1:
            raise PerfsuiteError(
                f"--validation-share {self.validation:g}, --test-share {self.test:g}: nothing is left to train on; "
                "lower them"
            )
        for name, kind in self.classes.items():
            if kind not in CLASSES:
                raise PerfsuiteError(f"--class {name}={kind}: there are the classes {', '.join(CLASSES)}; name one")


class Recording(NamedTuple):
    """A recording that was read, and its mels."""

    name: str
    digest: str
    """SHA-256 of its samples."""
    mels: Array
    """float16 [pieces of 10 s, 40, 2, 32, 1]"""


def build_labelled(out: Path, chosen: Labelled, watcher: Watcher, *, overwrite: bool = False) -> Built:
    """Build the data set `out`. PerfsuiteError if that fails, or if `out` exists and has other content."""
    hdf5.library()
    recordings.library()
    names = found(chosen)
    settings = _settings(chosen)
    refuse(out, settings, overwrite)
    try:
        with parts_beside(out) as parts:
            by_class, left_out = _read(chosen, names, parts, watcher)
            splits = {kind: _divided(chosen, kind, own) for kind, own in by_class.items()}
            identity = [[kind, r.name, r.digest] for kind, own in by_class.items() for r in own]
            recipe = digest_of({**settings, "recordings": identity, "classes": dict(chosen.classes)})
            kept = out.exists() and not overwrite
            if kept and hdf5.attributes(out).get("recipe") != recipe:
                raise other(out, "other recordings")
            counts = {
                split: Counter({kind: sum(len(r.mels) for r in own[split]) for kind, own in splits.items()})
                for split in ALL_SPLITS
            }
            if not kept:
                _write(out, splits, {**settings, **_sizes(counts)}, recipe, parts)
            parts.clear()
        count = sum(len(own) for own in by_class.values())
        source = f"{count} recordings of {printable(str(chosen.folder))}, labelled by their folders"
        if left_out:
            source += f"; left out: {', '.join(f'{n} {what}' for what, n in sorted(left_out.items()))}"
        return Built(sha256=digest_of_file(out), counts=counts, source=source, kept=kept)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PerfsuiteError(f"cannot write {out}: {reason}; name another file, or make room") from None


def found(chosen: Labelled) -> dict[str, list[str]]:
    """Return class → relative paths of its recordings.

    PerfsuiteError if a folder or recording belongs to no class, or if LEAK or every other class is missing.
    """
    root = chosen.folder
    if not root.is_dir():
        raise PerfsuiteError(f"--labelled {root} is no folder; name one that holds a folder for each class")
    if missing := sorted(set(chosen.classes) - {path.name for path in root.iterdir() if path.is_dir()}):
        raise PerfsuiteError(f"--class {missing[0]}={chosen.classes[missing[0]]}: {root} has no folder {missing[0]}")
    every: dict[str, list[str]] = {}
    for path in sorted(root.iterdir()):
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            if path.name.lower().endswith(recordings.SUFFIXES):
                raise PerfsuiteError(
                    f"--labelled {root}: the recording {printable(path.name)} is in no class's folder; move it into "
                    f"one of {', '.join(CLASSES)}"
                )
            continue
        kind = chosen.classes.get(path.name, path.name)
        if kind not in CLASSES:
            raise PerfsuiteError(
                f"--labelled {root}: the folder {printable(path.name)} is no class; there are {', '.join(CLASSES)}; "
                f"rename it, or name its class with --class {printable(path.name)}=CLASS"
            )
        every.setdefault(kind, []).extend(f"{path.name}/{name}" for name in recordings.found(path, "--labelled"))
    if "LEAK" not in every or len(every) < 2:
        raise PerfsuiteError(
            f"--labelled {root}: it has the classes {', '.join(sorted(every)) or 'none'}; give LEAK and one more"
        )
    return {kind: every[kind] for kind in CLASSES if kind in every}


def pieces(samples: Array) -> list[Array]:
    """Cut a recording into pieces of 10 s, float64 [40960] each. Silent pieces and a shorter remainder are dropped.

    If no piece has the full 10 s, the shorter stretches are repeated to make one.
    """
    cut = recordings.stretches(0, samples)
    whole = [[stretch] for stretch in cut if stretch.length == SAMPLES]
    if not whole:
        often = math.ceil(SAMPLES / recordings.SHORTEST) + 1
        whole = recordings.pieces(cut, 1, often, lambda turn: numpy.arange(len(cut)))
    return [recordings.joined(piece, lambda number: samples) for piece in whole]


def _read(
    chosen: Labelled, names: Mapping[str, list[str]], parts: Parts, watcher: Watcher
) -> tuple[dict[str, list[Recording]], Counter[str]]:
    """Return (class → usable recordings in random order, reason → number of recordings left out)."""
    total = sum(map(len, names.values()))
    done = 0
    seen: set[str] = set()
    left_out: Counter[str] = Counter()
    by_class: dict[str, list[Recording]] = {kind: [] for kind in names}
    for kind, own in names.items():
        for name in recordings.in_order(own, chosen.seed):
            watcher.progress("reading", done, total)
            done += 1
            try:
                recording = _recording(chosen.folder, name, parts)
                if recording.digest in seen:
                    raise recordings.UnusableError("repeated: the same sound as another")
            except recordings.UnusableError as reason:
                left_out[str(reason).split(":")[0]] += 1
                if sum(left_out.values()) <= NAMED:
                    watcher.say(f"left out {printable(name)}: {reason}")
                continue
            seen.add(recording.digest)
            by_class[kind].append(recording)
    watcher.progress("reading", total, total)
    return by_class, left_out


def _recording(root: Path, name: str, parts: Parts) -> Recording:
    """Return a recording with its mels. Use the saved parts if the file has not changed since they were saved."""
    path = root / name
    key = recordings.key_of(path, "labelled")
    mels, digest = (parts.load(f"part-{what}-{key}") for what in ("mels", "digest"))
    if mels is None or digest is None:
        samples = recordings.read(path)
        digest = numpy.frombuffer(hashlib.sha256(samples.data).digest(), dtype=numpy.uint8)
        mels = numpy.stack([features.features(piece) for piece in pieces(samples)])
        parts.save(f"part-mels-{key}", mels)
        parts.save(f"part-digest-{key}", digest)
    return Recording(printable(name), bytes(digest).hex(), numpy.array(mels))


def _divided(chosen: Labelled, kind: str, own: list[Recording]) -> dict[str, list[Recording]]:
    """Divide the recordings of a class: return split → recordings. PerfsuiteError if there are too few."""
    count = len(own)
    if count < FEWEST:
        raise PerfsuiteError(
            f"--labelled {chosen.folder}: of {kind} {count} recordings are usable; each of the splits "
            f"{', '.join(ALL_SPLITS)} needs one: give {FEWEST} or more"
        )
    test = max(1, round(chosen.test * count))
    validation = max(1, round(chosen.validation * count))
    while test + validation >= count:
        test, validation = max(1, test - 1), max(1, validation - 1)
    return {
        "train": own[test + validation :],
        "validation": own[test : test + validation],
        TEST: own[:test],
    }


def _settings(chosen: Labelled) -> dict[str, Any]:
    return {
        "format_version": VERSION,
        "seed": chosen.seed,
        "validation_share": chosen.validation,
        "test_share": chosen.test,
        "source": printable(chosen.folder.resolve().name),
    }


def _sizes(counts: Mapping[str, Counter[str]]) -> dict[str, int]:
    return {f"{split}_files": own.total() for split, own in counts.items()}


def _write(
    out: Path,
    splits: Mapping[str, Mapping[str, list[Recording]]],
    settings: Mapping[str, Any],
    recipe: str,
    parts: Parts,
) -> None:
    """Write the data set, which is assembled in memory: 5 KiB per piece of 10 s."""
    mels, labels, numbers = [], [], []
    for number, split in enumerate(ALL_SPLITS):
        for kind, own in splits.items():
            for recording in own[split]:
                mels.append(recording.mels)
                labels += [CLASSES.index(kind)] * len(recording.mels)
                numbers += [number] * len(recording.mels)
    content = {
        "features": numpy.concatenate(mels),
        "labels": numpy.array(labels, dtype=numpy.int64),
        "splits": numpy.array(numbers, dtype=numpy.int8),
        "snr_db": numpy.full(len(labels), numpy.nan, dtype=numpy.float32),
        "class_names": numpy.array(CLASSES, dtype="S"),
        "split_names": numpy.array(ALL_SPLITS, dtype="S"),
    }
    whole = parts.folder / "part-whole.h5"
    described = {"format": FORMAT, **settings, "recipe": recipe, **attributes_of_features(), "label_source": LABELS}
    hdf5.write(whole, content, described)
    os.replace(whole, out)
