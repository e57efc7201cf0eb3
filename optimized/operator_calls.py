"""Calls of the operator of ups, as a whole or in two parts (ups, techniques 002.1a and 002.7).

With two parts, the gradients of the later part are reduced during the backward of the earlier one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from optimized.attention.flex_attention import flex_attention
from optimized.compilation.compiled_function import compile_if_possible
from optimized.memory.activation_checkpoint import checkpointed
from suite.ups.model import Block, Call, Operator, call_plainly

PARTS = 4
"""The earlier part has 1 / PARTS of the blocks: its backward takes longer than the all-reduce of the other part."""
First = Callable[[Operator, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(operator, latents, dt, scales) → (tokens, embedded time)."""
Second = Callable[[Operator, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(operator, latents, tokens, embedded time, scales) → the latents after dt."""


class Parts(NamedTuple):
    """The operator as a whole, and as two consecutive parts."""

    whole: Callable[..., torch.Tensor]
    """(operator, or its forward, latents, dt, scales) → the latents after dt."""
    first: First
    second: Second


def split(depth: int) -> int:
    """Return the number of blocks in the earlier part."""
    return max(1, depth // PARTS)


def early(names: Iterable[str], depth: int) -> list[str]:
    """Return the names of the operator's weights that belong to the earlier part."""
    blocks = tuple(f"operator.blocks.{number}." for number in range(split(depth)))
    return [name for name in names if name.startswith((*blocks, "operator.take.", "operator.time"))]


@functools.cache
def parts(*, again: bool, flex: bool, compiled: bool) -> Parts:
    """Build the operator's calls.

    again     whether sublayers are recomputed in the backward
    flex      whether attention is FlexAttention
    compiled  whether sublayers are compiled for each shape. All blocks share the code, so twelve blocks compile as fast
              as one. Each call of a sublayer costs the host some time, unless the step is captured
    """
    attention = flex_attention if flex else functional.scaled_dot_product_attention
    call: Call = checkpointed if again else call_plainly
    if compiled:
        call = _compiled(call)

    def whole(
        operator: Callable[..., torch.Tensor], latents: torch.Tensor, dt: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        return operator(latents, dt, scales, attention, call)

    def first(
        operator: Operator, latents: torch.Tensor, dt: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, time = operator.enter(latents, dt)
        return operator.through(x, time, scales, 0, split(len(operator.blocks)), attention, call), time

    def second(
        operator: Operator, latents: torch.Tensor, x: torch.Tensor, time: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        depth = len(operator.blocks)
        return operator.leave(latents, operator.through(x, time, scales, split(depth), depth, attention, call))

    return Parts(whole, first, second)


def _compiled(call: Call) -> Call:
    """Return a compiled call of a block's sublayer."""

    def of_block(block: Block, name: str, *arguments: Any) -> torch.Tensor:
        return call(getattr(block, name), *arguments)

    compiled = compile_if_possible(of_block, "a sublayer", quiet_calls=True, fullgraph=True, dynamic=False)

    def of_sublayer(sublayer: Any, *arguments: Any) -> torch.Tensor:
        called: torch.Tensor = compiled(sublayer.__self__, sublayer.__name__, *arguments)
        return called

    return of_sublayer
