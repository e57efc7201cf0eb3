"""Draws that rounding may change, because they lie near a boundary of top-p sampling."""

import torch

EPS = torch.finfo(torch.float32).eps


def near_a_boundary(logits, uniforms, temperature, top_p, error=0.0):
    """Return a mask of the rows whose token rounding in float32 may change.

    Such a row lies near the boundary of the nucleus or of the running sum. The relative error of a probability is the
    error of its exponent, logits / temperature; that of a sum is as large.

    error  of the logits themselves, relative to the largest of the row
    """
    scaled = logits.double() / temperature
    largest = scaled.masked_fill(scaled.isinf(), 0.0).abs().amax(1)
    bound = EPS * (32 + 2 * largest) + error * largest
    p = torch.softmax(scaled, 1)
    descending, order = torch.sort(p, dim=1, descending=True, stable=True)
    before = descending.cumsum(1) - descending
    at_the_end = ((before - top_p).abs() < bound[:, None]).any(1)
    kept = before < top_p
    kept[:, 0] = True
    # The last token in the nucleus and the first one outside, if rounding can swap them.
    last = kept.sum(1, keepdim=True)
    following = descending.gather(1, last.clamp(max=p.shape[1] - 1))
    gap = descending.gather(1, last - 1) - following
    swapped = ((gap > 0) & (gap < bound[:, None] * following)).squeeze(1)
    sums = torch.where(torch.zeros_like(kept).scatter_(1, order, kept), p, 0.0).cumsum(1)
    within = ((sums - uniforms.double()[:, None] * sums[:, -1:]).abs() < bound[:, None]).any(1)
    return at_the_end | swapped | within
