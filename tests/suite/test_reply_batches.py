"""Batches of prompts with their replies."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from perfsuite.errors import PerfsuiteError
from suite.polychromic.batches import batch_of, numbers, prepare, prompts_of
from suite.polychromic.chat import Chat, Encoded
from suite.polychromic.replies import Example, single_turn

SHORT, LONG = Encoded((1, 2, 3, 4, 5), 3), Encoded(tuple(range(10, 20)), 1)


class Letters:
    """Fake chat with one token per character."""

    def encode(self, example: Example) -> Encoded:
        prompt = example.prompt[0].content
        return Encoded(tuple(map(ord, prompt + example.reply)), len(prompt))


LETTERS = cast(Chat, Letters())


def test_only_reply_tokens_have_labels() -> None:
    batch = batch_of([SHORT, LONG], padding=9, device="cpu")
    assert batch.tokens.shape == batch.labels.shape == (2, 16)
    assert batch.tokens[0].tolist() == [1, 2, 3, 4, 5, *[9] * 11]
    assert batch.labels[0].tolist() == [*[-100] * 3, 4, 5, *[-100] * 11]
    assert batch.labels[1].tolist() == [-100, *range(11, 20), *[-100] * 6]


def test_prompts_are_padded_at_the_end() -> None:
    prompts = prompts_of([SHORT, LONG], padding=9, device="cpu")
    assert prompts.tokens.tolist() == [[1, 2, 3], [10, 9, 9]]
    assert prompts.lengths.tolist() == [3, 1]


def test_long_replies_are_truncated_and_long_prompts_omitted() -> None:
    examples = [single_turn("ab", "cdefg"), single_turn("abcd", "e"), single_turn("abc", "d")]
    prepared = prepare(examples, LETTERS, 4)
    assert [len(e.tokens) for e in prepared.examples] == [4, 4]
    assert [e.prompt for e in prepared.examples] == [2, 3]
    assert prepared.left_out == 1
    with pytest.raises(PerfsuiteError, match="length=2: the shortest prompt alone has 2 tokens; give length 3 or more"):
        prepare(examples, LETTERS, 2)
    assert prepare([], LETTERS, 2).examples == ()


@pytest.mark.parametrize(("size", "count"), [(4, 10), (10, 10), (16, 5), (3, 7)])
def test_every_example_comes_once_per_epoch(size: int, count: int) -> None:
    steps = [numbers(step, size, count, seed=3) for step in range(4 * count)]
    assert {len(step) for step in steps} == {size}
    flat = [n for step in steps for n in step]
    epochs = [flat[first : first + count] for first in range(0, len(flat), count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert steps != [numbers(step, size, count, seed=4) for step in range(4 * count)]


def test_batch_is_on_the_given_device() -> None:
    assert batch_of([SHORT], 0, "meta").tokens.device == torch.device("meta")
