"""flash-attn (pip install flash-attn) against plain attention in the same half precision.

Run on a GPU, with the package installed:  pytest -m correctness docs/foreign/test_flash_attn.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from perfsuite import Pair, Workload, floats, sampled, side, size, tensor

flash_attn = pytest.importorskip("flash_attn", reason="flash-attn is not installed: pip install flash-attn")

ALIGN = 16
"""Alignment in bytes that flash-attn needs; it faults on tensors that begin elsewhere."""
LAYOUTS = ("contiguous", "offset")
"""Its backward pass refuses tensors whose last dimension is not contiguous, which its forward pass copies."""
VALUES = floats(-4, 4, offset=False)
"""Values without small differences of large ones. For nearly equal values, too, the gradient of the query is a
difference of almost equal numbers."""
QUERIES = floats(-1, 1)
"""Queries and keys so small that no key has nearly all the weight: there the gradient of the query is a difference of
almost equal numbers, one of which flash-attn rounds to half precision."""


def different(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Draw keys that differ. For equal keys the gradient of the query is 0, and flash-attn returns rounding errors."""
    return (2 * torch.rand(shape, generator=generator, device=generator.device) - 1).to(dtype)


KEYS = sampled(different)
UNSUPPORTED = {
    "autocast": "its output has the dtype of its inputs",
    "double_backward": "its backward pass is a kernel without a derivative",
}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Compute attention of q, k, v [batch, length, heads, dim]. Consecutive query heads share a head of k and v."""
    share = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.repeat_interleave(share, 2).transpose(1, 2) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:  # the last query sees the last key
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill(~seen, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def heads(number: str, dim: int, values: Any = VALUES) -> Any:
    return tensor("batch", "length", number, dim, align=ALIGN, layouts=LAYOUTS, values=values)


def pair(dim: int, causal: bool) -> Pair:
    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal=causal)

    def optimized(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attn.flash_attn_func(q, k, v, causal=causal)
        return out

    return Pair(
        reference=reference,
        optimized=side(optimized, devices=("cuda",)),
        inputs={"q": heads("2 * kv", dim, QUERIES), "k": heads("kv", dim, KEYS), "v": heads("kv", dim)},
        # Of a single key the gradient of q is 0, and what is left there is rounding alone.
        sizes={"batch": size(1, 3), "length": size(2, 200), "kv": size(1, 3)},
        workloads=[Workload("w", batch=4, length=2048, kv=8, dtype="bfloat16")],
        dtypes=("bfloat16", "float16"),
        unsupported=UNSUPPORTED,
        strides="any",
    )


head64, head64_causal = pair(64, False), pair(64, True)
head128, head128_causal = pair(128, False), pair(128, True)


# --- sequences of different lengths, one behind another ---------------------------------------------------------------


def ends(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Where sequences of 2 to 64 positions begin, and where the last one ends. Of a single key, see `pair`."""
    lengths = torch.randint(2, 65, (shape[0] - 1,), generator=generator, device=generator.device)
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(dtype)


def by_sequence(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention within each sequence; positions behind the last one are not used, and give zero."""

    def side_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        used = int(offsets[-1])
        made = call(q[:used], k[:used], v[:used], offsets)
        return torch.cat([made, torch.zeros_like(q[used:])])

    return side_of


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    bounds = offsets.tolist()
    each = [attention(*(x[a:b][None] for x in (q, k, v)), causal=True)[0] for a, b in itertools.pairwise(bounds)]
    return torch.cat(each)


def fast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    longest = int(offsets.diff().max())
    made: torch.Tensor = flash_attn.flash_attn_varlen_func(q, k, v, offsets, offsets, longest, longest, causal=True)
    return made


def packed(number: str, values: Any = VALUES) -> Any:
    return tensor("64 * sequences", number, 64, align=ALIGN, layouts=LAYOUTS, values=values)


variable_length = Pair(
    reference=by_sequence(plain),
    optimized=side(by_sequence(fast), devices=("cuda",)),
    inputs={
        "q": packed("heads", QUERIES),
        "k": packed("heads", KEYS),
        "v": packed("heads"),
        "offsets": tensor("sequences + 1", dtype="int32", values=sampled(ends), layouts=("contiguous",)),
    },
    sizes={"sequences": size(1, 6), "heads": size(1, 4)},
    workloads=[Workload("w", sequences=64, heads=16, dtype="bfloat16")],
    dtypes=("bfloat16", "float16"),
    unsupported=UNSUPPORTED,
    strides="any",
)
