"""The epochs of leak_cnn and their data. The shared training loop passes the epochs to a trainer one by one.

A batch of that loop is the number of an epoch. The seed and this number determine the order of the segments
(`suite.batching.permutation`), so a trainer needs nothing else to find them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from suite.batching import check_identity, whole
from suite.leak_cnn.build import build
from suite.leak_cnn.dataset import LeakAudio, open_data
from suite.leak_cnn.sources import Recipe
from suite.progress import Bar
from suite.text import CACHE, check_cache

if TYPE_CHECKING:
    from suite.leak_cnn.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Data:
    """The fields of a configuration that describe the data."""

    data: str | None = None
    """File written by `perfsuite data leak-audio`; null: a synthetic data set that is made once and kept in `cache`."""
    train_files: int = 500
    """Training files of the synthetic data set, with 80 segments each."""
    validation_files: int = 125
    """Validation files of the synthetic data set."""
    batch_size: int = 5632
    epochs: int = 200
    seed: int = 0
    """Seed for the order of the segments. The synthetic data set does not depend on it."""
    cache: str = CACHE
    """Folder of the synthetic data set."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The epochs and the data set for a trainer, and a line that describes them."""

    batches: Epochs
    trainer_data: LeakAudio
    summary: str


def load(data: Data) -> Loaded:
    """Open the data set and return its epochs.

    PerfsuiteError if the data set is missing or invalid, or has fewer training segments than a batch.
    """
    audio = audio_of(data)
    audio.check_batch("train", data.batch_size)
    return Loaded(
        batches=Epochs(audio, data.batch_size, data.epochs, data.seed), trainer_data=audio, summary=audio.summary
    )


def audio_of(data: Data) -> LeakAudio:
    """Open the data set. Without a path, open the synthetic one, which is built if it does not exist."""
    if data.data is not None:
        return open_data(data.data)
    recipe = Recipe(train=data.train_files, validation=data.validation_files)
    check_cache(Path(data.cache))
    path = Path(data.cache) / f"leak-{recipe.train}-{recipe.validation}.h5"
    with Bar() as bar:
        build(path, recipe, bar)
    return open_data(path)


def for_ablation(
    config: TrainConfig, data: Data, device: torch.device
) -> tuple[LeakAudio, Iterator[Mapping[str, torch.Tensor]]]:
    """Return (data set, endless iterator of epochs) for `perfsuite ablate`."""
    audio = audio_of(data)
    audio.check_batch("train", config.batch_size)
    return audio, ({"epoch": torch.tensor(number)} for number in itertools.count())


class Epochs:
    """Iterator of batches {"epoch": number}, int64 [] on the CPU, with numbers from 0 to `count` - 1."""

    unit = "segments"

    def __init__(self, audio: LeakAudio, batch_size: int, count: int, seed: int) -> None:
        self.batch_size, self.total, self.seed, self.digest = batch_size, count, seed, audio.digest
        self.segments = audio.segments("train") // batch_size * batch_size
        """Segments per epoch: a multiple of the batch size."""
        self.epoch = 0

    def __iter__(self) -> Epochs:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        if self.epoch >= self.total:
            raise StopIteration
        self.epoch += 1
        return {"epoch": torch.tensor(self.epoch - 1)}

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of segments per epoch."""
        return self.segments

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the data and settings to which it belongs."""
        return {"epoch": self.epoch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position. PerfsuiteError if it belongs to other data; ValueError if it is invalid."""
        check_identity(state, self._identity())
        self.epoch = whole(state, "epoch")

    def _identity(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "seed": self.seed, "digest": self.digest}
