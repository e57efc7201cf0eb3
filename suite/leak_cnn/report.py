"""The report of an epoch of leak_cnn and a plot of the last validation, which both trainers use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfsuite.errors import PerfsuiteError
from suite import plotting
from suite.leak_cnn.classes import CLASSES
from suite.leak_cnn.metrics import Confusion, EpochMetrics, accuracy, macro_f1

FILE_CLASSES = ("no leak", "LEAK")
"""Class names in the confusion matrix of the files."""
PICTURE = "confusion.svg"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Metrics over all validation files, per segment and per file."""

    segments: EpochMetrics
    files: Confusion
    """Counts [2, 2]: rows are true classes, columns are predicted classes; LEAK is the second class."""

    def metrics(self) -> dict[str, float]:
        """Return `validation_loss`, `validation_accuracy`, `validation_f1`, `file_accuracy` and `file_f1`.

        The first three are computed over the segments.
        """
        return {
            "validation_loss": self.segments.loss,
            "validation_accuracy": self.segments.accuracy,
            "validation_f1": self.segments.f1,
            "file_accuracy": accuracy(self.files),
            "file_f1": macro_f1(self.files),
        }

    @property
    def summary(self) -> str:
        """One line with the accuracy and macro-F1 of segments and files."""
        return (
            f"{100 * self.segments.accuracy:.1f}% of the segments, macro-F1 {self.segments.f1:.3f}; "
            f"{100 * accuracy(self.files):.1f}% of the files, macro-F1 {macro_f1(self.files):.3f}"
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of an epoch."""

    epoch: int
    """Number of the epoch, counted from 1."""
    rate: float
    """Learning rate."""
    losses: Sequence[float] = field(repr=False)
    """Losses of the steps in the epoch."""
    first_step: int
    """Number of steps before the epoch."""
    training: EpochMetrics
    validation: Validation | None

    def wrong(self) -> int | None:
        """Return the index of the epoch's first step whose loss is not finite; None if all are finite."""
        return next((i for i, loss in enumerate(self.losses) if not math.isfinite(loss)), None)

    def metrics(self) -> dict[str, float]:
        """Return the metrics for the shared training loop.

        `loss`, `accuracy` and `f1` are computed over the training segments. After a validation, the metrics of
        `Validation.metrics` are included. If a loss is not finite, `step` is the first such step of the run, counted
        from 1, and `loss` is its loss.
        """
        found = {
            "loss": self.training.loss,
            "accuracy": self.training.accuracy,
            "f1": self.training.f1,
            "learning_rate": self.rate,
            "window": self.epoch,
        }
        wrong = self.wrong()
        if wrong is not None:
            found |= {"loss": self.losses[wrong], "step": self.first_step + wrong + 1}
        return found if self.validation is None else {**found, **self.validation.metrics()}


def finish(trainer: Any, folder: Path) -> str | None:
    """Plot the confusion matrices of the last validation into `folder`, at the end of a run.

    Return a line for the user; None if there was no validation.
    """
    validation: Validation | None = trainer.validation()
    if validation is None:
        return None
    line = f"validation: {validation.summary}"
    try:
        plot(validation, folder / PICTURE)
    except PerfsuiteError as error:  # the run is already saved, so a missing plot is not a failure
        return f"{line}; {error}"
    return f"{line}; wrote {folder / PICTURE}"


def quality(trainer: Any, trainer_data: Any) -> dict[str, float]:
    """Return the metrics of the last validation, for `perfsuite ab`; empty if there was none."""
    validation: Validation | None = trainer.validation()
    return {} if validation is None else validation.metrics()


def plot(validation: Validation, path: Path) -> None:
    """Plot both confusion matrices to an SVG file. PerfsuiteError if matplotlib is not installed."""
    pyplot = plotting.pyplot("no confusion matrix was drawn, which needs matplotlib: pip install 'perfsuite[test]'")
    with plotting.style(pyplot):
        figure, both = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained", width_ratios=(3, 2))
        _matrix(both[0], validation.segments.confusion, CLASSES, "segments")
        _matrix(both[1], validation.files, FILE_CLASSES, "files")
        plotting.save(pyplot, figure, path)


def _matrix(axes: Any, confusion: Confusion, names: Sequence[str], what: str) -> None:
    """Draw a confusion matrix. A cell shows its count and is shaded by its share of the row."""
    shares = [[count / max(1, sum(row)) for count in row] for row in confusion]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i, row in enumerate(confusion):
        for j, count in enumerate(row):
            axes.text(j, i, str(count), ha="center", va="center", color="white" if shares[i][j] > 0.5 else "black")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("taken for")
    axes.set_ylabel("is")
    axes.set_title(f"{what}: {100 * accuracy(confusion):.1f}%")
