"""Plan few draws that together contain every kind of inputs.

Random draws miss some kinds in one run and others in the next. So a proof begins with planned draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import EXPANDED, Integers, ScalarSpec, Size, bounds, elements, symbols
from perfsuite.draws import memory_layouts, tensor_values
from perfsuite.draws.cases import LARGE_EDGES, PLAIN, SMALL_HIGH
from perfsuite.draws.input_kinds import (
    ALONE,
    ANY,
    APART,
    FEWEST,
    LARGE,
    ONES,
    PAST_HALF,
    PAST_LARGE,
    RAGGED,
    TILES,
    TOGETHER_SIZES,
    TRANSPOSED,
    UP_TO_HALF,
    WHOLE,
    Extent,
    Kind,
    drawn_scalars,
    drawn_tensors,
    end_value,
    kinds,
    kinds_in,
    sizes_of_kind,
    whole_tensors,
)
from perfsuite.draws.tensor_values import HALVES, MILD, OTHERS
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case, InputCase

MOST_ELEMENTS = 1 << 18
"""Most elements in all inputs of a draw with a large size, or whose sizes are all of one kind."""
MOST_OF_TILES = 1 << 22
"""Most elements in all inputs of a draw whose sizes are each at the edge of a tile."""
FEW = 5
"""Bound on the remaining sizes of a draw with several sizes at tile edges, if the draw would otherwise have too many
elements."""
SMALL = 17
"""Smallest tile size plus one."""
UP_TO, LEAST_UP_TO = {ONES: 1, WHOLE: 64, RAGGED: 128}, {ONES: 1, WHOLE: SMALL, RAGGED: 32}
"""Kind of all sizes → the largest size of that kind at first, and the smallest bound to which it is reduced if there
are too many elements."""
SPOILING = ("huge", tensor_values.LARGE, "nonfinite", OTHERS)
"""Regimes that hide the other inputs: the answer is often not finite, or the same whatever the other inputs are."""
TOGETHER = ("offset", HALVES)
"""Regimes that all inputs that allow them get together, so that the difference of two inputs is small too, or values of
two inputs are equal."""
MOST_PLANNED = 0.75
"""Largest share of a proof's random draws that planned draws replace."""
ATTEMPTS = 20
"""Maximum number of attempts to draw random sizes that satisfy the pair's `where`."""


def draws(
    pair: Pair,
    dtype: str,
    seed: int,
    *,
    extent: Extent = ANY,
    compiles: Callable[[], bool] = lambda: False,
) -> Iterator[Case]:
    """Yield few draws that together contain all kinds. Kinds APART are included only as far as they fit in these draws.
    No draw violates the pair's `where`.

    The first draw, and every draw once `compiles` returns True, has sizes that do not depend on the seed, so a side
    that compiles for each size finds them in its cache in every proof and every run. Once `compiles` returns True, a
    draw also has few different sizes: all that may be empty are empty together, and likewise all that may be one.
    """
    left = kinds(pair, extent)
    random_ = random.Random(seed)
    first = True
    while any(kind[0] != APART for kind in left):  # no draws are added for APART: random draws contain these kinds too
        few = compiles()
        if few:  # each combination of strides would be compiled separately
            left = [kind for kind in left if kind[0] != APART]
        case = _case(pair, dtype, left, random_, extent, same_sizes=first or few, few_sizes=few)
        first = False
        if case is not None:
            yield case
            held = kinds_in(pair, case)
            left = [k for k in left if k not in held]


def large_draws(pair: Pair, dtype: str, seed: int) -> Iterator[Case]:
    """Yield a draw for each size that may be large, in an order that depends on the seed. The first draw has rows with
    gaps."""
    left = [kind for kind in kinds(pair) if kind[0] == "size" and kind[2] == PAST_LARGE]
    random_, layout = random.Random(seed), "rows"
    for _, symbol, kind in random_.sample(left, len(left)):
        sizes = _drawn_sizes(pair, {symbol: kind}, {}, random_, ANY)
        if sizes is not None:
            inputs = _laid_out(pair, dict.fromkeys(drawn_tensors(pair), "normal"), layout)
            yield Case(dtype=dtype, sizes=sizes, inputs=inputs, seed=random_.getrandbits(31))
            layout = ""


