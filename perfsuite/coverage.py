"""The kinds of inputs that every proof draws at least once: each regime of values, each layout, each edge of a tile and
each end or choice of a scalar.

Random draws leave out some of them in one run and others in the next. So a proof begins with draws that hold them all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from perfsuite import inputs as make
from perfsuite.errors import NotEquivalent
from perfsuite.pair import Pair
from perfsuite.records import Case, InputCase
from perfsuite.specs import Integers, ScalarSpec, Size, TensorSpec, accepted, symbols

TILES = (16, 32, 64, 128)
LARGE_TILE = 1024
"""The most elements of a row that a kernel is often written to hold in one block."""
A_LARGE, PAST_LARGE = "a large tile", "more than two large tiles"
"""Kinds of large sizes. One size of a draw is large, and the others are small."""
WHOLE = "whole tiles"
"""All sizes of a draw are multiples of a tile. Many kernels have a path without masks for this."""
EDGES = {
    "empty": (0,),
    "one": (1,),
    "one less than a tile": tuple(n - 1 for n in TILES),
    "a tile": TILES,
    "one more than a tile": tuple(n + 1 for n in TILES),
    A_LARGE: (LARGE_TILE,),
    PAST_LARGE: tuple(2 * LARGE_TILE + step for step in (1, 2, 4, 8, 16, 32, 64, 128)),
}
"""Kinds of sizes → the sizes of that kind."""
LARGE = (A_LARGE, PAST_LARGE)
ALONE = ("empty", "one", *LARGE)
"""Kinds that only one size of a draw has. A second size of these kinds could hide the fault of the first."""
LEAST, MOST = "least", "most"
"""Ends of the numbers that a scalar may be."""
MOST_ELEMENTS = 1 << 18
"""A draw with a large size, or with whole tiles, has no more elements than this in its inputs."""
WHOLE_UP_TO = 64
"""The tile, where the pair allows it. All smaller tiles divide it."""
SMALL = 17
"""The smallest tile and one more."""
FEWEST = 2
"""Sizes from here on show what values and layouts do."""
SPOILING = ("huge", "nonfinite")
"""With these in one input the answer is often not finite, whatever is in the others."""
HALVES = "halves"
TOGETHER = ("offset", HALVES)
"""Regimes that all inputs have that may: the difference of two of them is small, too, or they are equal."""
MILD = ("normal", "sorted", HALVES, "edges")
"""Values with which a wrong layout shows."""
MOST_PLANNED = 0.75
"""Planned draws replace at most this share of the random draws of a proof."""
ATTEMPTS = 20
"""Random sizes are tried so often until they satisfy the pair's `where`."""

Kind: TypeAlias = tuple[str, ...]
"""("regime" or "layout", its name), ("size", the symbol, its kind), ("sizes", WHOLE), or ("scalar", the input, an
end or a choice)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How large the sizes are."""

    small: bool = False
    """The tiles are the smallest, where they may be: on a CPU others take longer, and show no more."""
    large: bool = True
    """There are large tiles, and whole ones of more than the smallest: not where a kernel is interpreted."""


ANY = Extent()


def kinds(pair: Pair, extent: Extent = ANY) -> list[Kind]:
    """All that a proof of the pair has to draw."""
    found: dict[Kind, None] = {}
    long = _tensor_symbols(pair) if extent.large else set()
    for symbol in sorted(pair.symbols):
        edges = [kind for kind in EDGES if kind not in LARGE or symbol in long]
        found.update(dict.fromkeys(("size", symbol, kind) for kind in edges if _sizes(pair, symbol, kind)))
    if len(pair.symbols) > 1 and all(_sizes(pair, symbol, "a tile") for symbol in pair.symbols):
        found["sizes", WHOLE] = None
    for name, spec in _tensors(pair).items():
        found.update(dict.fromkeys(("regime", regime) for regime in make.regimes(spec)))
        found.update(dict.fromkeys(("layout", layout) for layout in make.layouts(pair, name, spec)))
    for name, scalar in _scalars(pair).items():
        found.update(dict.fromkeys(("scalar", name, end) for end in _ends(scalar)))
    return list(found)


