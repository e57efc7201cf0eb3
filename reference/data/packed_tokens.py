"""Sequences of tokens from texts that are encoded for each batch (eigenstate_lm, technique 004.10)."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch

from suite.text import encode


class TokenSequences:
    """Consecutive sequences of `length` tokens of the concatenated texts, with an end token after each text.

    Only the texts that a sequence overlaps are encoded for it. To find them, all texts are encoded once at the start
    and their tokens counted.

    tokenizer  a tokenizer of the tokenizers library, with token 1 as the end token

    Source: eigenstate_lm, technique 004.10.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, length: int) -> None:
        self.texts, self.tokenizer, self.length = texts, tokenizer, length
        self.begins = list(accumulate((len(tokens) for tokens in encode(tokenizer, texts)), initial=0))

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, labels), int64 [B, length] each, on the device of `rows`, int64 [B]: the sequences' indices.

        A label is the token after its input.
        """
        found = [torch.tensor(self._sequence(row), device=rows.device) for row in rows.tolist()]
        both = torch.stack(found) if found else rows.new_empty((0, self.length + 1))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def _sequence(self, row: int) -> list[int]:
        start, end = row * self.length, (row + 1) * self.length + 1
        first, last = bisect_right(self.begins, start) - 1, bisect_left(self.begins, end)
        tokens = list(chain.from_iterable(encode(self.tokenizer, self.texts[first:last])))
        return tokens[start - self.begins[first] : end - self.begins[first]]
