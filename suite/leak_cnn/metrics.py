"""Metrics that are computed from a confusion matrix: accuracy and macro-averaged F1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perfsuite.errors import PerfsuiteError

Confusion = Sequence[Sequence[int]]
"""Counts [classes, classes]: rows are true classes, columns are predicted classes."""


class EpochMetrics(NamedTuple):
    """Metrics over all examples of an epoch. `loss` is the mean over batches, weighted by their sizes."""

    loss: float
    accuracy: float
    f1: float
    confusion: list[list[int]]


def examples(confusion: Confusion) -> int:
    """Return the number of examples in a confusion matrix. PerfsuiteError if it is not square or has no examples."""
    if any(len(row) != len(confusion) for row in confusion):
        widths = sorted({len(row) for row in confusion})
        raise PerfsuiteError(
            f"confusion: {len(confusion)} rows of {', '.join(map(str, widths))} columns; give one row and one column "
            "for each class"
        )
    total = sum(map(sum, confusion))
    if not total:
        raise PerfsuiteError("confusion: no example was counted; add a batch before the metrics are asked for")
    return total


def accuracy(confusion: Confusion) -> float:
    """Return the fraction of examples that were predicted correctly."""
    return sum(row[i] for i, row in enumerate(confusion)) / examples(confusion)


def macro_f1(confusion: Confusion) -> float:
    """Return the unweighted mean over classes of 2 TP / (2 TP + FP + FN).

    A class that occurs neither as a true nor as a predicted class has no F1 and is omitted from the mean. A class that
    occurs only as one of them has an F1 of 0. scikit-learn's `f1_score(average="macro")` does the same.

    Source: leak_cnn.
    """
    examples(confusion)
    scores = []
    for i, row in enumerate(confusion):
        both = sum(row) + sum(other[i] for other in confusion)  # 2 TP + FP + FN
        if both:
            scores.append(2 * row[i] / both)
    return sum(scores) / len(scores)