def plain_draws(pair: Pair, dtype: str, seed: int, *, extent: Extent) -> Iterator[Case]:
    """Yield draws with some elements in every dimension, and with ordinary layouts and values, indefinitely. Stop when
    no sizes are found that satisfy the pair's `where`."""
    random_ = random.Random(seed)
    while (sizes := _drawn_sizes(pair, {}, {}, random_, extent)) is not None:
        yield Case(dtype=dtype, sizes=sizes, inputs={}, seed=random_.getrandbits(31))


def replaced(planned: int, draws: int) -> int:
    """Return how many of a proof's `draws` random draws are replaced by the `planned` ones."""
    return min(planned, int(MOST_PLANNED * draws))


def first_failure(prove: Callable[[Case], None], cases: Iterable[Case]) -> tuple[NotEquivalent | None, int]:
    """Return (first failure or None, number of correct draws before it). A caller raises the failure only if no random
    draw fails, because a failing random draw is shrunk."""
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
    """Return a draw that contains some kinds of `left`, and remove from `left` the kinds that it was planned for.
    Return None if no sizes are found."""
    regimes, tried = _regimes(pair, left, random_)
    wanted, ends = {}, {}
    if not tried:
        wanted = _wanted_sizes(pair, left, few=few_sizes)
        if not {*ALONE, ONES} & set(wanted.values()) and HALVES not in regimes.values():
            ends = {k[1]: k[2] for k in reversed(left) if k[0] == "scalar"}
    layout = only = ""
    if set(regimes.values()) <= set(MILD) and not {"empty", "one", ONES, PAST_HALF} & set(wanted.values()):
        # In a long row of equal values, rounding errors add up in one direction.
        left_out = EXPANDED if {*LARGE, *TOGETHER_SIZES} & set(wanted.values()) else ()
        layout = next((k[1] for k in left if k[0] == "layout" and k[1] not in left_out), "")
        if UP_TO_HALF in wanted.values():
            layout = TRANSPOSED  # long rows may have a code path of their own, which must not depend on the layout
        if layout:
            tried.add(("layout", layout))
        else:
            only, layout = next((k[1:] for k in left if k[0] == APART and k[2] not in left_out), ("", ""))
            tried |= {(APART, only, layout)} if only else set()
    inputs = _laid_out(pair, regimes, layout, only)
    tried |= {("sizes", kind) for kind in TOGETHER_SIZES if set(wanted.values()) == {kind}}
    tried |= {("size", *k) for k in wanted.items()} | {("scalar", *k) for k in ends.items()}
    left[:] = [k for k in left if k not in tried]
    source = random.Random(f"{pair.name} {sorted(wanted.items())}") if same_sizes else random_
    sizes = _drawn_sizes(pair, wanted, ends, source, extent, halves=HALVES in regimes.values())
    if sizes is None:
        return None
    return Case(dtype=dtype, sizes=sizes, inputs=inputs, seed=random_.getrandbits(31))


def _wanted_sizes(pair: Pair, left: list[Kind], *, few: bool) -> dict[str, str]:
    """Return symbol → the kind of its size in the next draw. A kind of ALONE is returned by itself, while any is left.

    With `few`, all sizes that may be empty are empty together, and all that may be one are one together.
    """
    every = [(k[1], k[2]) for k in left if k[0] == "size"]
    single = next((k for k in every if k[1] in ALONE), None)
    if single is not None:
        return dict(k for k in every if k[1] == single[1]) if few and single[1] not in LARGE else dict([single])
    for together in TOGETHER_SIZES:
        if ("sizes", together) in left:
            return dict.fromkeys(pair.symbols, together)
    wanted: dict[str, str] = {}
    for number, symbol in enumerate(dict(every)):
        edges = [kind for name, kind in every if name == symbol]
        kind = edges[number % len(edges)]  # different kinds for different symbols, where possible
        if not wanted or _least_elements(pair, {**wanted, symbol: kind}) <= MOST_OF_TILES:
            wanted[symbol] = kind
    return wanted


