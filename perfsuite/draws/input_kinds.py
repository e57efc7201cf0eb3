"""Enumerate the kinds of inputs that every proof draws at least once, and find which of them a draw contains.

The kinds are each regime of values, each layout, each edge of a tile, and each end or choice of a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import Integers, ScalarSpec, Size, TensorSpec, bounds, symbols, tensor_spec
from perfsuite.draws import memory_layouts, tensor_values
from perfsuite.draws.tensor_values import MILD
from perfsuite.records import Case, InputCase

TILES = (16, 32, 64, 128)
LARGE_TILE = 1024
"""Number of elements of a row that many kernels process in one block at most."""
UP_TO_HALF, PAST_HALF = "up to half a large tile", "more than half a large tile"
A_LARGE, PAST_LARGE = "a large tile", "more than two large tiles"
UTMOST = "the most that is declared"
"""Kinds of large sizes. One size of a draw is large, and the others are small; with PAST_HALF the others are 1."""
LAST, MOST_LAST = "the most that is declared, if that is little", 256
"""Kind of a size at its declared bound, if that is at most MOST_LAST."""
ONES = "all one"
"""Kind in which all sizes of a draw are 1. It reveals unwanted squeezing and faults in paths for vectors."""
WHOLE = "whole tiles"
"""Kind in which all sizes of a draw are multiples of a tile. Many kernels have a path without masks for them."""
RAGGED = "more than whole tiles"
"""Kind in which all sizes of a draw are larger than a tile and no multiple of one, so that a corner tile is partial in
both dimensions."""
TOGETHER_SIZES = {ONES: (1,), WHOLE: TILES, RAGGED: (19, 27, 71, 83, 101, 115)}
"""Kind that all sizes of a draw have together → sizes of this kind."""
EDGES = {
    "empty": (0,),
    "one": (1,),
    **{f"one less than a tile of {n}": (n - 1,) for n in TILES},
    **{f"a tile of {n}": (n,) for n in (*TILES, 96, 256)},
    **{f"one more than a tile of {n}": (n + 1,) for n in TILES},
    LAST: (),
    UP_TO_HALF: (260, 300, 333, 384, 500, 511, 512),
    PAST_HALF: (513, 600, 777, 1000, 1023),
    A_LARGE: (LARGE_TILE,),
    PAST_LARGE: tuple(2 * LARGE_TILE + step for step in (1, 2, 4, 8, 16, 32, 64, 128)),
    UTMOST: (),
}
"""Kind of a size → sizes of this kind."""
LARGE = (UP_TO_HALF, PAST_HALF, A_LARGE, PAST_LARGE, UTMOST)
ALONE = ("empty", "one", *LARGE)
"""Kinds that only one size of a draw has. A second size of these kinds could hide the fault of the first."""
LEAST, MOST = "least", "most"
"""Ends of the range of a scalar."""
FEWEST = 2
"""Smallest size at which values and layouts have an effect."""

TRANSPOSED = "transposed"
APART, APART_LAYOUTS = "apart", (TRANSPOSED, "rows", "expanded")
"""Kind in which one input has one of these layouts and the others are contiguous. It reveals a kernel that uses the
strides of one input for all."""
MOST_APART = 3
"""Most tensors of a pair for which all of APART_LAYOUTS are drawn. With more, only the first is drawn."""

Kind: TypeAlias = tuple[str, ...]
"""("regime" or "layout", its name), (APART, the input, its layout), ("size", the symbol, its kind), ("sizes", one of
TOGETHER_SIZES), or ("scalar", the input, an end or a choice)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Range of the sizes that are drawn."""

    small: bool = False
    """Whether only the smallest tile sizes are used, where possible. On a CPU, larger ones take longer and show no
    more."""
    large: bool = True
    """Whether large tiles, and whole tiles above the smallest size, are drawn. They are not if a kernel is
    interpreted."""


ANY = Extent()


def kinds(pair: Pair, extent: Extent = ANY) -> list[Kind]:
    """Return all kinds that a proof of the pair has to draw."""
    found: dict[Kind, None] = {}
    long = _tensor_symbols(pair) if extent.large else set()
    for symbol in sorted(pair.symbols):
        edges = [kind for kind in EDGES if kind not in LARGE or symbol in long]
        if not extent.large:  # only the smallest tile
            edges = [kind for kind in edges if min(sizes_of_kind(pair, symbol, kind), default=0) <= TILES[0] + 1]
        found.update(dict.fromkeys(("size", symbol, kind) for kind in edges if sizes_of_kind(pair, symbol, kind)))
    for together in TOGETHER_SIZES if len(pair.symbols) > 1 else ():
        if all(sizes_of_kind(pair, symbol, together) for symbol in pair.symbols):
            found["sizes", together] = None
    for name, spec in drawn_tensors(pair).items():
        in_half = "float16" in ((spec.dtype,) if spec.dtype else pair.dtypes)
        regimes = (regime for regime in tensor_values.regimes(spec) if in_half or regime != tensor_values.LARGE)
        found.update(dict.fromkeys(("regime", regime) for regime in regimes))
        found.update(dict.fromkeys(("layout", layout) for layout in memory_layouts.layouts(pair, name, spec)))
    found.update(dict.fromkeys((APART, *both) for both in _layouts_apart(pair)))
    for name, scalar in drawn_scalars(pair).items():
        found.update(dict.fromkeys(("scalar", name, end) for end in ends_of(scalar)))
    return list(found)


def kinds_in(pair: Pair, case: Case) -> set[Kind]:
    """Return the kinds that a draw contains. A kind does not count if special values could hide its faults."""
    sizes = {symbol: case.sizes[symbol] for symbol in pair.symbols}
    tensors = drawn_tensors(pair)
    regimes = {case.inputs.get(name, InputCase()).regime for name in tensors}
    found: set[Kind] = set()
    for symbol, n in sizes.items():
        least = min((other for name, other in sizes.items() if name != symbol), default=FEWEST)
        for kind in (kind for kind in EDGES if n in sizes_of_kind(pair, symbol, kind)):
            plain = least >= (1 if kind == PAST_HALF else FEWEST)
            if kind == "empty" or (regimes <= {"normal"} and (plain or kind not in ALONE)):
                found.add(("size", symbol, kind))
    if regimes <= {"normal"} and sizes and set(sizes.values()) == {1}:
        found.add(("sizes", ONES))
    if all(n >= FEWEST for n in sizes.values()):
        found |= {("regime", regime) for regime in regimes}
        if regimes <= set(MILD):
            found |= _layouts_of_all(pair, case)
            others = [(name, how.layout) for name, how in case.inputs.items() if how.layout != "contiguous"]
            found |= {(APART, *both) for both in others if len(others) == 1}
        if regimes <= {"normal"}:
            found |= {("sizes", kind) for kind, among in TOGETHER_SIZES.items() if set(sizes.values()) <= set(among)}
            scalars = drawn_scalars(pair).items()
            found |= {
                ("scalar", n, e) for n, s in scalars for e in ends_of(s) if case.sizes[n] == end_value(s, e, sizes)
            }
    return found


def _layouts_apart(pair: Pair) -> list[tuple[str, str]]:
    """Return pairs (input, layout that it has while the others are contiguous); none if there is only one input."""
    tensors = drawn_tensors(pair)
    if len(tensors) < 2:
        return []
    wanted = APART_LAYOUTS if len(tensors) <= MOST_APART else APART_LAYOUTS[:1]
    may = {name: memory_layouts.layouts(pair, name, spec) for name, spec in tensors.items()}
    return [(name, layout) for layout in wanted for name in tensors if {layout, "contiguous"} <= {*may[name]}]


def _layouts_of_all(pair: Pair, case: Case) -> set[Kind]:
    """Return each layout that all tensors have for which it is allowed."""
    found = {"contiguous"}
    tensors = drawn_tensors(pair).items()
    for layout in {how.layout for how in case.inputs.values()}:
        may = [name for name, spec in tensors if layout in memory_layouts.layouts(pair, name, spec)]
        if all(case.inputs.get(name, InputCase()).layout == layout for name in may):
            found.add(layout)
    return {("layout", layout) for layout in found}


def ends_of(spec: ScalarSpec) -> list[str]:
    """Return the names of the scalar's values that each proof draws: every choice, or the ends of its range."""
    if isinstance(spec.values, tuple):
        return [repr(value) for value in spec.values]
    if isinstance(spec.values, Integers):
        return [LEAST, MOST]
    return [end for end, bound in ((LEAST, spec.values.low), (MOST, spec.values.high)) if bound is not None]


