"""An interpolated Kneser–Ney model of a text's tokens, as a baseline for language models.

Source: S. F. Chen, J. Goodman: An empirical study of smoothing techniques for language modeling (1999), the modified
form with three discounts for each order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from suite.eigenstate_lm.data import Text

Tokens = numpy.ndarray[Any, numpy.dtype[numpy.int64]]
Values = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
UNSEEN = -1


class _Order:
    """The n-grams of one order: their sorted keys, their probabilities `p`, and the leftover mass `left` by context.

    A key is `context * vocabulary + token`. A context is the number of the (n-1)-gram before the token.
    """

    def __init__(self, keys: Tokens, contexts: int, vocabulary: int) -> None:
        self.keys, self.contexts, self.vocabulary = keys, contexts, vocabulary
        self.p: Values = numpy.empty(0)
        self.left: Values = numpy.empty(0)

    def smooth(self, counts: Tokens, lower: Values) -> None:
        """Compute `p` and `left`. `lower` is the probability of each n-gram's token in the order below."""
        of_context = self.keys // self.vocabulary
        discounts = _discounts(counts)[numpy.minimum(counts, 3)]
        totals = numpy.bincount(of_context, counts, self.contexts)
        taken = numpy.bincount(of_context, discounts, self.contexts)
        # A context without a following token leaves all mass to the order below.
        self.left = numpy.divide(taken, totals, out=numpy.ones(self.contexts), where=totals > 0)
        kept = numpy.divide(counts - discounts, totals[of_context], out=numpy.zeros(len(counts)), where=counts > 0)
        self.p = kept + self.left[of_context] * lower

    def find(self, contexts: Tokens, tokens: Tokens) -> Tokens:
        """Return the numbers of the n-grams; UNSEEN if the n-gram or its context is not in the text."""
        keys = contexts * self.vocabulary + tokens
        at = numpy.minimum(numpy.searchsorted(self.keys, keys), len(self.keys) - 1)
        return numpy.where((contexts != UNSEEN) & (self.keys[at] == keys), at, UNSEEN)


class KneserNey:
    """A Kneser–Ney model of n-grams up to `order`, counted on spans of text.

    spans  int64 tokens below `vocabulary`; no n-gram crosses the border between spans
    """

    def __init__(self, spans: Sequence[Tokens], order: int, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        tokens = numpy.concatenate(list(spans))
        before = numpy.concatenate([numpy.arange(len(span)) for span in spans])  # tokens of the span before each token
        self.orders: list[_Order] = []
        numbers = numpy.zeros(len(tokens), dtype=numpy.int64)  # number of the n-gram that ends at each token
        suffixes: list[Tokens] = []
        counts: list[Tokens] = []
        for n in range(1, order + 1):
            ends = numpy.flatnonzero(before >= n - 1)
            contexts = numbers[ends - 1] if n > 1 else numpy.zeros(len(ends), dtype=numpy.int64)
            keys, first, inverse, found = numpy.unique(
                contexts * vocabulary + tokens[ends], return_index=True, return_inverse=True, return_counts=True
            )
            if not len(keys):  # every span is shorter
                break
            suffixes.append(numbers[ends[first]])
            if counts:  # all but the highest order count the different tokens before an n-gram
                counts[-1] = numpy.bincount(suffixes[-1], minlength=len(self.orders[-1].keys))
            counts.append(found)
            self.orders.append(_Order(keys, len(self.orders[-1].keys) if self.orders else 1, vocabulary))
            numbers = numpy.full(len(tokens), UNSEEN, dtype=numpy.int64)
            numbers[ends] = inverse
        lower = numpy.full(len(self.orders[0].keys), 1 / vocabulary)
        for n, (of_order, count) in enumerate(zip(self.orders, counts, strict=True)):
            if n:
                lower = self.orders[n - 1].p[suffixes[n]]
            of_order.smooth(count, lower)

    def probabilities(self, span: Tokens) -> Values:
        """Return the probability of each token of a span, given the tokens before it in the span."""
        found = numpy.full(len(span), 1 / self.vocabulary)
        contexts = numpy.zeros(len(span), dtype=numpy.int64)
        for of_order in self.orders:
            grams = of_order.find(contexts, span)
            left = numpy.where(contexts != UNSEEN, of_order.left[contexts], 1.0)
            found = numpy.where(grams != UNSEEN, of_order.p[grams], left * found)
            contexts = numpy.concatenate([[UNSEEN], grams[:-1]])
        return found


def _discounts(counts: Tokens) -> Values:
    """Return the discounts for counts of 0, 1, 2, and 3 or more, float64 [4]."""
    seen = numpy.bincount(numpy.minimum(counts, 5), minlength=6).astype(numpy.float64)
    if not seen[1:5].all():  # too few n-grams to estimate each discount
        return numpy.array([0.0, 0.5, 0.5, 0.5])
    share = seen[1] / (seen[1] + 2 * seen[2])
    found = [k - (k + 1) * share * seen[k + 1] / seen[k] for k in (1, 2, 3)]
    return numpy.array([0.0, *(min(max(d, 0.0), k) for k, d in enumerate(found, 1))])


def loss_of(text: Text, order: int) -> float:
    """Return the mean loss of the held-out labels, in nats, with a model counted on the training sequences."""
    row, length = text.pack.row, text.length
    rows = text.training
    starts = torch.cat([torch.tensor([True]), rows.diff() != 1]).nonzero().flatten().tolist()
    runs = [rows[start:end] for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]
    spans = [row[int(run[0]) * length : (int(run[-1]) + 1) * length + 1].astype(numpy.int64) for run in runs]
    model = KneserNey(spans, order, text.vocabulary)
    total = 0.0
    for held_out in text.validation.tolist():
        span = row[held_out * length : (held_out + 1) * length + 1].astype(numpy.int64)
        total -= float(numpy.log(model.probabilities(span)[1:]).sum())
    return total / (len(text.validation) * length)