def _least_elements(pair: Pair, wanted: Mapping[str, str]) -> int:
    """Return the number of elements of all inputs at the smallest sizes of these kinds. The other sizes are about
    FEW."""
    least = {s: min(_plain(pair, s), key=lambda n: abs(n - FEW), default=FEW) for s in pair.symbols}
    least |= {symbol: min(sizes_of_kind(pair, symbol, kind), default=1) for symbol, kind in wanted.items()}
    return _elements(pair, least)


def _elements(pair: Pair, sizes: Mapping[str, Any]) -> int:
    """Return the number of elements of all inputs that are single tensors, at these sizes."""
    return sum(elements(spec, sizes) for spec in whole_tensors(pair))


def _regimes(pair: Pair, left: list[Kind], random_: random.Random) -> tuple[dict[str, str], set[Kind]]:
    """Return (regime of each tensor, kinds that these cover). Each tensor gets a different one of the regimes that are
    left."""
    found: dict[str, str] = {}
    tried: set[Kind] = set()
    tensors = list(drawn_tensors(pair).items())
    together = next((k[1] for k in left if k[0] == "regime" and k[1] in TOGETHER), None)
    if together is not None and ("regime", "normal") not in left:
        regime_of = {n: together if together in tensor_values.regimes(s) else "normal" for n, s in tensors}
        return regime_of, {("regime", together)}
    for name, spec in random_.sample(tensors, len(tensors)):
        regimes = [k for k in left if k not in tried and k[0] == "regime" and k[1] in tensor_values.regimes(spec)]
        if any(k[1] in SPOILING for k in tried) or (tried and regimes and regimes[0][1] in SPOILING):
            regimes = []  # it would hide the other regimes
        tried.update(regimes[:1])
        found[name] = regimes[0][1] if regimes else "normal"
    return found, tried


def _laid_out(pair: Pair, regimes: Mapping[str, str], layout: str, only: str = "") -> dict[str, InputCase]:
    """Return how each tensor is drawn. All tensors that allow this layout get it, or only the tensor `only`."""
    found = {}
    for name, spec in drawn_tensors(pair).items():
        may = bool(layout) and layout in memory_layouts.layouts(pair, name, spec) and only in ("", name)
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
    """Return sizes of the kinds `wanted`, and scalars at `ends` or, with `halves`, multiples of a half.

    None if no attempt satisfies the pair's `where` without too many elements.
    """
    long = tuple(symbol for symbol, kind in wanted.items() if kind in LARGE)
    together = bool(set(TOGETHER_SIZES) & set(wanted.values()))
    counted = _bounds_of_integers(pair).difference(long) if long else set()
    drawing = _Drawing(pair, wanted, random_, extent, long, together, PAST_HALF in wanted.values(), counted)
    for attempt in range(ATTEMPTS):
        sizes: dict[str, Any] = {}
        for symbol in sorted(pair.symbols):
            sizes[symbol] = drawing.size(symbol, sizes, attempt)
        for name, spec in drawn_scalars(pair).items():
            sizes[name] = end_value(spec, ends[name], sizes) if name in ends else _scalar(spec, sizes, random_, halves)
        if not pair.allows(sizes):
            continue
        if _elements(pair, sizes) > (MOST_ELEMENTS if drawing.bounded else MOST_OF_TILES):
            continue
        return sizes
    return None


