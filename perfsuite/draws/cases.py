"""Hypothesis strategies that draw cases, and the one-line text form of a case.

A case is plain data: sizes, the layout and value regime of each input, and one seed. So it shrinks well, and its line
is enough to rebuild the same tensors anywhere.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any

from hypothesis import Phase, assume
from hypothesis import strategies as st

from perfsuite.declare.pair import Pair, is_whole
from perfsuite.declare.specs import EXPANDED, Integers, ScalarSpec, Size, TensorSpec, bounds, tensor_spec
from perfsuite.declare.workload import Workload
from perfsuite.draws.memory_layouts import layouts
from perfsuite.draws.tensor_values import MILD, regimes
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Case, InputCase

# Sizes at which kernels often fail: empty, one, primes, and one more or less than the usual tile sizes.
SMALL_EDGES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33)
LARGE_EDGES = (63, 64, 65, 127, 128, 129, 257)
TELLING = (0, 1, 17, 33)
"""Sizes that are drawn more often, so that a few dozen draws contain each of them."""
SMALL_HIGH = 33

# Hypothesis's explain phase takes several times as long as shrinking, and the printed line says as much.
PHASES = tuple(p for p in Phase if p is not Phase.explain)

# Strategies are cached, because Hypothesis takes longer to create one than to draw from it.
SEEDS = st.integers(0, 2**31 - 1)


@functools.lru_cache(maxsize=1024)
def _among(values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def cases(draw: st.DrawFn, pair: Pair, dtype: str) -> Case:
    """Return a strategy for cases of the pair in this dtype. It shrinks toward small sizes, contiguous layouts, normal
    values and seed 0."""
    sizes = _sizes(draw, pair)
    assume(pair.allows(sizes))
    every = {**pair.inputs, **pair.step_inputs}
    tensors = {name: leaf for name, spec in every.items() if (leaf := tensor_spec(spec)) is not None}
    kind, chosen = _adversarial(draw, tensors)
    inputs: dict[str, InputCase] = {}
    for name, spec in every.items():
        if isinstance(spec, ScalarSpec):
            sizes[name] = draw(_scalar(spec, sizes))
        leaf = tensors.get(name)
        if leaf is None:
            continue
        layout = draw(_among(layouts(pair, name, leaf)))
        if kind == "all" or (kind == "one" and name == chosen):
            regime = draw(_among(regimes(leaf)))
        else:
            regime = "nonfinite" if name == chosen else "normal"
        if layout in EXPANDED and (regime not in MILD or any(sizes[n] > SMALL_HIGH for n in pair.symbols)):
            # The variance of a row of equal large values is only rounding error, and in a long row of equal values the
            # rounding errors add up in one direction.
            layout = "contiguous"
        if layout != "contiguous" or regime != "normal":
            inputs[name] = InputCase(layout=layout, regime=regime)
    assume(pair.allows(sizes))  # once more, with the scalars
    return Case(dtype=dtype, sizes=sizes, inputs=inputs, seed=draw(SEEDS))


def _sizes(draw: st.DrawFn, pair: Pair) -> dict[str, Any]:
    """Draw the sizes. At most one is large, so that their products stay small without rejecting draws."""
    names = sorted(pair.symbols)
    large = draw(_among((None, *names))) if names else None
    return {name: draw(_size(pair.size_of(name), large=name == large)) for name in names}


def _adversarial(draw: st.DrawFn, tensors: Mapping[str, TensorSpec]) -> tuple[str, str | None]:
    """Draw which tensors get values of other regimes than "normal". Return (kind, name of the chosen tensor)."""
    open_ = [name for name, leaf in tensors.items() if "nonfinite" in regimes(leaf)]
    # NaN and ±inf have a kind of their own: a few dozen draws would miss one regime among nine.
    kind = draw(_among(("none", "one", "all", *(["nonfinite"] if open_ else []))))
    among = tuple(open_ if kind == "nonfinite" else tensors)
    chosen = draw(_among(among)) if kind in ("one", "nonfinite") and among else None
    return kind, chosen


@st.composite
def plain_cases(draw: st.DrawFn, pair: Pair, dtype: str) -> Case:
    """Return a strategy for cases with contiguous layouts, normal values and, where the pair allows it, no empty
    dimension."""
    sizes: dict[str, Any] = {}
    for name in sorted(pair.symbols):
        size = pair.size_of(name) or Size(low=0, high=PLAIN[-1])
        among = [s for s in PLAIN if size.allows(s)]
        sizes[name] = draw(_among(tuple(among)) if among else _size(size, large=False))
    assume(pair.allows(sizes))
    for name, spec in {**pair.inputs, **pair.step_inputs}.items():
        if isinstance(spec, ScalarSpec):
            sizes[name] = draw(_scalar(spec, sizes))
    assume(pair.allows(sizes))  # once more, with the scalars
    return Case(dtype=dtype, sizes=sizes, inputs={}, seed=draw(SEEDS))


PLAIN = (3, 5, 7, 13, 17, 23, 16, 24, 32)


@functools.lru_cache(maxsize=256)
def _size(spec: Size | None, *, large: bool) -> st.SearchStrategy[int]:
    low, high, step = (0, SMALL_HIGH, 1) if spec is None else (spec.low, spec.high, spec.multiple_of)
    most = LARGE_EDGES[-1] if spec is None and large else high
    ends = () if spec is None else (high, high - 1)
    # A failing draw shrinks toward the first of these.
    choices = [st.integers(-(-low // step), high // step).map(lambda i: i * step)]
    for among in (TELLING, (*SMALL_EDGES, *ends), LARGE_EDGES):
        found = sorted({e for e in among if low <= e <= most and e % step == 0})
        if found:
            choices.append(st.sampled_from(found))
    return st.one_of(*choices)


def _scalar(spec: ScalarSpec, sizes: Mapping[str, int]) -> st.SearchStrategy[Any]:
    if isinstance(spec.values, tuple):
        return st.sampled_from(spec.values)
    if isinstance(spec.values, Integers):
        low, high = bounds(spec.values, sizes)
        return st.integers(low, max(low, high[0] - 1))
    return st.floats(spec.values.low, spec.values.high, allow_nan=False, allow_infinity=False)


def other_number(spec: ScalarSpec, value: Any, sizes: Mapping[str, Any], rng: random.Random) -> Any:
    """Return another value that the spec allows; the same one if it allows no other."""
    if isinstance(spec.values, tuple):
        return rng.choice([v for v in spec.values if v != value] or [value])
    if isinstance(spec.values, Integers):
        low, (high, *_) = bounds(spec.values, sizes)
        return low + (value - low + rng.randrange(1, max(2, high - low))) % max(1, high - low)
    ends = (spec.values.low, spec.values.high)
    least, most = (value - 1 if end is None else end for end in ends)
    return rng.uniform(least, max(least, most))


def workload_case(workload: Workload, dtype: str, seed: int) -> Case:
    """Return the case of a workload: its sizes, normal values, and this seed. Inputs are contiguous, or have the first
    declared layout if `layouts=` excludes contiguous ones."""
    return Case(dtype=workload.dtype or dtype, sizes=dict(workload.sizes), inputs={}, seed=seed)


STEPS = " steps"
"""Suffix of the part of the line that has the largest number of steps."""


def case_line(case: Case) -> str:
    """Return the case as one short line, e.g. "k=6,n=8;theta=strided/huge;seed=12"."""
    sizes = ",".join(f"{k}={v!r}" for k, v in case.sizes.items())
    inputs = [f"{k}={v.layout}/{v.regime}" for k, v in case.inputs.items()]
    steps = [] if case.steps is None else [f"{case.steps}{STEPS}"]
    return ";".join([*([sizes] if sizes else []), *inputs, *steps, f"seed={case.seed}"])


def _number(text: str) -> bool | int | float:
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdigit() else float(text)


def parse_case(line: str, dtype: str) -> Case:
    """Return the case that `case_line` printed."""
    sizes: dict[str, Any] = {}
    inputs: dict[str, InputCase] = {}
    seed, steps = 0, None
    try:
        for part in filter(None, line.split(";")):
            key, _, value = part.partition("=")
            if part.endswith(STEPS):
                steps = int(part.removesuffix(STEPS))
            elif "/" in value and "," not in part:
                layout, _, regime = value.partition("/")
                inputs[key] = InputCase(layout=layout, regime=regime)
            elif key == "seed" and "," not in part:
                seed = int(value)
            else:
                for item in part.split(","):
                    name, _, number = item.partition("=")
                    sizes[name] = _number(number)
    except ValueError:
        raise PerfsuiteError(
            f"--perfsuite-case {line!r} is not a case; copy the whole line that a failure printed"
        ) from None
    return Case(dtype=dtype, sizes=sizes, inputs=inputs, seed=seed, steps=steps)


def requested_case(line: str, pair: Pair, dtype: str) -> Case:
    """Return the case that the option `--perfsuite-case` names. Raises PerfsuiteError if it is none of this pair."""
    case = parse_case(line, dtype)
    every = {**pair.inputs, **pair.step_inputs}
    needed = pair.symbols | {name for name, spec in every.items() if isinstance(spec, ScalarSpec)}
    wrong = needed ^ set(case.sizes) or {n for n in pair.symbols if not is_whole(case.sizes[n])}
    wrong = wrong or set(case.inputs) - set(every)
    if wrong:
        raise PerfsuiteError(
            f"--perfsuite-case {line!r} is no case of {pair.name}: {sorted(wrong)[0]!r} is missing, unknown or no "
            f"whole number; copy the whole line that a failure of it printed"
        )
    return case