def kinds_in(pair: Pair, case: Case) -> set[Kind]:
    """The kinds that a draw holds. A kind does not count where special values could hide its fault."""
    sizes = {symbol: case.sizes[symbol] for symbol in pair.symbols}
    tensors = _tensors(pair)
    regimes = {case.inputs.get(name, InputCase()).regime for name in tensors}
    found: set[Kind] = set()
    for symbol, n in sizes.items():
        plain = all(other >= FEWEST for name, other in sizes.items() if name != symbol)
        for kind in (kind for kind, edges in EDGES.items() if n in edges):
            if kind == "empty" or (regimes <= {"normal"} and (plain or kind not in ALONE)):
                found.add(("size", symbol, kind))
    if all(n >= FEWEST for n in sizes.values()):
        found |= {("regime", regime) for regime in regimes}
        if regimes <= set(MILD):
            found |= _layouts_of_all(pair, case)
        if regimes <= {"normal"} and all(n in TILES for n in sizes.values()):
            found.add(("sizes", WHOLE))
        if regimes <= {"normal"}:
            scalars = _scalars(pair).items()
            found |= {("scalar", n, e) for n, s in scalars for e in _ends(s) if case.sizes[n] == _end(s, e, sizes)}
    return found


def _layouts_of_all(pair: Pair, case: Case) -> set[Kind]:
    """The layouts that all tensors have for which they are allowed."""
    found = {"contiguous"}
    tensors = _tensors(pair).items()
    for layout in {how.layout for how in case.inputs.values()}:
        may = [name for name, spec in tensors if layout in make.layouts(pair, name, spec)]
        if all(case.inputs.get(name, InputCase()).layout == layout for name in may):
            found.add(layout)
    return {("layout", layout) for layout in found}


def draws(
    pair: Pair,
    dtype: str,
    seed: int,
    *,
    extent: Extent = ANY,
    compiles: Callable[[], bool] = lambda: False,
) -> Iterator[Case]:
    """As few draws as hold all kinds; none that the pair's `where` rules out.

    The first draw, and all from when `compiles` says so, have sizes that do not depend on the seed: a side that
    compiles for each size finds them in its cache in every proof and every run. Its sizes are few: all are empty, or
    one, together.
    """
    left = kinds(pair, extent)
    random_ = random.Random(seed)
    first = True
    while left:
        few = compiles()
        case = _case(pair, dtype, left, random_, extent, same_sizes=first or few, few_sizes=few)
        first = False
        if case is not None:
            yield case
            held = kinds_in(pair, case)
            left = [k for k in left if k not in held]


def large_draws(pair: Pair, dtype: str, seed: int) -> Iterator[Case]:
    """A draw for each size that may be large, in an order that depends on the seed; the first of rows with gaps."""
    left = [kind for kind in kinds(pair) if kind[0] == "size" and kind[2] == PAST_LARGE]
    random_, layout = random.Random(seed), "rows"
    for _, symbol, kind in random_.sample(left, len(left)):
        sizes = _drawn_sizes(pair, {symbol: kind}, {}, random_, ANY)
        if sizes is not None:
            inputs = _laid_out(pair, dict.fromkeys(_tensors(pair), "normal"), layout)
            yield Case(dtype=dtype, sizes=sizes, inputs=inputs, seed=random_.getrandbits(31))
            layout = ""


def replaced(planned: int, draws: int) -> int:
    """How many of so many random draws of a proof the planned ones replace."""
    return min(planned, int(MOST_PLANNED * draws))


def first_failure(prove: Callable[[Case], None], cases: Iterable[Case]) -> tuple[NotEquivalent | None, int]:
    """(the first failure, how many draws were right before it). A caller raises it if no random draw fails, which
    would have been made small."""
    number = 0
    for case in cases:
        try:
            prove(case)
        except NotEquivalent as error:
            return error, number
        number += 1
    return None, number