@dataclass(frozen=True)
class _Drawing:
    """Sampler of sizes of the kinds `wanted`."""

    pair: Pair
    wanted: Mapping[str, str]
    random: random.Random
    extent: Extent
    long: tuple[str, ...]
    """Symbols whose sizes are to be large."""
    together: bool
    """Whether all sizes are of one kind of TOGETHER_SIZES."""
    alone: bool
    """Whether the sizes that are not to be large are 1, where the pair allows it."""
    counted: set[str]
    """Symbols that bound integers, in a draw with a large size."""

    @property
    def bounded(self) -> bool:
        return bool(self.long) or self.together

    def size(self, symbol: str, sizes: Mapping[str, Any], attempt: int) -> int:
        """Return a size. `sizes` are those drawn before it. Later attempts draw smaller sizes."""
        kind = self.wanted.get(symbol, "")
        among = self._among(symbol, kind, attempt)
        most = self._most(symbol, kind, among, sizes, attempt)
        fitting = [n for n in among if n <= most] or among
        if not self.bounded and attempt >= ATTEMPTS // 2:
            fitting = [min(fitting)] if kind else [n for n in fitting if n <= FEW] or [min(fitting)]
        if kind == WHOLE:
            return max(fitting)
        return self.random.choice(_largest(fitting) if self.together else fitting)

    def _among(self, symbol: str, kind: str, attempt: int) -> Sequence[int]:
        among = sizes_of_kind(self.pair, symbol, kind) or _plain(self.pair, symbol)
        if self.alone and symbol not in self.long and (self.pair.size_of(symbol) or Size()).allows(1):
            return [1]  # such as a batch of one sequence in decoding, or a vector
        if symbol in self.counted and attempt < ATTEMPTS // 2:
            return _most_different(self.pair, symbol) or among
        return among

    def _most(self, symbol: str, kind: str, among: Sequence[int], sizes: Mapping[str, Any], attempt: int) -> int:
        if self.together:
            return max(LEAST_UP_TO[kind], UP_TO[kind] >> attempt) if self.extent.large else LEAST_UP_TO[kind]
        if self.extent.small or self.long:
            return max(among) if symbol in (*self.long, *self.counted) else SMALL
        return SMALL_HIGH if _has_large(sizes) else max(among)


def _bounds_of_integers(pair: Pair) -> set[str]:
    """Return the symbols that bound the values of a tensor of integers."""
    integers = [spec for spec in whole_tensors(pair) if isinstance(spec.values, Integers)]
    return symbols([replace(spec, dims=()) for spec in integers])


def _most_different(pair: Pair, symbol: str) -> list[int]:
    """Return bounds of integers for a draw with a large size. If few rows of a table are summed many times, the
    rounding errors of each row add up in one direction, even in a correct sequential sum."""
    size = pair.sizes.get(symbol)
    return [n for n in LARGE_EDGES[3:] if size is None or size.allows(n)]


def _largest(sizes: Sequence[int]) -> Sequence[int]:
    """Return the sizes that exceed the largest tile size that any of them exceeds."""
    tile = max((tile for tile in TILES if tile < max(sizes)), default=0)
    return [n for n in sizes if n > tile]


def _has_large(sizes: Mapping[str, int]) -> bool:
    return any(n > SMALL_HIGH for n in sizes.values())


def _scalar(spec: ScalarSpec, sizes: Mapping[str, Any], random_: random.Random, halves: bool) -> Any:
    if isinstance(spec.values, tuple):
        return random_.choice(spec.values)
    if isinstance(spec.values, Integers):
        least, ends = bounds(spec.values, sizes)
        return random_.randint(least, max(least, ends[0] - 1))
    low, high = spec.values.low, spec.values.high
    number = random_.uniform(-1.0 if low is None else low, 1.0 if high is None else high)
    half = round(2 * number) / 2
    within = (low is None or low <= half) and (high is None or half <= high)
    return half if halves and within else number


def _plain(pair: Pair, symbol: str) -> Sequence[int]:
    size = pair.size_of(symbol) or Size(low=0, high=SMALL_HIGH)
    found = [n for n in PLAIN if size.allows(n)]
    if len(found) > FEWEST:
        return found
    every = _range(size)
    return every[1:] if len(every) > 1 and not every[0] else every


def _range(size: Size) -> range:
    return range(-(-size.low // size.multiple_of) * size.multiple_of, size.high + 1, size.multiple_of)
