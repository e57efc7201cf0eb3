"""Text generation with a network of eigenstate_lm, which reads the prompt in parallel and then draws token by token.

Only the states are kept between tokens, so the cost of a token does not depend on the length of the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from perfsuite.errors import PerfsuiteError
from suite.eigenstate_lm.model import Sizes, Weights, first_states, forward, shapes
from suite.techniques import implementation
from suite.text import END_ID, PAD_ID

STRETCH = 4096
"""Maximum tokens that are read at a time, which bounds the memory."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The decoder's output for invalid bytes and for the bytes of an incomplete character."""


def sizes_of(weights: Weights) -> Sizes:
    """Return the sizes of the network with these weights; PerfsuiteError if it is not an eigenstate_lm network."""
    seen = {str(name): tuple(getattr(weight, "shape", ())) for name, weight in weights.items()}
    try:
        (vocabulary, width), (cells, eigenstates) = seen["embedding"], seen["0.decay"]
    except (KeyError, ValueError):
        raise PerfsuiteError("the weights are of no network of eigenstate_lm") from None
    if not all(isinstance(w, torch.Tensor) and w.is_floating_point() and w.numel() for w in weights.values()):
        raise PerfsuiteError("the weights are of no network of eigenstate_lm: one is empty, or not of real numbers")
    layers = sum(name.endswith(".decay") for name in seen)
    found = Sizes(vocabulary=vocabulary, width=width, layers=layers, eigenstates=eigenstates, cells=cells)
    known = shapes(found)
    if wrong := sorted(n for n in {*seen, *known} if seen.get(n) != known.get(n)):
        raise PerfsuiteError(f"the weights are of no network of eigenstate_lm: {wrong[0]} is missing, or too much")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of text generation; PerfsuiteError for a value that is out of range."""

    tokens: int
    """Maximum number of tokens to draw."""
    temperature: float
    """Divisor of the logits; 0: always take the most likely token."""
    top_k: int
    """Draw from this many most likely tokens; 0: from all."""
    seed: int
    past_end: bool = False
    """Continue with a new text after an end token."""

    def __post_init__(self) -> None:
        for name, bound in {"tokens": 1, "temperature": 0, "top_k": 0, "seed": 0}.items():
            value = getattr(self, name)
            if not value >= bound:  # catches NaN, too
                raise PerfsuiteError(f"{name} must be {bound} or more, got {value}")
        if self.seed >= 2**63:
            raise PerfsuiteError(f"seed must be less than 2^63, got {self.seed}")


class Reader:
    """Reads a text from its beginning, in parts, on the device and in the dtype of the weights.

    The tokens of a part are computed in parallel; a single token is one step of the recurrence.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        embedding = weights["embedding"]
        self.states = first_states(sizes_of(weights), 1, embedding.device).to(embedding.dtype)
        """States after the tokens read so far, in the shape of `first_states`."""
        # The optimized functions are built for many tokens. With them a single token takes 40% longer (CPU, the
        # source's small network), mostly because of the product of the projection's two factors.
        self._together, self._alone = _sides(optimized=True), _sides(optimized=False)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Read one or more tokens; return the logits [vocabulary] of the next token."""
        embedding = self._weights["embedding"]
        for stretch in torch.tensor([tokens], device=embedding.device).split(STRETCH, dim=1):
            sides = self._alone if stretch.shape[1] == 1 else self._together
            x, self.states = forward(self._weights, stretch, self.states, *sides)
        return functional.linear(x[0, -1], embedding)


def generated(reader: Reader, prompt: Sequence[int], options: Options) -> Iterator[int]:
    """Yield the tokens after the prompt, each as it is drawn.

    The iterator stops at the end token and does not yield it, unless `past_end` is set. The seed determines the draws.
    Padding is never drawn. PerfsuiteError if the network's output is not finite.
    """
    generator = torch.Generator().manual_seed(options.seed)
    logits = reader.read(prompt)
    for left in range(options.tokens - 1, -1, -1):
        token = drawn(logits, options, generator)
        if token == END_ID and not options.past_end:
            return
        yield token
        if left:
            logits = reader.read([token])


@torch.inference_mode()
def drawn(logits: torch.Tensor, options: Options, generator: torch.Generator) -> int:
    """Draw a token from its logits [vocabulary]. With a generator on the CPU, the draw is the same on every device."""
    possible = logits[PAD_ID + 1 :]
    kept = 1 if options.temperature == 0 else min(options.top_k or len(possible), len(possible))
    likely, tokens = possible.topk(kept)  # NaN sorts first
    scores = likely.double().cpu()
    if not math.isfinite(float(scores[0])):
        raise PerfsuiteError("the network's output is no number: its training diverged; name an earlier checkpoint")
    # Subtract the largest score first: divided by a small temperature, it would overflow.
    chances = ((scores - scores[0]) / options.temperature).softmax(0) if kept > 1 else scores.new_ones(1)
    return PAD_ID + 1 + int(tokens[torch.multinomial(chances, 1, generator=generator)])


class Characters:
    """Decodes tokens one by one to text. A character may consist of several tokens."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        """Start after the tokens `before`, whose text was already returned and ends with a whole character."""
        self._tokenizer = tokenizer
        self._begin(before)

    def of(self, token: int) -> str:
        """Add a token; return the new text that no later token can change."""
        self._tokens.append(token)
        text = self._decoded()
        whole = not text.endswith(UNKNOWN)
        found = text[self._shown : len(text) if whole else len(text) - 1]
        self._shown += len(found)
        if whole:
            self._begin(self._tokens)
        return found

    def rest(self) -> str:
        """Return the text that was held back because later tokens could have changed it."""
        return self._decoded()[self._shown :]

    def _begin(self, before: Sequence[int]) -> None:
        self._tokens = list(before[-1:])  # some decoders treat the first token of a text differently
        self._shown = len(self._decoded())

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=False))


def _sides(*, optimized: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions (scan, project) for `forward`."""
    scan = implementation("recurrence.eigenstate_scan", "eigenstate_scan", optimized=optimized)
    return scan, implementation("recurrence.fused_output_projection", "fused_output_projection", optimized=optimized)
