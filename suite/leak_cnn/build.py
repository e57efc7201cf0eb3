"""Builder of leak_cnn's data set: recordings → pieces of 10 s → sounds of five classes → mels → one HDF5 file.

The bytes of the file depend only on the recordings, their relative paths and the recipe. Finished parts are kept in a
folder next to the file until it is complete, so that a killed run can be resumed.

Source: leak_cnn, technique 001 (data)
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from perfsuite.errors import PerfsuiteError
from perfsuite.report.files import probe
from suite import hdf5
from suite.building import Parts, Watcher, digest_of, digest_of_file, parts_beside
from suite.leak_cnn import features, sounds
from suite.leak_cnn.classes import CLASSES
from suite.leak_cnn.features import SAMPLE_RATE, SAMPLES, SPLITS, Array
from suite.leak_cnn.sources import Folder, Recipe, Source, Synthetic, printable
from suite.leak_cnn.storage import FORMAT, VERSION

BLOCK = 32
"""Number of files whose mels are computed and saved together as one part."""
LABELS = "synthetic: every file's class was chosen by chance and its sound mixed so, see the attributes made_*"


@dataclass(frozen=True, kw_only=True)
class Built:
    """A finished data set."""

    sha256: str
    """SHA-256 of the file."""
    counts: Mapping[str, Mapping[str, int]]
    """Split → class → number of files."""
    source: str
    """One-line description of the recordings."""
    kept: bool
    """True if the requested data set already existed and was kept."""


def build(out: Path, recipe: Recipe, watcher: Watcher, *, overwrite: bool = False) -> Built:
    """Build the data set `out`. PerfsuiteError if that fails, or if `out` exists and has other content."""
    hdf5.library()
    refuse(out, _chosen(recipe), overwrite)
    try:
        with parts_beside(out) as parts:
            source: Source = Synthetic(recipe)
            if recipe.folder is not None:
                source = Folder(recipe, recipe.folder, parts, watcher)
            settings = _settings(recipe, source)
            kept = out.exists() and not overwrite
            if not kept:
                _made(out, recipe, source, settings, parts, watcher)
            elif hdf5.attributes(out).get("recipe") != digest_of(settings):
                raise other(out, "other recordings")
            parts.clear()
        return Built(
            sha256=digest_of_file(out),
            counts={
                name: Counter(CLASSES[label] for label in labels(recipe, split)) for split, name in enumerate(SPLITS)
            },
            source=source.summary,
            kept=kept,
        )
    except OSError as error:
        reason = error.strerror or str(error)
        raise PerfsuiteError(f"cannot write {out}: {reason}; name another file, or make room") from None


def labels(recipe: Recipe, split: int) -> list[int]:
    """Return the class of each file of a split, in random order. The class counts differ by at most one."""
    count = getattr(recipe, SPLITS[split])
    return [int(label) for label in recipe.random(3, split).permutation(numpy.arange(count) % len(CLASSES))]


def refuse(out: Path, chosen: Mapping[str, Any], overwrite: bool) -> None:
    """Raise PerfsuiteError if `out` is a folder or cannot be written.

    Without `overwrite`, also raise it if `out` exists and is not an intact data set with the attributes `chosen`.
    """
    if out.is_dir():
        raise PerfsuiteError(f"{out} is a folder; name the file to write, e.g. {out / 'leak.h5'}")
    if out.exists() and not overwrite:
        found = hdf5.attributes(out)
        if found.get("format") != FORMAT:
            raise PerfsuiteError(f"{out} exists and is no {FORMAT} data set; name another file, or give --overwrite")
        for name, value in chosen.items():
            if found.get(name) != value:
                raise other(out, f"{name} {found.get(name)}, not {value}")
        from suite.leak_cnn.dataset import open_data

        open_data(out)
    try:
        probe(out.parent)
    except OSError as error:
        raise PerfsuiteError(f"cannot write {out}: {error.strerror or error}; name another file") from None


def other(out: Path, what: str) -> PerfsuiteError:
    """Return the error for an existing `out` that is a different data set."""
    return PerfsuiteError(f"{out} exists and is another data set, of {what}; name another file, or give --overwrite")


def _chosen(recipe: Recipe) -> dict[str, Any]:
    """Return the data set attributes that a recipe determines."""
    return {
        "format_version": VERSION,
        "train_files": recipe.train,
        "validation_files": recipe.validation,
        "snr_db": list(recipe.snr_db),
        "seed": recipe.seed,
        "reuse": recipe.reuse,
        "source": "synthetic" if recipe.folder is None else printable(recipe.folder.resolve().name),
    }


def _settings(recipe: Recipe, source: Source) -> dict[str, Any]:
    return {**_chosen(recipe), "recordings": source.identity()}


def _made(out: Path, recipe: Recipe, source: Source, settings: dict[str, Any], parts: Parts, watcher: Watcher) -> None:
    """Compute and save the mels block by block, then write the complete file."""
    index = [(split, file) for split, name in enumerate(SPLITS) for file in range(getattr(recipe, name))]
    classes = [labels(recipe, split) for split in range(len(SPLITS))]
    snr = {key: recipe.random(4, *key).uniform(*recipe.snr_db) for key in index}

    def file_of(split: int, file: int) -> Array:
        sound = sounds.mixed(
            CLASSES[classes[split][file]], source.piece(split, file), snr[split, file], recipe.random(5, split, file)
        )
        return features.features(sound)

    blocks = []
    recipe_digest = digest_of(settings)
    for first in range(0, len(index), BLOCK):
        watcher.progress("making", first, len(index))
        keys = index[first : first + BLOCK]
        part = f"part-files-{recipe_digest[:32]}-{first}-{len(keys)}"
        block = parts.load(part)
        if block is None:
            block = numpy.stack([file_of(*key) for key in keys])
            parts.save(part, block)
        blocks.append(numpy.array(block))
    watcher.progress("making", len(index), len(index))
    noisy = {CLASSES.index("LEAK"), CLASSES.index("UNCLASSIFIED")}
    content = {
        "features": numpy.concatenate(blocks),
        "labels": numpy.array([label for split in classes for label in split], dtype=numpy.int64),
        "splits": numpy.array([split for split, _ in index], dtype=numpy.int8),
        "snr_db": numpy.array(
            [snr[s, f] if classes[s][f] in noisy else numpy.nan for s, f in index], dtype=numpy.float32
        ),
        "class_names": numpy.array(CLASSES, dtype="S"),
        "split_names": numpy.array(SPLITS, dtype="S"),
    }
    whole = parts.folder / "part-whole.h5"
    hdf5.write(whole, content, _described(settings))
    os.replace(whole, out)


def _described(settings: dict[str, Any]) -> dict[str, Any]:
    """Return all attributes of the file, except its digest."""
    chosen = {name: value for name, value in settings.items() if name != "recordings"}
    return {
        "format": FORMAT,
        **chosen,
        "recipe": digest_of(settings),
        **attributes_of_features(),
        "label_source": LABELS,
        "microphone": sounds.MICROPHONE,
        **{f"made_{name}": how for name, how in sounds.MADE.items()},
    }


def attributes_of_features() -> dict[str, Any]:
    """Return the attributes that describe how mels are computed. They are the same in every data set."""
    return {
        "sample_rate": SAMPLE_RATE,
        "samples": SAMPLES,
        "long_window": features.LONG_WINDOW,
        "short_window": features.SHORT_WINDOW,
        "n_fft": features.N_FFT,
        "hop": features.HOP,
        "centre": False,
        "window": "periodic Hann",
        "power": 1,
        "mels": features.MELS,
        "mel_scale": "HTK, no norm",
        "decibels": f"20 log10(max(m, {features.FLOOR:g}))",
    }
