"""What an epoch of leak_cnn reports, and the picture of it: the same from either trainer."""

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
PICTURE = "confusion.svg"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Of all validation files: their segments, and themselves."""

    segments: EpochMetrics
    files: Confusion
    """[2, 2]: rows are what the files are, columns what they were taken for; LEAK is the second."""

    def metrics(self) -> dict[str, float]:
        """`validation_loss`, `_accuracy` and `_f1` of the segments, `file_accuracy` and `file_f1`."""
        return {
            "validation_loss": self.segments.loss,
            "validation_accuracy": self.segments.accuracy,
            "validation_f1": self.segments.f1,
            "file_accuracy": accuracy(self.files),
            "file_f1": macro_f1(self.files),
        }

    @property
    def summary(self) -> str:
        """Accuracy and macro-F1 of segments and files, in one line."""
        return (
            f"{100 * self.segments.accuracy:.1f}% of the segments, macro-F1 {self.segments.f1:.3f}; "
            f"{100 * accuracy(self.files):.1f}% of the files, macro-F1 {macro_f1(self.files):.3f}"
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """An epoch's."""

    epoch: int
    """From 1."""
    rate: float
    losses: Sequence[float] = field(repr=False)
    """Of its steps."""
    first_step: int
    """Steps made before it."""
    training: EpochMetrics
    validation: Validation | None

    def wrong(self) -> int | None:
        """The first of its steps whose loss is no finite number, from 0; None where all are."""
        return next((i for i, loss in enumerate(self.losses) if not math.isfinite(loss)), None)

    def metrics(self) -> dict[str, float]:
        """As the shared loop takes them: `loss`, `accuracy` and `f1` are the training segments'.

        With a validation also `validation_loss`, `_accuracy` and `_f1` (segments) and `file_accuracy` and `file_f1`.
        Where a loss is no finite number, "step" is the first of which that holds.
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
    """At the end of a run: the last validation's confusion matrices into the folder; a line for the user, or None."""
    validation: Validation | None = trainer.validation()
    if validation is None:
        return None
    line = f"validation: {validation.summary}"
    try:
        plot(validation, folder / PICTURE)
    except PerfsuiteError as error:  # the run has been saved: a picture is no reason to fail
        return f"{line}; {error}"
    return f"{line}; wrote {folder / PICTURE}"


def quality(trainer: Any, given: Any) -> dict[str, float]:
    """The last validation's metrics, for `perfsuite ab`; empty where there was none."""
    validation: Validation | None = trainer.validation()
    return {} if validation is None else validation.metrics()


def plot(validation: Validation, path: Path) -> None:
    """Both confusion matrices, as SVG; PerfsuiteError where matplotlib is not installed."""
    pyplot = plotting.pyplot("no confusion matrix was drawn, which needs matplotlib: pip install 'perfsuite[test]'")
    with plotting.style(pyplot):
        figure, both = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained", width_ratios=(3, 2))
        _matrix(both[0], validation.segments.confusion, CLASSES, "segments")
        _matrix(both[1], validation.files, FILE_CLASSES, "files")
        plotting.save(pyplot, figure, path)


def _matrix(axes: Any, confusion: Confusion, names: Sequence[str], what: str) -> None:
    """Counts in cells that are shaded by their share of the row."""
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
