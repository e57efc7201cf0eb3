"""Metrics of an epoch's confusion matrix: accuracy and macro-averaged F1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perfsuite.errors import PerfsuiteError

Confusion = Sequence[Sequence[int]]
"""Counts [classes, classes]: a row for each true class, a column for each predicted one."""


class EpochMetrics(NamedTuple):
    """Metrics over all examples of an epoch. `loss` is the mean loss, with each batch weighted by its size."""

    loss: float
    accuracy: float
    f1: float
    confusion: list[list[int]]


def examples(confusion: Confusion) -> int:
    """Return the number of examples in a confusion matrix. PerfsuiteError if it is not square or counts none."""
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
    """Return the share of examples that were predicted correctly."""
    return sum(row[i] for i, row in enumerate(confusion)) / examples(confusion)


def macro_f1(confusion: Confusion) -> float:
    """Return the unweighted mean over classes of 2 TP / (2 TP + FP + FN).

    A class that is neither a true nor a predicted class of any example has no F1 and is left out of the mean. A class
    that is only one of the two has an F1 of 0. (scikit-learn's `f1_score(average="macro")` does the same.)

    Source: leak_cnn.
    """
    examples(confusion)
    scores = []
    for i, row in enumerate(confusion):
        both = sum(row) + sum(other[i] for other in confusion)  # 2 TP + FP + FN
        if both:
            scores.append(2 * row[i] / both)
    return sum(scores) / len(scores)
