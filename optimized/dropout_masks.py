"""Which inputs a counter-based dropout keeps, as `suite.polychromic.lora.kept` defines it, in one launch."""

import torch

from optimized.kernels import ceil_div, jit, launching, tl, use_triton
from suite.batching import LAST_SHIFT, ROUNDS, STEP
from suite.polychromic.lora import BITS, kept

BLOCK, NUM_WARPS = 1024, 4
(SHIFT_1, FACTOR_1), (SHIFT_2, FACTOR_2) = ROUNDS


def kept_inputs(start: torch.Tensor, places: torch.Tensor, inputs: int, rate: float) -> torch.Tensor:
    """Return 1 where an input is kept and 0 elsewhere, uint8 [tokens, inputs].

    start   int64, where the adapter's random words begin
    places  int64 [tokens], their numbers
    rate    probability of 0
    """
    if not (use_triton(places, dtypes=(torch.int64,)) and places.numel() and inputs):
        return kept(start, places, inputs, rate).view(torch.uint8)
    return kept_inputs_triton(start, places, inputs, rate)


def kept_inputs_triton(start: torch.Tensor, places: torch.Tensor, inputs: int, rate: float) -> torch.Tensor:
    """`kept_inputs` by the kernel."""
    out = torch.empty((len(places), inputs), dtype=torch.uint8, device=places.device)
    least = round(rate * (1 << BITS))
    with launching(places):
        _kept_kernel[(len(places), ceil_div(inputs, BLOCK))](
            start,
            places.contiguous(),
            out,
            inputs,
            least,
            STEP=STEP,
            SHIFT_1=SHIFT_1,
            FACTOR_1=FACTOR_1,
            SHIFT_2=SHIFT_2,
            FACTOR_2=FACTOR_2,
            LAST=LAST_SHIFT,
            LOW=(1 << BITS) - 1,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return out


@jit
def _kept_kernel(
    start_ptr,
    places_ptr,
    out_ptr,
    inputs,
    least,
    STEP: tl.constexpr,
    SHIFT_1: tl.constexpr,
    FACTOR_1: tl.constexpr,
    SHIFT_2: tl.constexpr,
    FACTOR_2: tl.constexpr,
    LAST: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counter = tl.load(places_ptr + token) * inputs + i
    # Without a sign: shifts must bring in zeros.
    word = counter.to(tl.uint64) * tl.full((BLOCK,), STEP, tl.uint64) + tl.load(start_ptr).to(tl.uint64)
    word = (word ^ (word >> SHIFT_1)) * tl.full((BLOCK,), FACTOR_1, tl.uint64)
    word = (word ^ (word >> SHIFT_2)) * tl.full((BLOCK,), FACTOR_2, tl.uint64)
    word = word ^ (word >> LAST)
    chosen = (word & LOW).to(tl.int32) >= least
    tl.store(out_ptr + token * inputs + i, chosen.to(tl.uint8), mask=i < inputs)
