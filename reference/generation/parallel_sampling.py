"""A token of each row from the nucleus of its distribution, by a sort (polychromic, technique 003.4)."""

import torch

from suite.polychromic.sampling import check_options


def parallel_sampling(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Draw a token from each row, int64 [rows].

    The probabilities are softmax(logits / temperature), in float32 at least. The tokens are sorted by descending
    probability, equal ones by ascending index. A token is kept if the sum of the probabilities before it is below
    `top_p`, so that the first always is. In the order of the vocabulary, the token drawn is the first kept one at
    which the running sum of the kept probabilities exceeds its row's uniform times their total. A token of
    probability 0 is never drawn.

    A logit of −inf has probability 0. A row with a NaN, with a logit of +inf, or with no logit above −inf has no
    distribution: its token is −1.

    logits       [rows, vocabulary]
    uniforms     [rows], in [0, 1)
    temperature  finite, and 2**-126 at least, the least normal float32
    top_p        above 0, at most 1

    ValueError for other shapes, for an empty vocabulary, and for options out of range.

    Source: polychromic, technique 003.4.
    """
    check_options(logits, uniforms, temperature, top_p)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # softmax would subtract the largest after the division, which rounds large logits more.
    p = ((logits - logits.amax(1, keepdim=True)) / temperature).softmax(1)
    ordered, order = p.sort(dim=1, descending=True, stable=True)
    before = torch.cat((torch.zeros_like(ordered[:, :1]), ordered.cumsum(1)[:, :-1]), 1)
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(1, order, before < top_p) & (p > 0)
    running = torch.where(kept, p, 0.0).cumsum(1)
    # Sums on a GPU are not exactly monotone: the total is the largest of those at which a token may be drawn.
    running = torch.where(kept, running, 0.0)
    total = running.amax(1, keepdim=True)
    tokens = (running > uniforms[:, None] * total).int().argmax(1)
    return torch.where(p.isnan().any(1), -1, tokens)
