"""Sequences of tokens from texts that are encoded when they are asked for (eigenstate_lm, technique 004.10)."""

from collections.abc import Sequence
from typing import Any

import torch

from suite.text import encode


class TokenSequences:
    """Each `length` tokens of the texts one after the other, an end's token behind each text.

    tokenizer  of the tokenizers library, whose token 1 ends a text

    Source: eigenstate_lm, technique 004.10.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any, length: int) -> None:
        self.texts, self.tokenizer, self.length = texts, tokenizer, length

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, labels), int64 [B, length] each, of the sequences of these numbers, int64 [B].

        A label is the token after; an input's own text is encoded from the first on.
        """
        starts = [row * self.length for row in rows.tolist()]
        needed = max(starts, default=0) + self.length + 1
        tokens: list[int] = []
        for text in self.texts:
            if len(tokens) >= needed:
                break
            tokens += next(encode(self.tokenizer, [text]))
        found = [torch.tensor(tokens[s : s + self.length + 1], device=rows.device) for s in starts]
        both = torch.stack(found) if found else rows.new_empty((0, self.length + 1))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