def _case(
    pair: Pair,
    dtype: str,
    left: list[Kind],
    random_: random.Random,
    extent: Extent,
    *,
    same_sizes: bool,
    few_sizes: bool,
) -> Case | None:
    """A draw that holds some of `left`; what it was made for is taken away."""
    regimes, tried = _regimes(pair, left, random_)
    wanted, ends = {}, {}
    if not tried:
        wanted = _wanted_sizes(pair, left, few=few_sizes)
        if not set(ALONE) & set(wanted.values()) and HALVES not in regimes.values():
            ends = {k[1]: k[2] for k in reversed(left) if k[0] == "scalar"}
    layout = ""
    if set(regimes.values()) <= set(MILD) and not {"empty", "one"} & set(wanted.values()):
        layout = next((k[1] for k in left if k[0] == "layout"), "")
        tried |= {("layout", layout)} if layout else set()
    inputs = _laid_out(pair, regimes, layout)
    if set(wanted.values()) == {WHOLE}:
        tried.add(("sizes", WHOLE))
    tried |= {("size", *k) for k in wanted.items()} | {("scalar", *k) for k in ends.items()}
    left[:] = [k for k in left if k not in tried]
    source = random.Random(f"{pair.name} {sorted(wanted.items())}") if same_sizes else random_
    sizes = _drawn_sizes(pair, wanted, ends, source, extent, halves=HALVES in regimes.values())
    if sizes is None:
        return None
    return Case(dtype=dtype, sizes=sizes, inputs=inputs, seed=random_.getrandbits(31))


def _wanted_sizes(pair: Pair, left: list[Kind], *, few: bool) -> dict[str, str]:
    """Symbol → the kind of its size in the next draw: one that stands alone, as long as there is one.

    With `few`, all sizes that may be empty are so together, and all that may be one.
    """
    every = [(k[1], k[2]) for k in left if k[0] == "size"]
    single = next((k for k in every if k[1] in ALONE), None)
    if single is not None:
        return dict(k for k in every if k[1] == single[1]) if few and single[1] not in LARGE else dict([single])
    if ("sizes", WHOLE) in left:
        return dict.fromkeys(pair.symbols, WHOLE)
    wanted: dict[str, str] = {}
    for number, symbol in enumerate(dict(every)):
        edges = [kind for name, kind in every if name == symbol]
        wanted[symbol] = edges[number % len(edges)]  # of two symbols different ones, where that is possible
    return wanted


def _regimes(pair: Pair, left: list[Kind], random_: random.Random) -> tuple[dict[str, str], set[Kind]]:
    """(the regime of each tensor, the kinds that are in it): of each tensor another one that is left."""
    found: dict[str, str] = {}
    tried: set[Kind] = set()
    tensors = list(_tensors(pair).items())
    together = next((k[1] for k in left if k[0] == "regime" and k[1] in TOGETHER), None)
    if together is not None and ("regime", "normal") not in left:
        return {n: together if together in make.regimes(s) else "normal" for n, s in tensors}, {("regime", together)}
    for name, spec in random_.sample(tensors, len(tensors)):
        regimes = [k for k in left if k not in tried and k[0] == "regime" and k[1] in make.regimes(spec)]
        if any(k[1] in SPOILING for k in tried) or (tried and regimes and regimes[0][1] in SPOILING):
            regimes = []  # beside it, nothing else could be seen
        tried.update(regimes[:1])
        found[name] = regimes[0][1] if regimes else "normal"
    return found, tried


def _laid_out(pair: Pair, regimes: Mapping[str, str], layout: str) -> dict[str, InputCase]:
    """How each tensor is drawn: all that may lie so in this layout."""
    found = {}
    for name, spec in _tensors(pair).items():
        may = bool(layout) and layout in make.layouts(pair, name, spec)
        found[name] = InputCase(layout=layout if may else "contiguous", regime=regimes[name])
    return {name: how for name, how in found.items() if how != InputCase()}


def _drawn_sizes(
    pair: Pair,
    wanted: Mapping[str, str],
    ends: Mapping[str, str],
    random_: random.Random,
    extent: Extent,
    *,
    halves: bool = False,
) -> dict[str, Any] | None:
    """Sizes of these kinds, of which one is larger than small draws are, and scalars, at these ends, or in `halves`.

    None where `where` allows none, or all would have too many elements.
    """
    long = [symbol for symbol, kind in wanted.items() if kind in LARGE]
    bounded = bool(long) or WHOLE in wanted.values()
    for attempt in range(ATTEMPTS):
        sizes: dict[str, Any] = {}
        for symbol in sorted(pair.symbols):
            kind = wanted.get(symbol, "")
            among = _sizes(pair, symbol, "a tile" if kind == WHOLE else kind) or _plain(pair, symbol)
            most = make.SMALL_HIGH if _has_large(sizes) else max(among)
            if kind == WHOLE:
                most = max(SMALL, WHOLE_UP_TO >> attempt) if extent.large else SMALL
            elif extent.small or long:
                most = max(among) if symbol in long else SMALL
            fitting = [n for n in among if n <= most] or among
            sizes[symbol] = max(fitting) if kind == WHOLE else random_.choice(fitting)
        for name, spec in _scalars(pair).items():
            sizes[name] = _end(spec, ends[name], sizes) if name in ends else _scalar(spec, sizes, random_, halves)
        if pair.where is not None and not pair.where(**accepted(pair.where, sizes)):
            continue
        if bounded and sum(make.elements(spec, sizes) for spec in _whole_tensors(pair)) > MOST_ELEMENTS:
            continue
        return sizes
    return None


