"""Accuracy and macro-F1 of small confusion matrices."""

import pytest

from perfsuite import PerfsuiteError
from suite.leak_cnn.metrics import accuracy, examples, macro_f1

BY_HAND = [
    # Truth 0: 4 of 6 found; truth 1: 3 of 5; truth 2: 7 of 9. Predicted 7, 5 and 8.
    ([[4, 1, 1], [2, 3, 0], [1, 1, 7]], 14 / 20, (8 / 13 + 6 / 10 + 14 / 17) / 3),
    ([[5, 0], [0, 5]], 1.0, 1.0),
    ([[0, 5], [5, 0]], 0.0, 0.0),
    ([[3]], 1.0, 1.0),
    # The last class is neither true nor predicted, so it is omitted.
    ([[2, 1, 0], [1, 2, 0], [0, 0, 0]], 4 / 6, (4 / 6 + 4 / 6) / 2),
    # F1 is 0 for a class that is never predicted, and for one that is never true.
    ([[4, 0], [2, 0]], 4 / 6, (8 / 10 + 0) / 2),
    ([[4, 2], [0, 0]], 4 / 6, (8 / 10 + 0) / 2),
]


@pytest.mark.parametrize(("confusion", "right", "f1"), BY_HAND)
def test_scores_match_values_computed_by_hand(confusion, right, f1):
    assert accuracy(confusion) == pytest.approx(right)
    assert macro_f1(confusion) == pytest.approx(f1)


@pytest.mark.parametrize(("confusion", "right", "f1"), BY_HAND)
def test_scores_match_precision_and_recall_from_lists_of_labels(confusion, right, f1):
    """Precision and recall of each class are computed from the labels of all examples."""
    truth, predicted = [], []
    for i, row in enumerate(confusion):
        for j, count in enumerate(row):
            truth += [i] * count
            predicted += [j] * count
    scores = []
    for c in sorted(set(truth) | set(predicted)):
        hits = sum(t == p == c for t, p in zip(truth, predicted, strict=True))
        precision = hits / predicted.count(c) if c in predicted else 0.0
        recall = hits / truth.count(c) if c in truth else 0.0
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    assert macro_f1(confusion) == pytest.approx(sum(scores) / len(scores)) == pytest.approx(f1)
    assert examples(confusion) == len(truth)


@pytest.mark.parametrize("of", [accuracy, macro_f1])
def test_invalid_confusion_matrices_raise_error(of):
    with pytest.raises(PerfsuiteError, match="no example was counted; add a batch"):
        of([[0, 0], [0, 0]])
    with pytest.raises(PerfsuiteError, match=r"2 rows of 2, 3 columns; give one row and one column for each class"):
        of([[1, 0], [0, 1, 2]])
