"""How the operator of ups is called: whole, or in two parts, so that the gradients of the later part are reduced in the
backward of the earlier one (ups, techniques 002.1a and 002.7)."""

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
"""The earlier part is this share of the blocks: its backward takes longer than the all-reduce of the others."""
First = Callable[[Operator, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(operator, latents, dt, scales) → (tokens, embedded time)."""
Second = Callable[[Operator, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(operator, latents, tokens, embedded time, scales) → the latents after dt."""


class Parts(NamedTuple):
    """The operator whole, and as two parts that follow each other."""

    whole: Callable[..., torch.Tensor]
    """(operator, or its forward, latents, dt, scales) → the latents after dt."""
    first: First
    second: Second


def split(depth: int) -> int:
    """Count the blocks of the earlier part."""
    return max(1, depth // PARTS)


def early(names: Iterable[str], depth: int) -> list[str]:
    """Choose the names of the operator's weights that the earlier part has."""
    blocks = tuple(f"operator.blocks.{number}." for number in range(split(depth)))
    return [name for name in names if name.startswith((*blocks, "operator.take.", "operator.time"))]


@functools.cache
def parts(*, again: bool, flex: bool, compiled: bool) -> Parts:
    """Make the operator's calls.

    again     whether sublayers are computed again in the backward
    flex      whether attention is FlexAttention's
    compiled  whether sublayers are compiled for each shape. All blocks share the code, so that twelve blocks compile
              as soon as one. Each call of a sublayer costs the host some time, unless the step is captured.
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
    """How a block's sublayer is called, compiled."""

    def of_block(block: Block, name: str, *arguments: Any) -> torch.Tensor:
        return call(getattr(block, name), *arguments)

    compiled = compile_if_possible(of_block, "a sublayer", quiet_calls=True, fullgraph=True, dynamic=False)

    def of_sublayer(sublayer: Any, *arguments: Any) -> torch.Tensor:
        called: torch.Tensor = compiled(sublayer.__self__, sublayer.__name__, *arguments)
        return called

    return of_sublayer
