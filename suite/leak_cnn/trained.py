"""Evaluation of a trained leak_cnn network on a split of a data set, and prediction for recordings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from perfsuite.errors import PerfsuiteError
from suite.configuration import known
from suite.leak_cnn import recordings
from suite.leak_cnn.classes import CLASSES
from suite.leak_cnn.config import TrainConfig
from suite.leak_cnn.dataset import LeakAudio
from suite.leak_cnn.features import SAMPLE_RATE, SAMPLES, Array, features
from suite.leak_cnn.loss import class_weights, leak_cnn_loss
from suite.leak_cnn.metrics import EpochMetrics, accuracy, macro_f1
from suite.leak_cnn.model import forward, shapes
from suite.leak_cnn.report import Validation
from suite.naming import shown
from suite.runtime.weights import check_weights
from suite.techniques import implementation

FILES = 256
"""Number of files of 10 s that are evaluated at once."""


class Piece(NamedTuple):
    """The prediction for 10 s of a recording."""

    begin: float
    """Start within the recording, in s."""
    end: float
    """End within the recording, in s."""
    leak: bool
    """True if at least half of the long windows reach the threshold."""
    probability: float
    """Mean probability of LEAK over the long windows."""
    classes: tuple[float, ...]
    """Mean probability of each class over the segments."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A network with the best weights of a checkpoint, or with its last weights if there was no validation."""

    weights: Mapping[str, torch.Tensor]
    config: TrainConfig
    epoch: int
    """Epoch of the best weights, counted from 1; 0: the last weights."""
    device: torch.device

    @torch.no_grad()
    def __call__(self, mels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (class logits [N, 5], leak logits [N], leak probabilities [files, longs], leak decisions [files]).

        mels  [files, longs, shorts, 32, 1], with N = files · longs · shorts segments
        """
        judge = implementation("evaluation.file_level_eval", "file_level_eval", optimized=True)
        logits: list[tuple[torch.Tensor, torch.Tensor]] = []

        def call(segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits.append(forward(self.weights, segments))
            return logits[-1]

        p, leaks = judge(call, mels.to(self.device, torch.float32), self.config.threshold)
        classes, leak = (torch.cat(parts) for parts in zip(*logits, strict=True))
        return classes, leak, p, leaks

    def evaluated(self, data: LeakAudio, split: str) -> Validation:
        """Compute the metrics of a split. PerfsuiteError if the data set does not have it."""
        if split not in data.files:
            raise PerfsuiteError(
                f"--split {split}: {data.path} has {', '.join(data.files)} alone; sets of labelled recordings have test"
            )
        whole = data.read(split)
        mels, is_leak = whole.by_file()
        balance = class_weights(data.counts("train")).to(self.device)
        confusion = torch.zeros(len(CLASSES), len(CLASSES), dtype=torch.int64)
        files = torch.zeros(2, 2, dtype=torch.int64)
        loss = 0.0
        for some, labels, wanted in zip(
            mels.split(FILES), whole.labels.view(len(mels), -1).split(FILES), is_leak.split(FILES), strict=True
        ):
            own = labels.flatten().to(self.device)
            classes, leak, _, found = self(some)
            loss += len(own) * float(leak_cnn_loss(classes, leak, own, balance))
            _count(confusion, own, classes.argmax(1))
            _count(files, wanted.long(), found.long())
        segments = EpochMetrics(
            loss=loss / len(whole.labels),
            accuracy=accuracy(confusion.tolist()),
            f1=macro_f1(confusion.tolist()),
            confusion=confusion.tolist(),
        )
        return Validation(segments=segments, files=files.tolist())

    def judged(self, samples: Array) -> list[Piece]:
        """Return the predictions for each 10 s of a recording, float32 [samples] at 4096 Hz.

        The last piece is the last 10 s of the recording and may overlap the piece before it. A recording shorter than
        10 s is repeated to fill a piece.
        """
        starts = list(range(0, len(samples) - SAMPLES + 1, SAMPLES)) or [0]
        if len(samples) - starts[-1] > SAMPLES:
            starts.append(len(samples) - SAMPLES)
        repeated = numpy.resize(samples, max(len(samples), SAMPLES))
        mels = torch.from_numpy(numpy.stack([features(repeated[start : start + SAMPLES]) for start in starts]))
        made: list[Piece] = []
        for some, at in zip(mels.split(FILES), _chunks(starts), strict=True):
            classes, _, p, found = self(some)
            shares = classes.softmax(1).view(len(some), -1, len(CLASSES)).mean(1)
            rows = zip(at, found.tolist(), p.mean(1).tolist(), shares.tolist(), strict=True)
            for start, leaks, probability, own in rows:
                end = min(start + SAMPLES, len(samples)) / SAMPLE_RATE
                made.append(Piece(start / SAMPLE_RATE, end, bool(leaks), probability, tuple(own)))
        return made


def trained_of(path: Path, state: Mapping[str, Any], device: torch.device) -> Trained:
    """Return the network of a checkpoint's state. PerfsuiteError if the state is damaged or a weight is not finite."""
    try:
        best = state["best"]
        chosen = best["weights"] if best["epoch"] else state["weights"]
        config = TrainConfig(**known(TrainConfig, state["config"]))
        expected = {
            name: torch.empty(shape, device="meta") for name, shape in shapes(config.channels, config.hidden).items()
        }
        check_weights(expected, chosen)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise PerfsuiteError(f"{shown(path)} is damaged: {reason}; name another") from None
    weights = {name: weight.to(device, torch.float32) for name, weight in chosen.items()}
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise PerfsuiteError(f"{shown(path)} has weights that are no finite numbers; name an earlier one")
    return Trained(weights=weights, config=config, epoch=int(best["epoch"]), device=device)


def sound_of(path: Path) -> Array:
    """Read the samples of a recording, float32 [samples] at 4096 Hz. PerfsuiteError if it cannot be used."""
    if not path.is_file():
        raise PerfsuiteError(f"{shown(path)} is no file; name a WAV or FLAC recording")
    try:
        return recordings.read(path)
    except recordings.UnusableError as error:
        raise PerfsuiteError(f"{shown(path)} cannot be judged: {error}; name another recording") from None


def _count(confusion: torch.Tensor, wanted: torch.Tensor, found: torch.Tensor) -> None:
    """Add predictions to a confusion matrix [classes, classes] in place; rows are true classes."""
    n = len(confusion)
    confusion += torch.bincount(wanted.cpu() * n + found.cpu(), minlength=n * n).view(n, n)


def _chunks(starts: list[int]) -> list[list[int]]:
    return [starts[at : at + FILES] for at in range(0, len(starts), FILES)]