def end_value(spec: ScalarSpec, end: str, sizes: Mapping[str, Any]) -> Any:
    """Return the value of this end or choice of the scalar."""
    if isinstance(spec.values, tuple):
        return next(value for value in spec.values if repr(value) == end)
    if isinstance(spec.values, Integers):
        least, ends = bounds(spec.values, sizes)
        return least if end == LEAST else max(least, ends[0] - 1)
    bound = spec.values.low if end == LEAST else spec.values.high
    return None if bound is None else float(bound)


def sizes_of_kind(pair: Pair, symbol: str, kind: str) -> list[int]:
    """Return the sizes of this kind that the symbol may have."""
    size = pair.size_of(symbol) or Size()
    if kind in (UTMOST, LAST):
        most = size.high // size.multiple_of * size.multiple_of
        fits = most > max(EDGES[PAST_LARGE]) if kind == UTMOST else FEWEST <= most <= MOST_LAST
        return [most] if symbol in pair.sizes and fits else []
    if symbol not in pair.sizes:
        size = Size(low=size.low, high=max(EDGES[PAST_LARGE]))
    return [n for n in EDGES.get(kind, TOGETHER_SIZES.get(kind, ())) if size.allows(n)]


def whole_tensors(pair: Pair) -> list[TensorSpec]:
    """Return the specs of the inputs that are single tensors."""
    return [spec for spec in {**pair.inputs, **pair.step_inputs}.values() if isinstance(spec, TensorSpec)]


def _tensor_symbols(pair: Pair) -> set[str]:
    """Return the symbols that only single tensors have. The sizes of a module or a list are not known beforehand."""
    every = {**pair.inputs, **pair.step_inputs}
    others = {name: spec for name, spec in every.items() if not isinstance(spec, TensorSpec)}
    return {dim for spec in whole_tensors(pair) for dim in spec.dims if isinstance(dim, str)} - symbols(others)


def drawn_scalars(pair: Pair) -> dict[str, ScalarSpec]:
    every = {**pair.inputs, **pair.step_inputs}
    return {name: spec for name, spec in every.items() if isinstance(spec, ScalarSpec)}


def drawn_tensors(pair: Pair) -> dict[str, TensorSpec]:
    every = {**pair.inputs, **pair.step_inputs}
    return {name: leaf for name, spec in every.items() if (leaf := tensor_spec(spec)) is not None}
