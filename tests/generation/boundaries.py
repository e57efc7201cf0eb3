"""Draws that rounding may change, because they are near a boundary of top-p sampling."""

import torch

from reference.generation.parallel_sampling import parallel_sampling

EPS = torch.finfo(torch.float32).eps


def near_a_boundary(logits, uniforms, temperature, top_p, error=0.0):
    """Return a mask of the rows whose token rounding in float32 may change.

    Such a row is near a boundary of the nucleus or of the running sum. The relative error of a probability is the
    error of its exponent, logits / temperature; that of a sum is as large.

    error  of the logits themselves, relative to the largest of the row
    """
    scaled = logits.double() / temperature
    bound = rounding(scaled, error)
    p, descending, kept, sums = nucleus(scaled, top_p)
    before = descending.cumsum(1) - descending
    at_the_end = ((before - top_p).abs() < bound[:, None]).any(1)
    # The last token in the nucleus and the first one outside, if rounding can swap them.
    last = kept.sum(1, keepdim=True)
    following = descending.gather(1, last.clamp(max=p.shape[1] - 1))
    gap = descending.gather(1, last - 1) - following
    swapped = ((gap > 0) & (gap < bound[:, None] * following)).squeeze(1)
    within = ((sums - uniforms.double()[:, None] * sums[:, -1:]).abs() < bound[:, None]).any(1)
    return at_the_end | swapped | within


def rounding(scaled, error):
    """Return by how much rounding may change a running sum of probabilities, [rows]."""
    largest = scaled.masked_fill(scaled.isinf(), 0.0).abs().amax(1)
    return EPS * (32 + 2 * largest) + error * largest


def nucleus(scaled, top_p):
    """Return (probabilities, sorted, mask of the kept in that order, running sums of the kept in the vocabulary's
    order) of logits in float64, each [rows, vocabulary]."""
    p = torch.softmax(scaled, 1)
    descending, order = torch.sort(p, dim=1, descending=True, stable=True)
    kept = descending.cumsum(1) - descending < top_p
    kept[:, 0] = True
    sums = torch.where(torch.zeros_like(kept).scatter_(1, order, kept), p, 0.0).cumsum(1)
    return p, descending, kept, sums


def off_boundaries(logits, uniforms, temperature, top_p, error):
    """Return uniform numbers in the middle of those that choose the same token; if these are too few, in the middle of
    those that choose the likeliest token. [rows]"""
    scaled = logits.double() / temperature
    p, _, _, sums = nucleus(scaled, top_p)
    token = parallel_sampling(logits, uniforms, temperature, top_p)[:, None]
    token = torch.where(p.gather(1, token) > 4 * rounding(scaled, error)[:, None], token, p.argmax(1, keepdim=True))
    middle = (sums - p / 2).gather(1, token) / sums[:, -1:]
    return middle[:, 0].to(uniforms.dtype)


def move_off_boundaries(model, prompts, lengths, uniforms, temperature, top_p, error):
    """Replace, in place, the uniform numbers that choose a token near a boundary, so that both sides choose the same.

    All tokens that follow one depend on it: if rounding may change one, none of the others can be compared.
    """
    of_prompt = torch.arange(len(prompts), device=prompts.device).repeat_interleave(uniforms.shape[1])
    rows, ends = torch.arange(len(of_prompt), device=prompts.device), lengths[of_prompt]
    sequences = torch.nn.functional.pad(prompts, (0, uniforms.shape[2]))[of_prompt]
    for t in range(uniforms.shape[2] if len(rows) else 0):
        logits = model(sequences[:, : prompts.shape[1] + t])[rows, ends + t - 1]
        numbers = uniforms[:, :, t].flatten()
        near = near_a_boundary(logits, numbers, temperature, top_p, error)
        numbers = torch.where(near, off_boundaries(logits, numbers, temperature, top_p, error), numbers)
        uniforms[:, :, t] = numbers.view(uniforms.shape[:2])
        sequences[rows, ends + t] = parallel_sampling(logits, numbers, temperature, top_p)
