"""Parts of the objective that both trainers share: rows of prompts with replies, and nucleus (top-p) filtering."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from suite.polychromic.batches import Prompts
from suite.polychromic.chat import Chat
from suite.polychromic.sentences import Sentences


def widened_loss(hidden: torch.Tensor) -> torch.autocast:
    """Return an autocast context for the cross-entropy of half-precision hidden states.

    Matrix products stay in half precision, and the cross-entropy is computed in float32. For wider hidden states the
    context does nothing.
    """
    half = hidden.dtype.itemsize == 2
    return torch.autocast(hidden.device.type, hidden.dtype if half else torch.bfloat16, enabled=half)


@dataclass(frozen=True, slots=True)
class Rows:
    """Prompts with their replies, tokens [prompts · replies, length], and the positions that predict the replies.

    before   int64 [rows, new tokens]: position of the token before each token of the reply
    drawn    int64 [rows, new tokens]: tokens of the reply
    sampled  bool [rows, new tokens]: True up to and including the reply's end token
    """

    tokens: torch.Tensor
    before: torch.Tensor
    drawn: torch.Tensor
    sampled: torch.Tensor


def rows_of(prompts: Prompts, drawn: torch.Tensor, end: int) -> Rows:
    """Append replies, int64 [prompts, replies, tokens], to their prompts without a gap.

    Tokens after a reply's end are padding; with causal attention they do not affect earlier tokens. Token −1, which is
    sampled from NaN logits, is replaced by token 0; the loss is NaN in that case, too.
    """
    drawn = drawn.clamp(min=0)
    count, replies, new = drawn.shape
    lengths = prompts.lengths.repeat_interleave(replies)[:, None]
    longest = prompts.tokens.shape[1]
    tokens = torch.full((count * replies, longest + new), end, dtype=torch.int64, device=drawn.device)
    tokens[:, :longest] = prompts.tokens.repeat_interleave(replies, 0)
    at = lengths + torch.arange(new, device=drawn.device)
    flat = drawn.flatten(0, 1)
    tokens.scatter_(1, at, flat)
    ended = (flat == end).cumsum(1)
    sampled = (ended == 0) | (flat == end) & (ended == 1)
    return Rows(tokens, at - 1, flat, sampled)


def nucleus(logits: torch.Tensor, drawn: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Return the logits of the distribution that was sampled from, up to a constant.

    Logits are divided by the temperature, and set to −inf outside the nucleus (top-p). The sampled tokens always count
    as inside, since their logits may differ by rounding from those used for sampling.

    logits  [..., vocabulary]
    drawn   int64 [...]
    """
    wide = logits.float() if logits.dtype.itemsize == 2 else logits
    # Subtract the maximum, as in sampling, so that the quotients do not overflow at a low temperature.
    scaled = (wide - wide.detach().amax(-1, keepdim=True)) / temperature
    with torch.no_grad():
        ordered, order = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        kept = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, order, before < top_p)
        kept.scatter_(-1, drawn[..., None], True)
    return scaled.masked_fill(~kept, -torch.inf)


def texts(chat: Chat, drawn: torch.Tensor) -> list[str]:
    """Decode the replies [prompts, replies, tokens] to a list of texts, ordered by prompt."""
    known = chat.tokenizer.get_vocab_size()
    return [chat.decode([t for t in row if 0 <= t < known]) for row in drawn.flatten(0, 1).tolist()]


def sets_of(
    sentences: Sentences, said: list[str], replies: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenize the replies' texts for the encoder: tokens [sets, replies, longest] and token counts [sets, replies]."""
    tokens, lengths = sentences.tokenized(said, device)
    return tokens.unflatten(0, (-1, replies)), lengths.unflatten(0, (-1, replies))
