"""Top-p (nucleus) sampling of one token per row, by a sort (polychromic, technique 003.4)."""

import torch

from suite.polychromic.sampling import check_options


def parallel_sampling(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Draw a token from each row, int64 [rows].

    The probabilities are softmax(logits / temperature), in float32 at least. The tokens are sorted by descending
    probability, and tokens of equal probability by ascending index. A token is kept if the sum of the probabilities
    before it is below `top_p`, so the first token is always kept. Then the kept probabilities are summed in the order
    of the vocabulary. The token drawn is the first kept token at which this running sum exceeds the row's uniform times
    the total. A token of probability 0 is never drawn.

    A logit of −inf has probability 0. A row with a NaN, with a logit of +inf, or with no logit above −inf has no
    distribution: its token is −1.

    logits       [rows, vocabulary]
    uniforms     [rows], in [0, 1)
    temperature  finite and at least 2**-126, the smallest normal float32
    top_p        above 0, at most 1

    ValueError for other shapes, for an empty vocabulary, and for options out of range.

    Source: polychromic, technique 003.4.
    """
    check_options(logits, uniforms, temperature, top_p)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # softmax would subtract the largest logit after the division, which loses more digits of large logits.
    p = ((logits - logits.amax(1, keepdim=True)) / temperature).softmax(1)
    ordered, order = p.sort(dim=1, descending=True, stable=True)
    before = torch.cat((torch.zeros_like(ordered[:, :1]), ordered.cumsum(1)[:, :-1]), 1)
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(1, order, before < top_p) & (p > 0)
    running = torch.where(kept, p, 0.0).cumsum(1)
    # Running sums on a GPU are not exactly monotone, so the total is the largest of the sums at kept tokens.
    running = torch.where(kept, running, 0.0)
    total = running.amax(1, keepdim=True)
    tokens = (running > uniforms[:, None] * total).int().argmax(1)
    return torch.where(p.isnan().any(1), -1, tokens)
