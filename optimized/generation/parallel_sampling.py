"""Top-p sampling of all rows in one kernel, without a sort (polychromic, technique 003.4).

The bits of positive floats are ordered as the floats are: the smallest probability of the nucleus is found digit by
digit, from a histogram of the probability that lies in each digit.
"""

import torch

from optimized.kernels import jit, launching, tl, use_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Logits of a row that are read at once.
BLOCK, NUM_WARPS = 1024, 16
# Bits of a digit; 32 is a multiple of them.
DIGIT = 4


def parallel_sampling(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float = 0.9, top_p: float = 0.9
) -> torch.Tensor:
    """Draw a token for each row from the nucleus of its distribution, int64 [rows].

    The distribution is softmax(logits / temperature), in float32 at least. Its nucleus are the tokens before which, in
    descending order of probability and of equal ones in ascending order of their numbers, the sum of probabilities is
    below top_p; the first is always in it. In the order of the vocabulary, the token is the first of the nucleus at
    which the running sum of its probabilities exceeds uniforms × their total; the last of the nucleus if none does.

    On CUDA one Triton kernel reads each row ten times, from the cache of its multiprocessor or the GPU's. Elsewhere,
    and in float64, PyTorch sorts.

    logits       [rows, vocabulary]; -inf: never drawn. A row needs a finite one
    uniforms     [rows], from 0 to below 1
    temperature  above 0
    top_p        above 0, at most 1

    Source: polychromic, technique 003.4.
    """
    if use_triton(logits, dtypes=DTYPES):
        return parallel_sampling_triton(logits, uniforms, temperature, top_p)
    return parallel_sampling_torch(logits, uniforms, temperature, top_p)


def parallel_sampling_torch(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float = 0.9, top_p: float = 0.9
) -> torch.Tensor:
    """`parallel_sampling` by a sort of PyTorch's, on any device and dtype."""
    wide = logits.float() if logits.dtype.itemsize == 2 else logits
    p = torch.softmax(wide / temperature, 1)
    descending, order = torch.sort(p, dim=1, descending=True, stable=True)
    in_order = (descending.cumsum(1) - descending < top_p) & (descending > 0)
    in_order[:, :1] = True
    sums = p.masked_fill(~torch.zeros_like(in_order).scatter_(1, order, in_order), 0.0).cumsum(1)
    targets = uniforms.to(p.dtype)[:, None] * sums[:, -1:]
    # The running sum does not grow from its last token on: that is what is drawn if rounding leaves none beyond.
    found = torch.searchsorted(sums, targets, right=True)
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(found, last).squeeze(1)


def parallel_sampling_triton(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float = 0.9, top_p: float = 0.9
) -> torch.Tensor:
    """`parallel_sampling` by the kernel, which does not have float64."""
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        with launching(logits):
            _sample_kernel[(rows,)](
                logits,
                logits.stride(0),
                uniforms.contiguous(),
                tokens,
                vocabulary,
                temperature,
                top_p,
                BLOCK=BLOCK,
                DIGIT=DIGIT,
                num_warps=NUM_WARPS,
            )
    return tokens


@jit
def _masses(row_ptr, first, vocabulary, temperature, most, BLOCK: tl.constexpr):
    """Of a block of tokens: their numbers, and their probabilities over that of the likeliest one."""
    at = first + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) / temperature
    return at, tl.where(at < vocabulary, tl.exp(x - most), 0.0)


@jit
def _sample_kernel(
    logits_ptr,
    stride,
    uniforms_ptr,
    tokens_ptr,
    vocabulary,
    temperature,
    top_p,
    BLOCK: tl.constexpr,
    DIGIT: tl.constexpr,
):
    DIGITS: tl.constexpr = 1 << DIGIT
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    most = tl.full([], float("-inf"), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        most = tl.maximum(most, tl.max(x, 0))
    most = most / temperature
    digits = tl.arange(0, DIGITS)
    # The smallest value of the nucleus: its digits so far, and the sum of all that are larger.
    smallest = tl.full([], 0, tl.int32)
    above = tl.full([], 0.0, tl.float32)
    target = tl.full([], 0.0, tl.float32)
    own = tl.full([], 0.0, tl.float32)
    for n in range(32 // DIGIT):
        shift = 32 - DIGIT * (n + 1)
        # Each lane adds up its own tokens: lanes are added to each other once, and not for every block.
        lanes = tl.zeros((BLOCK, DIGITS), tl.float32)
        for first in range(0, vocabulary, BLOCK):
            _, mass = _masses(row_ptr, first, vocabulary, temperature, most, BLOCK)
            bits = mass.to(tl.int32, bitcast=True)
            # Shifted by 32 bits an integer would stay as it is.
            same = (n == 0) | ((bits >> (shift + DIGIT - 1) >> 1) == (smallest >> (shift + DIGIT - 1) >> 1))
            digit = tl.where(same, (bits >> shift) & (DIGITS - 1), DIGITS)
            lanes += tl.where(digit[:, None] == digits[None, :], mass[:, None], 0.0)
        sums = tl.sum(lanes, 0)
        if n == 0:
            target = top_p * tl.sum(sums, 0)
        # Of all digits larger than each: what is larger than all of a digit's values.
        larger = above + tl.sum(tl.where(digits[None, :] > digits[:, None], sums[None, :], 0.0), 1)
        fits = (sums > 0.0) & ((larger < target) | (larger == 0.0))
        chosen = tl.min(tl.where(fits, digits, DIGITS), 0)
        above = tl.sum(tl.where(digits == chosen, larger, 0.0), 0)
        own = tl.sum(tl.where(digits == chosen, sums, 0.0), 0)
        smallest = smallest | (chosen << shift)
    value = smallest.to(tl.float32, bitcast=True)
    # Tokens of just this value, in ascending order, as long as the sum before them is below the target.
    room = tl.maximum(target - above, 0.0) / value
    tied = tl.minimum(tl.maximum(tl.ceil(room), 1.0), tl.floor(own / value + 0.5))
    wanted = tl.load(uniforms_ptr + row).to(tl.float32) * (above + tied * value)
    seen = tl.full([], 0.0, tl.float32)
    tied_seen = tl.full([], 0.0, tl.float32)
    token = tl.full([], 0, tl.int32) + vocabulary
    last = tl.full([], 0, tl.int32)
    for first in range(0, vocabulary, BLOCK):
        at, mass = _masses(row_ptr, first, vocabulary, temperature, most, BLOCK)
        tie = (mass == value).to(tl.float32)
        kept = (mass > value) | ((tie > 0.0) & (tied_seen + tl.cumsum(tie, 0) <= tied))
        mass = tl.where(kept, mass, 0.0)
        beyond = kept & (seen + tl.cumsum(mass, 0) > wanted)
        token = tl.minimum(token, tl.min(tl.where(beyond, at, vocabulary), 0))
        last = tl.maximum(last, tl.max(tl.where(kept, at, 0), 0))
        seen += tl.sum(mass, 0)
        tied_seen += tl.sum(tie, 0)
    tl.store(tokens_ptr + row, tl.where(token < vocabulary, token, last).to(tl.int64))
