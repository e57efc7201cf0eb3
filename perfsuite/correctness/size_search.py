"""Find the sizes at which a side is wrong: more elements than a kernel's block holds, or no multiple of a tile's size.

The failing draw is run at other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from perfsuite.correctness import remedies
from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import TensorSpec, elements, symbols, tensor_spec
from perfsuite.draws.input_kinds import LARGE_TILE
from perfsuite.records import Case

TILES = (16, 32, 64)
BLOCKS = (LARGE_TILE, LARGE_TILE // 2, LARGE_TILE // 4)
"""Numbers of elements of a row that a kernel may process in one block."""
MOST_ELEMENTS = 1 << 20
"""Most elements of all inputs together at the sizes that the search tries. The memory of the sides may be many times
that of their inputs."""
SEVERAL = 16
"""Fewest elements in each dimension of a larger draw. A single one of so many is unlikely to be special by chance."""


def causes(pair: Pair, case: Case, is_right: Callable[[Case], bool]) -> Iterator[str]:
    """Yield a clause that names the sizes, if a side that is wrong on the draw is right at other sizes. `is_right` runs
    the side on a draw."""
    beyond = _beyond_a_block(pair, case, is_right)
    if beyond is not None:
        yield beyond
        return
    off = _off_a_tile(pair, case, is_right)
    if off is not None:
        yield off


def _beyond_a_block(pair: Pair, case: Case, is_right: Callable[[Case], bool]) -> str | None:
    sizes = _dimensions(pair, case)
    for name, block in [(n, block) for n, v in sizes.items() for block in BLOCKS if v > block]:
        shorter, longer = (_at(pair, case, {name: size}) for size in (block, block + 1))
        if shorter != case and is_right(shorter) and not is_right(longer):
            return f"it is right at {name}={block}, and wrong at {name}={sizes[name]}: more than a block holds"
    return None


def _off_a_tile(pair: Pair, case: Case, is_right: Callable[[Case], bool]) -> str | None:
    sizes = _dimensions(pair, case)
    at = ", ".join(f"{n}={v}" for n, v in sizes.items())
    for tile in TILES:
        whole = _within(pair, case, {n: max(tile, math.ceil(v / tile) * tile) for n, v in sizes.items()})
        bigger = replace(case, sizes={**case.sizes, **whole})
        # Twice, with other values: an answer that is cached by size is right the first time.
        other = replace(bigger, seed=case.seed ^ 0x3C6EF35)
        if whole == sizes or not is_right(bigger) or not is_right(other):
            continue
        if not is_right(_at(pair, bigger, {n: v + 1 for n, v in whole.items()})):
            return f"it is right where sizes are multiples of {tile}, and wrong at {at}: off the tile's size"
        near = _at(pair, case, {n: v + 1 for n, v in sizes.items()})
        special = near != case and is_right(near)
        why = ": a special case of these sizes" * special + remedies.for_empty(pair, case)
        return f"it is right at larger sizes, and wrong at {at}{why}"
    return None


def larger(pair: Pair, case: Case) -> Case:
    """Return the draw with several elements in each dimension, if the pair allows it."""
    return _at(pair, case, {n: max(v, SEVERAL) for n, v in _dimensions(pair, case).items()})


def filling_a_tile(pair: Pair, case: Case) -> Case:
    """Return the draw with at least as many elements in each dimension as the smallest tile has, or as many as the pair
    allows."""
    sizes = _dimensions(pair, case)
    return _at(pair, case, {n: max(v, _most_allowed(pair, n, TILES[0])) for n, v in sizes.items()})


def _at(pair: Pair, case: Case, wanted: Mapping[str, int]) -> Case:
    """Return the draw at these sizes, as far as `_within` allows them."""
    return replace(case, sizes={**case.sizes, **_within(pair, case, wanted)})


def _within(pair: Pair, case: Case, wanted: Mapping[str, int]) -> dict[str, int]:
    """Return each of these sizes that the pair allows, and the draw's size for the others. Return only the draw's sizes
    if the inputs would have too many elements."""
    # A size without a declared range may also be larger than the sizes that are drawn.
    sizes = {n: v if n not in pair.sizes or pair.sizes[n].allows(v) else case.sizes[n] for n, v in wanted.items()}
    every = {**case.sizes, **sizes}
    tensors = (tensor_spec(spec) for spec in {**pair.inputs, **pair.step_inputs}.values())
    asked = sum(elements(spec, every) for spec in tensors if spec is not None)
    return sizes if asked <= MOST_ELEMENTS and pair.allows(every) else {n: case.sizes[n] for n in wanted}


def _most_allowed(pair: Pair, name: str, most: int) -> int:
    """Return the largest size up to `most` within the declared bound and multiple; `most` if none are declared."""
    size = pair.sizes.get(name)
    return most if size is None else min(most, size.high) // size.multiple_of * size.multiple_of


def _dimensions(pair: Pair, case: Case) -> dict[str, int]:
    """Return the draw's sizes, without the values of scalar inputs."""
    return {n: v for n, v in case.sizes.items() if _is_dimension(pair, n) and isinstance(v, int)}


def _is_dimension(pair: Pair, name: str) -> bool:
    return any(isinstance(spec, TensorSpec) and name in symbols(spec) for spec in pair.inputs.values())
