"""Top-p (nucleus) sampling of one token per row, without a sort (polychromic, technique 003.4)."""

import math

import torch

from optimized.kernels import jit, launching, tl, use_triton
from suite.polychromic.sampling import check_options

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 2048
"""Logits of a row that a program compares with thresholds at a time."""
WIDER = 2
"""Other loops read WIDER × BLOCK logits at a time: a sum or a running sum over them takes no longer than over fewer."""
PIVOTS = 8
"""Thresholds per pass over a row. With more thresholds a pass takes longer, but fewer passes are needed."""
CANDIDATES = 2048
"""Size of the list of candidate weights. Once they fit in it, a program searches them without reading the row again."""
NUM_WARPS = 16
"""Each of the 512 threads has BLOCK * PIVOTS / 512 = 32 partial sums. Compiled for sm_90, 16 and 32 warps do not spill
registers. 8 warps, twice the BLOCK, and twice the PIVOTS do."""


def parallel_sampling(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Draw a token from each row, int64 [rows].

    The probabilities are softmax(logits / temperature), in float32 at least. The tokens are sorted by descending
    probability, and tokens of equal probability by ascending index. A token is kept if the sum of the probabilities
    before it is below `top_p`, so the first token is always kept. Then the kept probabilities are summed in the order
    of the vocabulary. The token drawn is the first kept token at which this running sum exceeds the row's uniform times
    the total. A token of probability 0 is never drawn.

    A logit of −inf has probability 0. A row with a NaN, with a logit of +inf, or with no logit above −inf has no
    distribution: its token is −1.

    On CUDA, one Triton kernel draws all tokens, with one program per row. It finds the least kept probability: each
    pass compares the sums above several thresholds with the target. Several programs per row would need one launch per
    pass, since the programs of a launch have no common barrier. On other devices and in float64, PyTorch operations
    are used.

    logits       [rows, vocabulary]
    uniforms     [rows], in [0, 1)
    temperature  finite and at least 2**-126, the smallest normal float32
    top_p        above 0, at most 1

    ValueError for other shapes, for an empty vocabulary, and for options out of range.

    Source: polychromic, technique 003.4.
    """
    if use_triton(logits, dtypes=DTYPES) and use_triton(uniforms):
        return parallel_sampling_triton(logits, uniforms, temperature, top_p)
    return parallel_sampling_torch(logits, uniforms, temperature, top_p)


def parallel_sampling_torch(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_p: float
) -> torch.Tensor:
    """`parallel_sampling` in PyTorch operations. It sorts only values, without indices, and needs no scatter."""
    check_options(logits, uniforms, temperature, top_p)
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weights = ((x - x.amax(1, keepdim=True)) / temperature).exp()
    ordered = weights.sort(dim=1, descending=True).values
    sums = ordered.cumsum(1)
    target = top_p * sums[:, -1:]
    # The number of kept tokens; the first is always kept.
    count = 1 + (sums[:, :-1] < target).sum(1, keepdim=True)
    least = ordered.gather(1, count - 1)
    equal = weights == least
    rank = equal.cumsum(1)
    kept = ((weights > least) | (equal & (rank <= count - (weights > least).sum(1, keepdim=True)))) & (weights > 0)
    running = torch.where(kept, torch.where(kept, weights, 0.0).cumsum(1), 0.0)
    tokens = (running > uniforms[:, None] * running.amax(1, keepdim=True)).int().argmax(1)
    return torch.where(weights.isnan().any(1), -1, tokens)


def parallel_sampling_triton(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float,
    top_p: float,
    block: int = BLOCK,
    candidates: int = CANDIDATES,
) -> torch.Tensor:
    """`parallel_sampling` with the Triton kernel, which does not support float64."""
    check_options(logits, uniforms, temperature, top_p)
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    lists = torch.empty((rows, candidates), dtype=torch.float32, device=logits.device)
    with launching(logits):
        _sampling_kernel[(rows,)](
            logits,
            uniforms,
            tokens,
            lists,
            vocabulary,
            logits.stride(0),
            logits.stride(1),
            uniforms.stride(0),
            math.log2(math.e) / temperature,
            float(top_p),
            # Lower bound of the search. All smaller weights together are less than half of the sum that top_p excludes,
            # since the largest weight is 1.
            (1 - top_p) / (2 * vocabulary),
            ONE=ONE,
            BLOCK=block,
            WIDE=WIDER * block,
            PIVOTS=PIVOTS,
            CANDIDATES=candidates,
            num_warps=NUM_WARPS,
        )
    return tokens


ONE = 0x3F800000
"""The bits of 1.0, the largest weight. Non-negative floats have the same order as their bits."""


@jit
def _weights(logits_ptr, at, vocabulary, column_stride, top, scale):
    """Compute exp((logit − top) / temperature), and 0 past the end of the row."""
    x = tl.load(logits_ptr + at.to(tl.int64) * column_stride, mask=at < vocabulary, other=-float("inf"))
    return tl.exp2((x.to(tl.float32) - top) * scale)


@jit
def _above(weights, pivots):
    """Return the weights for each pivot, with 0 where they are not above it: [weights, PIVOTS]."""
    return tl.where(weights[:, None] > pivots.to(tl.float32, bitcast=True)[None, :], weights[:, None], 0.0)


@jit
def _pivots(low, high, PIVOTS: tl.constexpr):
    """Return PIVOTS integers that divide (low, high] into equal parts. The last ones may all be `high`."""
    step = (high - low + PIVOTS) // (PIVOTS + 1)
    return tl.minimum(low + step * (1 + tl.arange(0, PIVOTS)), high)


@jit
def _narrow(pivots, sums, target, low, high, above):
    """Return new bounds, and the sum of the weights above the upper bound, from the sums above each pivot."""
    enough = sums >= target
    new_low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), 0))
    new_high = tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))
    new_above = tl.maximum(above, tl.max(tl.where(enough, above, sums), 0))
    return new_low, tl.maximum(new_high, new_low + 1), new_above


@jit
def _sampling_kernel(
    logits_ptr, uniforms_ptr, tokens_ptr, lists_ptr,
    vocabulary, row_stride, column_stride, uniform_stride, scale, top_p, negligible,
    ONE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, PIVOTS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Draw the token of one row per program.

    Weights are exp((logit − largest logit) / temperature), so the largest is 1. The target is top_p times their sum.
    `high` converges from above to the bits of the least kept weight: the sum of the weights above `high` is below the
    target, the sum of those above `low` is not. A pass reads the row in blocks of BLOCK logits and narrows the bounds
    with PIVOTS thresholds. When at most CANDIDATES weights are between the bounds, the search continues on a list.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    lists_ptr += row * CANDIDATES
    lane = tl.arange(0, BLOCK)
    wide = tl.arange(0, WIDE)

    tops = tl.full([WIDE], -float("inf"), tl.float32)
    for start in range(0, vocabulary, WIDE):
        at = start + wide
        x = tl.load(logits_ptr + at.to(tl.int64) * column_stride, mask=at < vocabulary, other=-float("inf"))
        tops = tl.maximum(tops, x.to(tl.float32))
    top = tl.max(tops, 0)

    low = (tl.full([], 0.0, tl.float32) + negligible).to(tl.int32, bitcast=True) - 1
    high = tl.full([], ONE, tl.int32)
    above = tl.full([], 0.0, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    target = tl.full([], 0.0, tl.float32)
    found = tl.full([], CANDIDATES + 1, tl.int32)
    # Passes over the whole row, until at most CANDIDATES tokens are between the bounds.
    while (found > CANDIDATES) & (high - low > 1):
        pivots = _pivots(low, high, PIVOTS)
        all_sums = tl.full([BLOCK], 0.0, tl.float32)
        sums = tl.full([BLOCK, PIVOTS], 0.0, tl.float32)
        for start in range(0, vocabulary, BLOCK):
            weights = _weights(logits_ptr, start + lane, vocabulary, column_stride, top, scale)
            all_sums += weights
            sums += _above(weights, pivots)
        total = tl.sum(all_sums, 0)
        target = total * top_p
        if (top_p < 1.0) & (total == total):
            low, high, above = _narrow(pivots, tl.sum(sums, 0), target, low, high, above)
            # Write the values between the bounds to a list, and narrow the bounds to these values.
            found = tl.full([], 0, tl.int32)
            least = tl.full([WIDE], ONE, tl.int32)
            most = tl.full([WIDE], -1, tl.int32)
            for start in range(0, vocabulary, WIDE):
                weights = _weights(logits_ptr, start + wide, vocabulary, column_stride, top, scale)
                bits = weights.to(tl.int32, bitcast=True)
                between = (start + wide < vocabulary) & (bits > low) & (bits <= high)
                least = tl.minimum(least, tl.where(between, bits, ONE))
                most = tl.maximum(most, tl.where(between, bits, -1))
                place = found + tl.cumsum(between.to(tl.int32), 0) - 1
                tl.store(lists_ptr + place, weights, mask=between & (place < CANDIDATES))
                found += tl.sum(between.to(tl.int32), 0)
            if found > 0:
                low = tl.min(least, 0) - 1
                high = tl.max(most, 0)
            else:
                low = high - 1
        else:
            # All tokens are kept, or there is no distribution.
            low = tl.full([], -1, tl.int32)
            high = tl.full([], 0, tl.int32)
            above = total
            found = tl.full([], 0, tl.int32)
    tl.debug_barrier()

    # Passes over the list. If it is too short for all tokens, they are equal, and none is above `high`.
    place = tl.arange(0, CANDIDATES)
    listed = tl.load(lists_ptr + place, mask=place < found, other=0.0)
    base = above
    while high - low > 1:
        pivots = _pivots(low, high, PIVOTS)
        sums = base + tl.sum(_above(listed, pivots), 0)
        low, high, above = _narrow(pivots, sums, target, low, high, above)
    least_kept = high.to(tl.float32, bitcast=True)
    above = base + tl.sum(tl.where(listed > least_kept, listed, 0.0), 0)
    equals = tl.sum(((listed == least_kept) & (place < found)).to(tl.int32), 0) + tl.maximum(found - CANDIDATES, 0)
    # Of the tokens with the least kept weight, keep those before which the sum is below the target, and at least one.
    if least_kept > 0.0:
        room = tl.ceil((target - above) / least_kept)
        equals = tl.minimum(tl.maximum(room, 1.0), equals.to(tl.float32)).to(tl.int32)

    goal = tl.load(uniforms_ptr + row * uniform_stride).to(tl.float32) * (above + equals.to(tl.float32) * least_kept)
    # Find the block of the token: where the running sum exceeds the goal. If it never does because of rounding, use the
    # last block with a kept token.
    running = tl.full([], 0.0, tl.float32)
    seen = tl.full([], 0, tl.int32)
    block = tl.full([], 0, tl.int32)
    block_running = tl.full([], 0.0, tl.float32)
    block_seen = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, WIDE):
        if running <= goal:
            weights = _weights(logits_ptr, start + wide, vocabulary, column_stride, top, scale)
            ties = tl.sum(((weights == least_kept) & (start + wide < vocabulary)).to(tl.int32), 0)
            own = tl.sum(tl.where(weights > least_kept, weights, 0.0), 0)
            own += tl.minimum(ties, tl.maximum(equals - seen, 0)).to(tl.float32) * least_kept
            block = tl.where(own > 0.0, start, block)
            block_running = tl.where(own > 0.0, running, block_running)
            block_seen = tl.where(own > 0.0, seen, block_seen)
            running += own
            seen += ties

    at = block + wide
    weights = _weights(logits_ptr, at, vocabulary, column_stride, top, scale)
    tie = (weights == least_kept) & (at < vocabulary)
    rank = block_seen + tl.cumsum(tie.to(tl.int32), 0)
    kept = ((weights > least_kept) | (tie & (rank <= equals))) & (weights > 0.0)
    sums = block_running + tl.cumsum(tl.where(kept, weights, 0.0), 0)
    first = tl.min(tl.where(kept & (sums > goal), at, vocabulary), 0)
    last = tl.max(tl.where(kept, at, -1), 0)
    token = tl.where(first < vocabulary, first, last)
    tl.store(tokens_ptr + row, tl.where(total == total, token, -1).to(tl.int64))
