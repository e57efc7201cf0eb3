"""The kinds of inputs that every proof draws at least once: each regime of values, each layout, each edge of a tile.

Random draws leave out some of them in one run and others in the next. So a proof begins with draws that hold them all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from perfsuite import inputs as make
from perfsuite.errors import NotEquivalent
from perfsuite.pair import Pair
from perfsuite.records import Case, InputCase
from perfsuite.specs import Integers, ScalarSpec, Size, TensorSpec, accepted

TILES = (16, 32, 64, 128)
EDGES = {
    "empty": (0,),
    "one": (1,),
    "one less than a tile": tuple(n - 1 for n in TILES),
    "a tile": TILES,
    "one more than a tile": tuple(n + 1 for n in TILES),
}
"""Kinds of sizes → the sizes of that kind."""
SMALL = 17
"""The smallest tile and one more."""
FEWEST = 2
"""Sizes from here on show what values and layouts do."""
SPOILING = ("huge", "nonfinite")
"""With these in one input the answer is often not finite, whatever is in the others."""
MOST_PLANNED = 0.75
"""Planned draws replace at most this share of the random draws of a proof."""
ATTEMPTS = 20
"""Random sizes are tried so often until they satisfy the pair's `where`."""

Kind: TypeAlias = tuple[str, ...]
"""("regime" or "layout", its name), or ("size", the symbol, its kind)."""


def kinds(pair: Pair) -> list[Kind]:
    """All that a proof of the pair has to draw."""
    found: dict[Kind, None] = {}
    for symbol in sorted(pair.symbols):
        found.update(dict.fromkeys(("size", symbol, kind) for kind in EDGES if _sizes(pair, symbol, kind)))
    for name, spec in _tensors(pair).items():
        found.update(dict.fromkeys(("regime", regime) for regime in make.regimes(spec)))
        found.update(dict.fromkeys(("layout", layout) for layout in make.layouts(pair, name, spec)))
    return list(found)


def kinds_in(pair: Pair, case: Case) -> set[Kind]:
    """Those that a draw holds."""
    sizes = {symbol: case.sizes[symbol] for symbol in pair.symbols}
    found: set[Kind] = {("size", s, kind) for s, n in sizes.items() for kind, edges in EDGES.items() if n in edges}
    if all(n >= FEWEST for n in sizes.values()):
        for name in _tensors(pair):
            how = case.inputs.get(name, InputCase())
            found |= {("regime", how.regime), ("layout", how.layout)}
    return found


def draws(
    pair: Pair, dtype: str, seed: int, *, small: bool = False, compiles: Callable[[], bool] = lambda: False
) -> Iterator[Case]:
    """As few draws as hold all kinds; none that the pair's `where` rules out.

    With `small` the tiles are small ones, where there are some: a kernel that is interpreted takes seconds for others.
    The first draw, and all from when `compiles` says so, have sizes that do not depend on the seed: a side that
    compiles for each size finds them in its cache in every proof and every run.
    """
    left = kinds(pair)
    random_ = random.Random(seed)
    first = True
    while left:
        case = _case(pair, dtype, left, random_, small, same_sizes=first or compiles())
        first = False
        if case is not None:
            yield case
            held = kinds_in(pair, case)
            left = [k for k in left if k not in held]


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
    pair: Pair, dtype: str, left: list[Kind], random_: random.Random, small: bool, *, same_sizes: bool
) -> Case | None:
    """A draw that holds some of `left`; what it was made for is taken away."""
    inputs, tried = _inputs(pair, left, random_)
    wanted = {k[1]: k[2] for k in reversed(left) if k[0] == "size"}
    if tried:  # of an empty tensor values and layouts show nothing
        wanted = {symbol: kind for symbol, kind in wanted.items() if kind not in ("empty", "one")}
    tried |= {("size", *k) for k in wanted.items()}
    left[:] = [k for k in left if k not in tried]
    source = random.Random(f"{pair.name} {sorted(wanted.items())}") if same_sizes else random_
    sizes = _drawn_sizes(pair, wanted, source, small)
    if sizes is None:
        return None
    return Case(dtype=dtype, sizes=sizes, inputs=inputs, seed=random_.getrandbits(31))


