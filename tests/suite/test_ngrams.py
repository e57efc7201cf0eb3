"""The Kneser–Ney model against an implementation that counts in dictionaries."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from suite import packed_text
from suite.eigenstate_lm.data import Text
from suite.eigenstate_lm.ngrams import KneserNey, _discounts, loss_of

V = 7


def drawn(length: int, seed: int = 0) -> Any:
    """Draw tokens that depend on the previous token. The vocabulary's last token never occurs."""
    random = numpy.random.default_rng(seed)
    row = [0]
    for _ in range(length - 1):
        row.append((row[-1] * 3 + int(random.integers(0, 2))) % (V - 1))
    return numpy.array(row, dtype=numpy.int64)


SPANS = [drawn(150), drawn(40, 1), drawn(2, 2)]


def by_dictionaries(spans: list[Any], order: int, history: list[int], token: int) -> float:
    """Compute the probability of a token after a history directly from the definition."""
    grams = {
        n: Counter(tuple(span[i : i + n].tolist()) for span in spans for i in range(len(span) - n + 1))
        for n in range(1, order + 1)
    }
    counts = {order: grams[order]}
    for n in range(1, order):
        counts[n] = Counter(gram[1:] for gram in grams[n + 1])

    def p(history: tuple[int, ...], n: int) -> float:
        if n == 0:
            return 1 / V
        context = history[len(history) - n + 1 :]
        of_all = [counts[n][gram] for gram in grams[n]]
        taken = _discounts(numpy.array(of_all))
        own = {gram[-1]: counts[n][gram] for gram in grams[n] if gram[:-1] == context}
        total = sum(own.values())
        if len(context) < n - 1 or not total:
            return p(history, n - 1)
        left = sum(taken[min(c, 3)] for c in own.values()) / total
        count = own.get(token, 0)
        return float((count - taken[min(count, 3)]) / total + left * p(history, n - 1))

    return p(tuple(history), order)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_match_the_definition_and_sum_to_one(order: int) -> None:
    model = KneserNey(SPANS, order, V)
    span = drawn(9, 5)
    span[4] = V - 1  # a token that never occurs in the text
    for at in range(len(span)):
        every = []
        for token in range(V):
            asked = numpy.array([*span[:at], token])
            every.append(model.probabilities(asked)[-1])
        assert sum(every) == pytest.approx(1)
        expected = [by_dictionaries(SPANS, order, span[:at].tolist(), token) for token in range(V)]
        assert every == pytest.approx(expected)


def test_order_2_learns_dependence_on_the_previous_token() -> None:
    held_out = drawn(400, 9)
    losses = [-numpy.log(KneserNey([drawn(4000, 8)], n, V).probabilities(held_out)[1:]).mean() for n in (1, 2, 3)]
    assert losses[0] > 1.3
    assert losses[1] == pytest.approx(numpy.log(2), abs=0.02)  # two equally likely tokens
    assert losses[2] == pytest.approx(losses[1], abs=0.01)


def test_loss_of_is_computed_on_the_held_out_labels(tmp_path: Path) -> None:
    row = drawn(101, 4)
    packed_text.write(tmp_path, row, numpy.array([len(row)]), "", V, {"recipe": "drawn"})
    given = Text(packed_text.opened(tmp_path), 10, held_out=2)
    assert given.validation.tolist() == [2, 7]
    model = KneserNey([row[:21], row[30:71], row[80:101]], 3, V)
    expected = [-numpy.log(model.probabilities(row[at : at + 11])[1:]) for at in (20, 70)]
    assert loss_of(given, 3) == pytest.approx(float(numpy.mean(expected)))
    assert torch.equal(given.training, torch.tensor([0, 1, 3, 4, 5, 6, 8, 9]))
