"""Reader for leak_cnn's data set: checks the file as a whole, then reads single segments or a whole split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import Dataset

from perfsuite.errors import PerfsuiteError, first_line
from suite import hdf5
from suite.leak_cnn import storage
from suite.leak_cnn.classes import CLASSES, LEAK
from suite.leak_cnn.features import (
    ALL_SPLITS,
    FLOOR,
    LONG_WINDOW,
    LONGS,
    MELS,
    N_FFT,
    SAMPLE_RATE,
    SEGMENTS,
    SHORT_WINDOW,
    SHORTS,
    SPLITS,
    Array,
)

SHAPE = (LONGS, SHORTS, MELS, 1)
"""Shape of a file's features."""
KINDS = {"features": "f2", "labels": "i8", "splits": "i1", "snr_db": "f4", "class_names": "S", "split_names": "S"}
WANTED = {
    "sample_rate": SAMPLE_RATE,
    "long_window": LONG_WINDOW,
    "short_window": SHORT_WINDOW,
    "n_fft": N_FFT,
    "mels": MELS,
    "centre": False,
    "power": 1,
    "mel_scale": "HTK, no norm",
    "decibels": f"20 log10(max(m, {FLOOR:g}))",
}
"""Required attributes of a data set. With other values, the features would differ."""


