"""Top-p sampling by a sort of each row (polychromic, technique 003.4)."""

import torch


def parallel_sampling(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float = 0.9, top_p: float = 0.9
) -> torch.Tensor:
    """Draw a token for each row from the nucleus of its distribution, int64 [rows].

    The distribution is softmax(logits / temperature), in float32 at least. Its nucleus are the tokens before which, in
    descending order of probability and of equal ones in ascending order of their numbers, the sum of probabilities is
    below top_p; the first is always in it. In the order of the vocabulary, the token is the first of the nucleus at
    which the running sum of its probabilities exceeds uniforms × their total; the last of the nucleus if none does.

    logits       [rows, vocabulary]; -inf: never drawn. A row needs a finite one
    uniforms     [rows], from 0 to below 1
    temperature  above 0
    top_p        above 0, at most 1

    Source: polychromic, technique 003.4.
    """
    wide = logits.float() if logits.dtype.itemsize == 2 else logits
    p = torch.softmax(wide / temperature, 1)
    descending, order = torch.sort(p, dim=1, descending=True, stable=True)
    before = descending.cumsum(1) - descending
    in_order = (before < top_p) & (descending > 0)
    in_order[:, 0] = True
    kept = torch.zeros_like(in_order).scatter_(1, order, in_order)
    sums = torch.where(kept, p, 0.0).cumsum(1)
    beyond = kept & (sums > uniforms.to(p.dtype)[:, None] * sums[:, -1:])
    places = torch.arange(p.shape[1], device=p.device)
    first = torch.where(beyond, places, p.shape[1]).amin(1)
    last = torch.where(kept, places, -1).amax(1)
    return torch.where(first < p.shape[1], first, last)
