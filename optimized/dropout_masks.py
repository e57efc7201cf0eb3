"""Dropout masks packed as bits: the counter-based masks of `suite.polychromic.lora.kept`, and any other mask.

Bit i of byte j of a row belongs to column 8 j + i. Bits past the last column are 0.
"""

import torch

from optimized.kernels import ceil_div, jit, launching, tl, use_triton
from suite.batching import LAST_SHIFT, ROUNDS, STEP
from suite.polychromic.lora import BITS, kept

# Bytes that a program writes, and its warps.
BYTES, NUM_WARPS = 128, 4
(SHIFT_1, FACTOR_1), (SHIFT_2, FACTOR_2) = ROUNDS


def kept_bits(start: torch.Tensor, places: torch.Tensor, inputs: int, rate: float) -> torch.Tensor:
    """Return bits that are 1 where an input is kept and 0 where it is dropped, uint8 [tokens, ⌈inputs / 8⌉].

    start   int64, start of the adapter's sequence of random words
    places  int64 [tokens]; input i of a token uses random word number place * inputs + i
    rate    probability of 0
    """
    if use_triton(places, dtypes=(torch.int64,)):
        return kept_bits_triton(start, places, inputs, rate)
    return packed(kept(start, places, inputs, rate))


def kept_bits_triton(start: torch.Tensor, places: torch.Tensor, inputs: int, rate: float) -> torch.Tensor:
    """Compute `kept_bits` with a kernel, which needs no memory for an unpacked mask."""
    out = torch.empty((len(places), ceil_div(inputs, 8)), dtype=torch.uint8, device=places.device)
    if out.numel():
        with launching(places):
            _kept_kernel[(len(places), ceil_div(out.shape[1], BYTES))](
                start,
                places.contiguous(),
                out,
                inputs,
                round(rate * (1 << BITS)),
                STEP=STEP,
                SHIFT_1=SHIFT_1,
                FACTOR_1=FACTOR_1,
                SHIFT_2=SHIFT_2,
                FACTOR_2=FACTOR_2,
                LAST=LAST_SHIFT,
                LOW=(1 << BITS) - 1,
                BYTES=BYTES,
                num_warps=NUM_WARPS,
            )
    return out


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Pack a mask of 0 and 1, bool or uint8 [tokens, inputs], into bits."""
    tokens, inputs = mask.shape
    whole = torch.nn.functional.pad(mask.view(torch.uint8), (0, -inputs % 8)).view(tokens, ceil_div(inputs, 8), 8)
    places = 2 ** torch.arange(8, device=mask.device, dtype=torch.uint8)
    return (whole * places).sum(2, dtype=torch.uint8)


def packed_triton(mask: torch.Tensor) -> torch.Tensor:
    """Compute `packed` with a kernel."""
    tokens, inputs = mask.shape
    bits = torch.empty((tokens, ceil_div(inputs, 8)), dtype=torch.uint8, device=mask.device)
    if bits.numel():
        with launching(mask):
            _pack_kernel[(tokens, ceil_div(bits.shape[1], BYTES))](
                mask.view(torch.uint8).contiguous(), bits, inputs, BYTES=BYTES, num_warps=NUM_WARPS
            )
    return bits


def unpacked(bits: torch.Tensor, inputs: int) -> torch.Tensor:
    """Unpack bits into a mask of 0 and 1, uint8 [tokens, inputs]."""
    places = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits[:, :, None] >> places & 1).flatten(1)[:, :inputs]


@jit
def _pack_kernel(mask_ptr, bits_ptr, inputs, BYTES: tl.constexpr):
    """Compute bits[token, j] = sum over i < 8 of mask[token, 8 j + i] << i; a program packs BYTES bytes of a token."""
    token = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    i = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = tl.load(mask_ptr + token * inputs + i, mask=i < inputs, other=0)
    bits = tl.sum(mask.to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    bytes_of_row = tl.cdiv(inputs, 8)
    tl.store(bits_ptr + token * bytes_of_row + byte, bits.to(tl.uint8), mask=byte < bytes_of_row)


@jit
def _kept_kernel(
    start_ptr, places_ptr, bits_ptr,
    inputs, least,
    STEP: tl.constexpr, SHIFT_1: tl.constexpr, FACTOR_1: tl.constexpr, SHIFT_2: tl.constexpr, FACTOR_2: tl.constexpr,
    LAST: tl.constexpr, LOW: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Set the bit of an input if the low bits of its random word are at least `least`.

    The word is a hash of (place * inputs + input) * STEP + start. A program computes BYTES bytes of one token.
    """
    token = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    i = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    counter = tl.load(places_ptr + token) * inputs + i
    # Unsigned, so that right shifts insert zeros.
    word = counter.to(tl.uint64) * tl.full((BYTES, 8), STEP, tl.uint64) + tl.load(start_ptr).to(tl.uint64)
    word = (word ^ (word >> SHIFT_1)) * tl.full((BYTES, 8), FACTOR_1, tl.uint64)
    word = (word ^ (word >> SHIFT_2)) * tl.full((BYTES, 8), FACTOR_2, tl.uint64)
    word = word ^ (word >> LAST)
    chosen = ((word & LOW).to(tl.int32) >= least) & (i < inputs)
    bits = tl.sum(chosen.to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    bytes_of_row = tl.cdiv(inputs, 8)
    tl.store(bits_ptr + token * bytes_of_row + byte, bits.to(tl.uint8), mask=byte < bytes_of_row)