def _inputs(pair: Pair, left: list[Kind], random_: random.Random) -> tuple[dict[str, InputCase], set[Kind]]:
    """(how each tensor is drawn, the kinds that are in it): of each tensor another regime and layout that is left."""
    found: dict[str, InputCase] = {}
    tried: set[Kind] = set()
    tensors = list(_tensors(pair).items())
    for name, spec in random_.sample(tensors, len(tensors)):
        open_ = [k for k in left if k not in tried]
        regimes = [k for k in open_ if k[0] == "regime" and k[1] in make.regimes(spec)]
        if any(k[1] in SPOILING for k in tried) or (tried and regimes and regimes[0][1] in SPOILING):
            regimes = []  # beside it, nothing else could be seen
        chosen = [*regimes[:1], *[k for k in open_ if k[0] == "layout" and k[1] in make.layouts(pair, name, spec)][:1]]
        tried.update(chosen)
        found[name] = InputCase(**{k[0]: k[1] for k in chosen})
    return {name: how for name, how in found.items() if how != InputCase()}, tried


def _drawn_sizes(pair: Pair, wanted: Mapping[str, str], random_: random.Random, small: bool) -> dict[str, Any] | None:
    """Sizes of these kinds, of which one is larger than small draws are; None where `where` allows none."""
    for _ in range(ATTEMPTS):
        sizes: dict[str, Any] = {}
        for symbol in sorted(pair.symbols):
            among = _sizes(pair, symbol, wanted.get(symbol, "")) or _plain(pair, symbol)
            most = SMALL if small else make.SMALL_HIGH if _has_large(sizes) else max(among)
            sizes[symbol] = random_.choice([n for n in among if n <= most] or among)
        if pair.where is not None and not pair.where(**accepted(pair.where, sizes)):
            continue
        for name, spec in {**pair.inputs, **pair.step_inputs}.items():
            if isinstance(spec, ScalarSpec):
                sizes[name] = _scalar(spec, sizes, random_)
        return sizes
    return None


def _has_large(sizes: Mapping[str, int]) -> bool:
    return any(n > make.SMALL_HIGH for n in sizes.values())


def _scalar(spec: ScalarSpec, sizes: Mapping[str, Any], random_: random.Random) -> Any:
    if isinstance(spec.values, tuple):
        return random_.choice(spec.values)
    if isinstance(spec.values, Integers):
        least, ends = make.bounds(spec.values, sizes)
        return random_.randint(least, max(least, ends[0] - 1))
    low, high = spec.values.low, spec.values.high
    return random_.uniform(-1.0 if low is None else low, 1.0 if high is None else high)


def _sizes(pair: Pair, symbol: str, kind: str) -> list[int]:
    """The sizes of this kind that the symbol may have."""
    size = pair.size_of(symbol) or Size(low=0, high=max(make.LARGE_EDGES))
    return [n for n in EDGES.get(kind, ()) if size.low <= n <= size.high and n % size.multiple_of == 0]


def _plain(pair: Pair, symbol: str) -> Sequence[int]:
    size = pair.size_of(symbol) or Size(low=0, high=make.SMALL_HIGH)
    found = [n for n in make.PLAIN if size.low <= n <= size.high and n % size.multiple_of == 0]
    if len(found) > FEWEST:
        return found
    return [n for n in _range(size) if n] or _range(size)


def _range(size: Size) -> range:
    return range(-(-size.low // size.multiple_of) * size.multiple_of, size.high + 1, size.multiple_of)


def _tensors(pair: Pair) -> dict[str, TensorSpec]:
    every = {**pair.inputs, **pair.step_inputs}
    return {name: leaf for name, spec in every.items() if (leaf := make.tensor_spec(spec)) is not None}