def _has_large(sizes: Mapping[str, int]) -> bool:
    return any(n > make.SMALL_HIGH for n in sizes.values())


def _scalar(spec: ScalarSpec, sizes: Mapping[str, Any], random_: random.Random, halves: bool) -> Any:
    if isinstance(spec.values, tuple):
        return random_.choice(spec.values)
    if isinstance(spec.values, Integers):
        least, ends = make.bounds(spec.values, sizes)
        return random_.randint(least, max(least, ends[0] - 1))
    low, high = spec.values.low, spec.values.high
    number = random_.uniform(-1.0 if low is None else low, 1.0 if high is None else high)
    half = round(2 * number) / 2
    within = (low is None or low <= half) and (high is None or half <= high)
    return half if halves and within else number


def _ends(spec: ScalarSpec) -> list[str]:
    """The values of a scalar that each proof draws: every choice, or the ends of its range."""
    if isinstance(spec.values, tuple):
        return [repr(value) for value in spec.values]
    if isinstance(spec.values, Integers):
        return [LEAST, MOST]
    return [end for end, bound in ((LEAST, spec.values.low), (MOST, spec.values.high)) if bound is not None]


def _end(spec: ScalarSpec, end: str, sizes: Mapping[str, Any]) -> Any:
    """The value that is meant."""
    if isinstance(spec.values, tuple):
        return next(value for value in spec.values if repr(value) == end)
    if isinstance(spec.values, Integers):
        least, ends = make.bounds(spec.values, sizes)
        return least if end == LEAST else max(least, ends[0] - 1)
    bound = spec.values.low if end == LEAST else spec.values.high
    return None if bound is None else float(bound)


def _sizes(pair: Pair, symbol: str, kind: str) -> list[int]:
    """The sizes of this kind that the symbol may have."""
    size = pair.size_of(symbol) or Size()
    if symbol not in pair.sizes:
        size = Size(low=size.low, high=max(EDGES[PAST_LARGE]))
    return [n for n in EDGES.get(kind, ()) if size.low <= n <= size.high and n % size.multiple_of == 0]


def _plain(pair: Pair, symbol: str) -> Sequence[int]:
    size = pair.size_of(symbol) or Size(low=0, high=make.SMALL_HIGH)
    found = [n for n in make.PLAIN if size.low <= n <= size.high and n % size.multiple_of == 0]
    if len(found) > FEWEST:
        return found
    return [n for n in _range(size) if n] or _range(size)


def _range(size: Size) -> range:
    return range(-(-size.low // size.multiple_of) * size.multiple_of, size.high + 1, size.multiple_of)


def _whole_tensors(pair: Pair) -> list[TensorSpec]:
    """The inputs that are a tensor each."""
    return [spec for spec in {**pair.inputs, **pair.step_inputs}.values() if isinstance(spec, TensorSpec)]


def _tensor_symbols(pair: Pair) -> set[str]:
    """The sizes that only such tensors have. How large a module or a list becomes is not known beforehand."""
    every = {**pair.inputs, **pair.step_inputs}
    others = {name: spec for name, spec in every.items() if not isinstance(spec, TensorSpec)}
    return {dim for spec in _whole_tensors(pair) for dim in spec.dims if isinstance(dim, str)} - symbols(others)


def _scalars(pair: Pair) -> dict[str, ScalarSpec]:
    every = {**pair.inputs, **pair.step_inputs}
    return {name: spec for name, spec in every.items() if isinstance(spec, ScalarSpec)}


def _tensors(pair: Pair) -> dict[str, TensorSpec]:
    every = {**pair.inputs, **pair.step_inputs}
    return {name: leaf for name, spec in every.items() if (leaf := make.tensor_spec(spec)) is not None}