Example = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(mels float16 [32, 1], label int64 [], leak float32 [])."""


class Audio(Protocol):
    """Interface that a trainer requires of a data set."""

    def segments(self, split: str) -> int:
        """Return the number of segments of a split."""

    def counts(self, split: str) -> torch.Tensor:
        """Return the number of segments of each class, int64 [5]."""

    def examples(self, split: str) -> Dataset[Example]:
        """Return a PyTorch data set of single segments, for a loader."""

    def read(self, split: str) -> Split:
        """Read all segments of a split at once."""


@dataclass(frozen=True, kw_only=True)
class LeakAudio:
    """A data set that passed all checks. It is small, holds no open file and can be pickled."""

    path: str
    source: str
    digest: str
    labels: torch.Tensor
    """int64 [files]: class of each file"""
    files: Mapping[str, range]
    """Split → range of its files."""
    labelled: str = "synthetic"
    """Origin of the labels: "synthetic" or "folders"."""

    @property
    def summary(self) -> str:
        """One-line description: the file, its source and the number of files in each split."""
        labels = "labelled by their folders" if self.labelled == "folders" else "synthetic labels"
        parts = ", ".join(f"{len(found)} for {split}" for split, found in self.files.items())
        return f"data: {self.path} of {self.source}, {labels}: files {parts}, of {SEGMENTS} segments"

    def segments(self, split: str) -> int:
        """Return the number of segments of a split."""
        return len(self.files[split]) * SEGMENTS

    def counts(self, split: str) -> torch.Tensor:
        """Return the number of segments of each class, int64 [5]."""
        found = self.files[split]
        return torch.bincount(self.labels[found.start : found.stop], minlength=len(CLASSES)) * SEGMENTS

    def examples(self, split: str) -> Segments:
        """Return a PyTorch data set of single segments, which are read from the file."""
        return Segments(self, split)

    def read(self, split: str) -> Split:
        """Read a whole split at once."""
        return read_split(self, split)

    def check_batch(self, split: str, batch_size: int, field: str = "batch_size") -> None:
        """Raise PerfsuiteError if the split has fewer segments than a batch."""
        if batch_size > self.segments(split):
            raise PerfsuiteError(
                f"{field}: {batch_size} is more than the {self.segments(split)} segments for {split} in {self.path}; "
                "lower it, or make a larger set with `perfsuite data leak-audio`"
            )


@dataclass(frozen=True, kw_only=True)
class Split:
    """All segments of a split, ordered by file and then by time."""

    features: torch.Tensor
    """float16 [N, 1, 32, 1]"""
    labels: torch.Tensor
    """int64 [N]"""
    leaks: torch.Tensor
    """float32 [N]: 1 if the file has the class LEAK, else 0"""
    files: torch.Tensor
    """int64 [N]: index of the segment's file within the split"""

    def by_file(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (mels [files, long windows, short windows, 32, 1], bool [files]: True for the class LEAK)."""
        files = int(self.files[-1]) + 1
        return self.features.view(files, -1, SHORTS, MELS, 1), self.leaks.view(files, -1)[:, 0] > 0


def open_data(path: str | Path) -> LeakAudio:
    """Open a data set after a full check, including its digest.

    PerfsuiteError if a check fails; its one-line message names the problem.
    """
    path = Path(path)
    if not path.is_file():
        raise PerfsuiteError(f"data: there is no file {path}; make it with `perfsuite data leak-audio {path}`")
    try:
        with hdf5.library().File(path, "r") as file:
            attributes = hdf5.attributes_of(file)
            if attributes.get("format") != storage.FORMAT:
                raise _wrong(path, f"is no {storage.FORMAT} data set")
            content = _content(path, file, attributes)
    except hdf5.ERRORS as error:
        raise _wrong(path, f"is damaged, or no HDF5 file: {_first_line(error)}") from None
    labelled = str(attributes.get("label_source", "")).partition(":")[0]
    if hdf5.content_digest(content) != attributes.get("digest"):
        raise _wrong(path, "is damaged: its content is not what was written")
    return LeakAudio(
        path=str(path),
        source=str(attributes.get("source", "an unknown source")),
        digest=str(attributes["digest"]),
        labels=torch.from_numpy(content["labels"]),
        files=_files(path, content, labelled=labelled == "folders"),
        labelled=labelled,
    )


def read_split(data: LeakAudio, split: str) -> Split:
    """Read a whole split into memory, which takes 5 KiB per file."""
    files = data.files[split]
    with storage.opened(data.path, data.digest) as file:
        features = file["features"][files.start : files.stop]
    labels = data.labels[files.start : files.stop].repeat_interleave(SEGMENTS)
    return Split(
        features=torch.from_numpy(features).view(-1, 1, MELS, 1),
        labels=labels,
        leaks=(labels == LEAK).float(),
        files=torch.arange(len(files)).repeat_interleave(SEGMENTS),
    )


class Segments(hdf5.Reader, Dataset[Example]):
    """The segments of a split, read from the file one by one: (mels float16 [32, 1], label int64 [], leak float32 []).

    The object can be pickled: each process opens the file itself when it first reads.
    """

    def __init__(self, data: LeakAudio, split: str) -> None:
        super().__init__()
        self.data = data
        self.split = split

    def __len__(self) -> int:
        return self.data.segments(self.split)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        place, segment = divmod(index % len(self), SEGMENTS)
        file = self.data.files[self.split][place]
        label = self.data.labels[file]
        mels = self._opened()["features"][file, segment // SHORTS, segment % SHORTS]
        return torch.from_numpy(mels), label, (label == LEAK).float()

    def _open(self) -> Any:
        return storage.opened(self.data.path, self.data.digest)


def _wrong(path: Path, what: str) -> PerfsuiteError:
    return PerfsuiteError(f"data: {path} {what}; name another, or make one with `perfsuite data leak-audio`")


def _first_line(error: BaseException) -> str:
    return first_line(error) or type(error).__name__


def _content(path: Path, file: Any, attributes: Mapping[str, Any]) -> dict[str, Array]:
    """Read all datasets. PerfsuiteError if one has a wrong type or shape, or if an attribute has a wrong value."""
    for name, value in WANTED.items():
        if attributes.get(name) != value:
            raise _wrong(path, f"has {name} {attributes.get(name)}, where the trainer needs {value}")
    for name, kind in KINDS.items():
        if name not in file:
            raise _wrong(path, f"has no dataset {name!r}")
        if not file[name].dtype.str[1:].startswith(kind):
            raise _wrong(path, f"has {name} of type {file[name].dtype}, where {numpy.dtype(kind)} is needed")
    shape = file["features"].shape
    if len(shape) != 5 or shape[1:] != SHAPE:
        raise _wrong(path, f"has features of the shape {list(shape)}, where [files, {str(list(SHAPE))[1:]} is needed")
    for name in ("labels", "splits", "snr_db"):
        if file[name].shape != shape[:1]:
            raise _wrong(path, f"has {list(file[name].shape)} {name} for {shape[0]} files")
    content = {name: file[name][()] for name in KINDS}
    for name, accepted in (("class_names", (CLASSES,)), ("split_names", (SPLITS, ALL_SPLITS))):
        names = _names(content[name])
        if names not in accepted:
            raise _wrong(path, f"has {name} {', '.join(names)}, where the trainer needs {', '.join(accepted[0])}")
    return content


def _names(values: Array) -> tuple[str, ...]:
    return tuple(value.decode(errors="replace") for value in values.reshape(-1))


def _files(path: Path, content: Mapping[str, Array], *, labelled: bool) -> dict[str, range]:
    """Return split → range of its files. PerfsuiteError if the files of a split are not contiguous, or lack a class.

    labelled  True if the labels come from folders. Then a class may be absent from all splits, but LEAK and at least
              one other class are required.
    """
    labels, splits = content["labels"], content["splits"]
    present = [n for n in range(len(CLASSES)) if not labelled or (labels == n).any()]
    if LEAK not in present or len(present) < 2:
        raise _wrong(
            path, f"has files of {', '.join(CLASSES[n] for n in present)}, where LEAK and another class are needed"
        )
    found = {}
    for number, name in enumerate(_names(content["split_names"])):
        (where,) = numpy.nonzero(splits == number)
        lacking = [CLASSES[n] for n in present if not (labels[where] == n).any()]
        if lacking:
            raise _wrong(path, f"has no file of {', '.join(lacking)} for {name}")
        found[name] = range(int(where[0]), int(where[-1]) + 1)
        if len(found[name]) != len(where):
            raise _wrong(path, f"has the files for {name} scattered")
    if not ((labels >= 0) & (labels < len(CLASSES))).all():
        raise _wrong(path, f"has labels outside 0 to {len(CLASSES) - 1}")
    return found
