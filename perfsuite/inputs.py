"""Inputs: a Hypothesis strategy of cases, and the tensors that a case stands for.

A case is pure data (sizes, layout and value regime of each input, one seed), so that it shrinks well and one
printed line rebuilds the same tensors anywhere.
"""

from __future__ import annotations

import functools
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import Phase, assume
from hypothesis import strategies as st

from perfsuite import expressions, module_copies, rank_parts
from perfsuite.errors import PairError, PerfsuiteError
from perfsuite.pair import TF32, Pair, Workload
from perfsuite.records import Case, InputCase
from perfsuite.specs import (
    EXPANDED,
    LAYOUTS,
    MIDDLE_EXPANDED,
    Bound,
    ConstantSpec,
    Dim,
    Floats,
    GeneratorSpec,
    Integers,
    ListSpec,
    ModuleSpec,
    RecordedSpec,
    Sampled,
    ScalarSpec,
    Size,
    TensorSpec,
    accepted,
    holds,
)

# Where kernels go wrong: empty, one, primes, and one off the usual tile sizes.
SMALL_EDGES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33)
LARGE_EDGES = (63, 64, 65, 127, 128, 129, 257)
TELLING = (0, 1, 17, 33)
"""Sizes that are drawn more often, so that a few dozen draws hold each of them."""
SMALL_HIGH = 33

UNBOUNDED_REGIMES = (
    "normal",
    "sorted",
    "repeated",
    "zeros",
    "halves",
    "offset",
    "mixed",
    "tiny",
    "huge",
    "denormal",
    "nonfinite",
)
BOUNDED_REGIMES = ("normal", "sorted", "repeated", "zeros", "halves", "offset", "edges", "tiny")
INTEGER_REGIMES = ("normal", "sorted", "repeated", "edges")
HALVES = "halves"
OTHERS = "others"
"""Regime of integers that are all among `also`, as labels that are ignored."""
BLANK = "blank"
"""Regime of zeros where floats are asked for, allowed or not: only the sizes matter. The memory is not even written."""
BLANK_DRAWN = 1 << 16
"""Integers that are drawn in the regime BLANK. Where more are asked for these are repeated."""
MILD = ("normal", "sorted", HALVES, "edges")
"""Regimes of values with which a wrong layout shows."""

# Explaining a failing draw takes several times as long as shrinking it, and the one line that is printed says as much.
PHASES = tuple(p for p in Phase if p is not Phase.explain)

# Above this many elements values are drawn on the target device: drawing 50 M on a CPU takes most of a second.
DRAW_ON_DEVICE = 1 << 16


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of that name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PairError(f"dtype {name!r} is not a torch dtype")
    return dtype


# --- drawing cases -------------------------------------------------------------------------------------------

# Strategies are kept: Hypothesis takes longer to make one than to draw from it.
SEEDS = st.integers(0, 2**31 - 1)


@functools.lru_cache(maxsize=1024)
def _among(values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def cases(draw: st.DrawFn, pair: Pair, dtype: str) -> Case:
    """Return a strategy of cases of the pair in that precision; shrinks toward small, contiguous, normal, seed 0."""
    names = sorted(pair.symbols)
    # At most one size is large, so that products of sizes stay small without rejecting draws.
    large = draw(_among((None, *names))) if names else None
    sizes: dict[str, Any] = {}
    for name in names:
        sizes[name] = draw(_size(pair.size_of(name), large=name == large))
    assume(pair.allows(sizes))
    every = {**pair.inputs, **pair.step_inputs}
    inputs: dict[str, InputCase] = {}
    tensors = {name: leaf for name, spec in every.items() if (leaf := tensor_spec(spec)) is not None}
    open_ = [name for name, leaf in tensors.items() if "nonfinite" in regimes(leaf)]
    # NaN and ±inf have a share of their own: one regime among nine would be missed by a few dozen draws.
    adversarial = draw(_among(("none", "one", "all", *(["nonfinite"] if open_ else []))))
    among = tuple(open_ if adversarial == "nonfinite" else tensors)
    chosen = draw(_among(among)) if adversarial in ("one", "nonfinite") and among else None
    for name, spec in every.items():
        if isinstance(spec, ScalarSpec):
            sizes[name] = draw(_scalar(spec, sizes))
        leaf = tensors.get(name)
        if leaf is None:
            continue
        layout = draw(_among(layouts(pair, name, leaf)))
        if adversarial == "all" or (adversarial == "one" and name == chosen):
            regime = draw(_among(regimes(leaf)))
        else:
            regime = "nonfinite" if name == chosen else "normal"
        if layout in EXPANDED and (regime not in MILD or any(sizes[n] > SMALL_HIGH for n in names)):
            # Rows of one large value have no variance but what rounding makes of it, and of a long row of equal values
            # the roundings add up in one direction.
            layout = "contiguous"
        if layout != "contiguous" or regime != "normal":
            inputs[name] = InputCase(layout=layout, regime=regime)
    assume(pair.allows(sizes))  # once more, with the scalars
    return Case(dtype=dtype, sizes=sizes, inputs=inputs, seed=draw(SEEDS))


@st.composite
def plain_cases(draw: st.DrawFn, pair: Pair, dtype: str) -> Case:
    """Return a strategy of cases with some elements in every dimension, plain layouts and values."""
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
    """Return another value that the spec allows; the same one where it allows no other."""
    if isinstance(spec.values, tuple):
        return rng.choice([v for v in spec.values if v != value] or [value])
    if isinstance(spec.values, Integers):
        low, (high, *_) = bounds(spec.values, sizes)
        return low + (value - low + rng.randrange(1, max(2, high - low))) % max(1, high - low)
    ends = (spec.values.low, spec.values.high)
    least, most = (value - 1 if end is None else end for end in ends)
    return rng.uniform(least, max(least, most))


def tensor_spec(spec: Any) -> TensorSpec | None:
    """Return the tensor spec at the leaves of `spec`, which share layout and regime."""
    if isinstance(spec, TensorSpec):
        return spec
    if isinstance(spec, ListSpec):
        return tensor_spec(spec.item)
    if isinstance(spec, (tuple, list)):
        return next(filter(None, map(tensor_spec, spec)), None)
    if isinstance(spec, dict):
        return next(filter(None, map(tensor_spec, spec.values())), None)
    return None


def layouts(pair: Pair, name: str, spec: TensorSpec) -> tuple[str, ...]:
    allowed = spec.layouts or LAYOUTS
    written = name in pair.changed or pair.adjust is not None
    # An expanded tensor has several elements in one place: writing into it has no meaning, and values that depend on
    # each other would no longer do so.
    apart = written or (isinstance(spec.values, Sampled) and spec.layouts is None)
    left_out = EXPANDED if apart else () if len(spec.dims) > 2 else (MIDDLE_EXPANDED,)
    return tuple(layout for layout in allowed if layout not in left_out) or ("contiguous",)


def regimes(spec: TensorSpec) -> tuple[str, ...]:
    """Return the value regimes that the spec's values allow."""
    match spec.values:
        case Sampled():
            return ("normal",)
        case Integers() as whole:
            return (*INTEGER_REGIMES, *["outside"] * whole.outside, *[OTHERS] * bool(whole.also))
        case Floats() as values:
            if values.low is None and values.high is None:
                every: tuple[str, ...] = UNBOUNDED_REGIMES
            else:
                every = BOUNDED_REGIMES if values.bounded else (*BOUNDED_REGIMES, "mixed", "huge")
            left_out = {"nonfinite": not values.nonfinite, "offset": not values.offset}
            return tuple(regime for regime in every if not left_out.get(regime))


def workload_case(workload: Workload, dtype: str, seed: int) -> Case:
    """Return the case of a workload: its sizes, plain layouts and values, and a seed of this run."""
    return Case(dtype=workload.dtype or dtype, sizes=dict(workload.sizes), inputs={}, seed=seed)


# --- building tensors ----------------------------------------------------------------------------------------


def build(pair: Pair, case: Case, device: str, *, home: Path | None = None) -> dict[str, Any]:
    """Return the inputs that the case stands for, on `device`; `home` is where recorded inputs are found."""
    values = {
        name: _build(spec, name, case, device, home, case.inputs.get(name, InputCase()))
        for name, spec in pair.inputs.items()
    }
    if pair.adjust is not None:
        with torch.no_grad():
            if device == "cpu" or not _adjusted_on_cpu(pair, values):
                pair.adjusted(values)
    return _parted(pair, pair.inputs, _rounded(pair, case, values))


def _rounded(pair: Pair, case: Case, values: dict[str, Any]) -> dict[str, Any]:
    """Round the inputs to the precision that the pair declares, in the case's dtype: the truth is computed on these."""
    working = pair.precision or case.dtype
    rounded: dict[str, Any] = rounder(working, case.dtype)(rounder(case.dtype, working)(values))
    return rounded


def rounder(source: str, target: str) -> Callable[[Any], Any]:
    """Return a function that rounds tensors of one precision to the other; inputs with a dtype of their own keep it."""
    if TF32 in (source, target):
        return lambda value: value
    old, new = dtype_of(source), dtype_of(target)
    if old == new:
        return lambda value: value
    return lambda value: map_tensors(value, lambda t: t.to(new) if t.dtype == old else t)


def _parted(pair: Pair, specs: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs, with the same part for all ranks where the pair asks for that."""
    return rank_parts.equal(specs, values, pair.at_ranks) if pair.equal_parts else values


ADJUSTED_ON_CPU = 1 << 14
"""Most elements of inputs that are adjusted on the CPU: a GPU takes longer to begin, and cuDNN plans for each size."""


def _adjusted_on_cpu(pair: Pair, values: dict[str, Any]) -> bool:
    """Adjust copies on the CPU and copy them back. Return False, with nothing changed, where that is not possible."""
    if sum(tensor.numel() for _, tensor in tensors_in(values)) > ADJUSTED_ON_CPU:
        return False
    copies = map_tensors(values, lambda tensor: tensor.detach().to("cpu", copy=True))
    try:
        pair.adjusted(copies)
    except Exception:  # a function of the user's may need the device, and says again there what is wrong
        return False
    copy_values(values, copies)
    return True


def with_objects_of(
    pair: Pair, values: Mapping[str, Any], case: Case, device: str, *, home: Path | None = None
) -> dict[str, Any]:
    """Return the same inputs, with modules and constants as `pair` builds them, for a pair of another revision.

    The tensors in them are those of `values`. Raises PairError where they do not have the same form.
    """
    result = dict(values)
    for name, spec in pair.inputs.items():
        if holds(spec, (ModuleSpec, ConstantSpec)):
            built = _build(spec, name, case, device, home, case.inputs.get(name, InputCase()))
            forms = [[(path, t.shape, t.dtype) for path, t in tensors_in(v)] for v in (built, values[name])]
            if forms[0] != forms[1]:
                raise PairError(f"input {name!r} has other tensors than it had")
            copy_values(built, values[name])
            result[name] = built
    return result


def build_step(pair: Pair, case: Case, device: str, step: int) -> dict[str, Any]:
    """Return the step inputs of a stateful pair at that step: drawn anew for each.

    In one of four steps of a proof's draw they are zeros, if the values allow it, as the gradients of a batch without
    an error.
    """
    zeros = bool(case.inputs) and step > 1 and _hash(case.seed, f"zeros@{step}") % 4 == 0
    values = {
        name: _build(spec, f"{name}@{step}", case, device, None, _of_step(spec, case.inputs.get(name), zeros))
        for name, spec in pair.step_inputs.items()
    }
    return _parted(pair, pair.step_inputs, _rounded(pair, case, values))


def _of_step(spec: Any, how: InputCase | None, zeros: bool) -> InputCase:
    how, leaf = how or InputCase(), tensor_spec(spec)
    return replace(how, regime="zeros") if zeros and leaf is not None and "zeros" in regimes(leaf) else how


def _build(spec: Any, name: str, case: Case, device: str, home: Path | None, how: InputCase) -> Any:
    match spec:
        case TensorSpec():
            return _tensor(spec, name, case, device, how)
        case ScalarSpec():
            return case.sizes[name]
        case ConstantSpec():
            return spec.value
        case ListSpec():
            count = _resolve(spec.count, case.sizes)
            # One item of several is contiguous: a side may look at one of them, and assume the same layout for the
            # others.
            plain = count % 2 * (count - 1) if count > 1 else None
            hows = [replace(how, layout="contiguous") if i == plain else how for i in range(count)]
            return [_build(spec.item, f"{name}.{i}", case, device, home, hows[i]) for i in range(count)]
        case ModuleSpec():
            return _module(spec, name, case, device)
        case GeneratorSpec():
            return generator_for(case.seed, name, device)
        case RecordedSpec():
            return _recorded(spec, case, device, home)
        case tuple() | list():
            built = [_build(s, f"{name}.{i}", case, device, home, how) for i, s in enumerate(spec)]
            return type(spec)(built)
        case dict():
            return {k: _build(s, f"{name}.{k}", case, device, home, how) for k, s in spec.items()}
    raise PairError(
        f"input {name!r}: {spec!r} is not a spec; use tensor(), scalar(), listof(), module(), generator() or constant()"
    )


def _resolve(dim: Dim | Bound, sizes: Mapping[str, Any]) -> int:
    return expressions.value(dim, sizes) if isinstance(dim, str) else dim


def bounds(values: Integers, sizes: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    upper = values.high if isinstance(values.high, tuple) else (values.high,)
    return _resolve(values.low, sizes), tuple(_resolve(b, sizes) for b in upper)


def generator_for(seed: int, name: str, device: str) -> torch.Generator:
    """Return a generator that depends on the seed and the input's name alone."""
    generator = torch.Generator(device=device)
    generator.manual_seed(_hash(seed, name))
    return generator


def _hash(seed: int, name: str) -> int:
    """Return 32 bits, all that a CPU generator takes of its seed."""
    return zlib.crc32(f"{seed} {name}".encode())


def elements(spec: TensorSpec, sizes: Mapping[str, Any]) -> int:
    """Return the number of elements at these sizes."""
    return math.prod(_resolve(d, sizes) for d in spec.dims)


def _tensor(spec: TensorSpec, name: str, case: Case, device: str, how: InputCase) -> torch.Tensor:
    shape = tuple(_resolve(d, case.sizes) for d in spec.dims)
    dtype = dtype_of(spec.dtype or case.dtype)
    dim = _expanded_dim(spec, how.layout, shape)
    if dim is not None:
        once = _values(spec, name, case, device, how.regime, (*shape[:dim], 1, *shape[dim + 1 :]), dtype)
        return once.expand(shape)
    data = _values(spec, name, case, device, how.regime, shape, dtype)
    return with_layout(data, how.layout, spec.align)


def _expanded_dim(spec: TensorSpec, layout: str, shape: tuple[int, ...]) -> int | None:
    """Return the dimension along which a tensor is expanded; None where it is not, or no such dimension has two
    elements.

    It does not depend on the seed: other values at the same sizes lie in memory in the same way. It is always the first
    where values belong to others of their row: a matrix of the pair's making, bounds by column.
    """
    if layout not in EXPANDED:
        return None
    last = len(shape) - 1
    together = isinstance(spec.values, Sampled) or (
        isinstance(spec.values, Integers) and isinstance(spec.values.high, tuple)
    )
    if layout == "expanded" or together:
        among = range(min(1, len(shape)))
    else:
        among = range(1, last) if layout == MIDDLE_EXPANDED else range(last, 0, -1)
    return next((dim for dim in among if shape[dim] > 1), None)


def with_layout(data: torch.Tensor, layout: str, align: int = 0) -> torch.Tensor:
    """Return the same values in another memory layout; with an offset, at a multiple of `align` bytes.

    The memory between the elements is poisoned, so that a read of it shows.
    """
    if layout == "transposed" and data.ndim >= 2:
        return data.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "permuted" and data.ndim >= 3:
        return data.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "channels last" and data.ndim >= 3:
        return data.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "slice" and data.ndim >= 3:
        dim = 1 + data.numel() % (data.ndim - 2)  # any but the first and the last
        shape = [n + (d == dim) for d, n in enumerate(data.shape)]
        view = _poisoned(data, tuple(shape)).narrow(dim, 0, data.shape[dim])
        view.copy_(data)
        return view
    if layout in ("rows", "slice", "permuted", "channels last") and data.ndim >= 2:
        view = _poisoned(data, (*data.shape[:-1], 3 * data.shape[-1]))[..., : data.shape[-1]]
        view.copy_(data)
        return view
    if layout in ("strided", "transposed", "rows", "slice", "permuted", "channels last") and data.ndim >= 1:
        wide = _poisoned(data, (*data.shape[:-1], 2 * data.shape[-1]))
        view = wide[..., ::2]
        view.copy_(data)
        return view
    if layout == "offset":
        skipped = max(1, align // data.element_size()) * (1 + data.numel() % 3)
        flat = _poisoned(data, (data.numel() + skipped,))
        view = flat[skipped:].view(data.shape)
        view.copy_(data)
        return view
    return data


def _poisoned(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    made = like.new_empty(shape)
    fill_poison(made)
    return made


def fill_poison(tensor: torch.Tensor) -> None:
    """Fill floating tensors with NaN, and integer tensors with their largest value."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _values(
    spec: TensorSpec, name: str, case: Case, device: str, regime: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    if regime == BLANK and isinstance(spec.values, Floats):
        return torch.zeros(shape, dtype=dtype, device=device)
    numel = math.prod(shape)
    source = device if numel > DRAW_ON_DEVICE and not isinstance(spec.values, Sampled) else "cpu"
    generator = generator_for(case.seed, name, source)
    if isinstance(spec.values, Sampled):
        made = spec.values.make(generator, shape, dtype)
        if not isinstance(made, torch.Tensor) or tuple(made.shape) != shape:
            found = f"shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else f"a {type(made).__name__}"
            raise PairError(
                f"input {name.partition('@')[0]!r}: the function in values=sampled(…) gives {found} where a tensor of "
                f"shape {shape} is asked for; make it of the shape that it is given"
            )
        return made.to(device=device, dtype=dtype)
    if isinstance(spec.values, Integers):
        low, high = bounds(spec.values, case.sizes)
        repeated = regime == BLANK and numel > BLANK_DRAWN and len(high) == 1
        whole = _integers(generator, source, low, high, regime, (BLANK_DRAWN,) if repeated else shape, dtype)
        whole = _with_others(whole, spec.values.also, generator, source, every=regime == OTHERS)
        whole = whole.to(device=device, dtype=dtype)
        return whole.repeat(-(-numel // BLANK_DRAWN))[:numel].view(shape) if repeated else whole
    real = _floats(generator, source, spec.values, regime, shape, dtype)
    made = real.to(dtype)
    return (made if regime == "nonfinite" else _within(made, spec.values)).to(device)


def _within(tensor: torch.Tensor, values: Floats) -> torch.Tensor:
    """Return the values made finite and within the bounds, which rounding to the dtype may exceed."""
    top = torch.finfo(tensor.dtype).max
    low = -top if values.low is None else _inside(values.low, tensor.dtype, math.inf)
    high = top if values.high is None else _inside(values.high, tensor.dtype, -math.inf)
    return tensor.clamp(low, max(low, high))


@functools.lru_cache(maxsize=256)
def _inside(bound: float, dtype: torch.dtype, toward: float) -> float:
    nearest = torch.tensor(bound, dtype=torch.float64).to(dtype)
    if (float(nearest) < bound) if toward > 0 else (float(nearest) > bound):
        nearest = torch.nextafter(nearest, torch.tensor(toward, dtype=dtype))
    return float(nearest)


def _integers(
    generator: torch.Generator,
    source: str,
    low: int,
    high: tuple[int, ...],
    regime: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    upper = torch.tensor(high, device=source)
    span = (upper - low).clamp_min(1)  # an empty range yields its lower bound
    unit = torch.rand(shape, generator=generator, device=source, dtype=torch.float64)
    drawn = low + (unit * span).long()
    if regime == "edges":
        drawn = torch.where(unit < 0.5, torch.full_like(drawn, low), (low + span - 1).expand_as(drawn))
    elif regime == "repeated" and drawn.numel():
        drawn = drawn.flatten()[:1].expand(drawn.numel()).reshape(shape).clamp(max=low + span - 1)
    elif regime == "sorted" and drawn.ndim:
        drawn = drawn.sort(dim=0).values
    elif regime == "outside":
        far = 2**40 if dtype.is_floating_point else min(2**40, torch.iinfo(dtype).max)
        beyond = torch.tensor([-1, -far, far], device=source)
        pick = torch.randint(0, 4, shape, generator=generator, device=source)
        off = torch.where(pick == 3, upper.expand(drawn.shape), beyond[pick.clamp(max=2)])
        drawn = torch.where(unit < 0.4, off, drawn)
    return drawn


def _with_others(
    whole: torch.Tensor, also: tuple[int, ...], generator: torch.Generator, source: str, *, every: bool
) -> torch.Tensor:
    """Replace one value in eight, or every one, by one of `also`."""
    if not also:
        return whole
    others = torch.tensor(also, device=source)[
        torch.randint(0, len(also), whole.shape, generator=generator, device=source)
    ]
    chosen = torch.randint(0, 8, whole.shape, generator=generator, device=source) == 0
    return others if every else torch.where(chosen, others, whole)


LARGE_ACTIVATION = 2.0**9
"""A usual size of activations in float16, at which their squares overflow."""


def _floats(
    generator: torch.Generator,
    source: str,
    values: Floats,
    regime: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    if regime == "zeros":
        zeros = torch.zeros(shape, device=source)
        if values.low is not None or values.high is not None:
            return zeros.clamp(values.low, values.high)
        return zeros.copysign(torch.rand(shape, generator=generator, device=source) - 0.5)
    info = torch.finfo(dtype)
    work = torch.float64 if math.prod(shape) <= DRAW_ON_DEVICE else torch.float32
    if values.low is None and values.high is None:
        real = torch.randn(shape, generator=generator, device=source, dtype=work)
        middle, offset, deviation = 0.0, 16.0, 2.0**-2
    else:
        low = values.low if values.low is not None else (values.high or 0.0) - 4.0
        high = values.high if values.high is not None else low + 4.0
        real = torch.rand(shape, generator=generator, device=source, dtype=work) * (high - low) + low
        middle, offset, deviation = (low + high) / 2, (high - low) * 3 / 8, 2.0**-6
    # With one bound the values lie as far beyond it as others lie from zero.
    origin = next((bound for bound in (values.low, values.high) if bound is not None), 0.0)
    match regime:
        case "halves":  # few different values: ties, exact zeros, and values that are rounded either way
            real = (2 * real).round() / 2
        case "sorted" if real.ndim:
            real = real.sort(dim=-1).values
        case "repeated" if real.numel():
            real = (
                real.flatten()[: max(1, real.shape[-1] if real.ndim else 1)]
                .repeat(-(-real.numel() // max(1, real.shape[-1] if real.ndim else 1)))[: real.numel()]
                .reshape(shape)
            )
        case "offset":  # small differences of large values: E[x²] − E[x]² loses its digits
            real = middle + offset + (real - middle) * deviation
        # Far enough from the ends of the range that a few factors neither overflow nor underflow in any order.
        case "tiny":
            real = real * info.tiny**0.25
        case "huge":
            factor = info.max**0.25
            if dtype == torch.float16 and torch.rand((), generator=generator, device=source) < 0.5:
                factor = LARGE_ACTIVATION
            real = origin + (real - origin) * factor
        case "denormal":
            real = real * info.tiny / 8
        case "mixed":
            decades = min(6.0, math.log10(info.max) / 2)
            scale = 10 ** ((torch.rand(shape, generator=generator, device=source, dtype=work) * 2 - 1) * decades)
            real = origin + (real - origin) * scale
        case "edges" if values.low is not None or values.high is not None:  # one of a list may have bounds
            pick = torch.randint(0, 3, shape, generator=generator, device=source)
            middle = min(max(0.0, float(real.min())), float(real.max())) if real.numel() else 0.0
            real = torch.where(pick == 0, real.new_tensor(low), torch.where(pick == 1, real.new_tensor(high), middle))
        case "nonfinite":
            special = torch.tensor([math.nan, math.inf, -math.inf, math.nan], dtype=work, device=source)
            special[3] = -special[3]  # as ∞ − ∞ gives it on many processors: other bits
            which = torch.randint(0, 4, shape, generator=generator, device=source)
            hit = torch.rand(shape, generator=generator, device=source, dtype=work) < 0.15
            real = torch.where(hit, special[which], real)
    if values.low is not None or values.high is not None:
        if regime == "tiny" and not (values.low or 0.0) <= 0.0 <= (values.high or 0.0):
            real = torch.full_like(real, low)
        real = real.clamp(values.low, values.high)
    return real


def _module(spec: ModuleSpec, name: str, case: Case, device: str) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        _seed(_hash(case.seed, name))
        built = spec.build(**accepted(spec.build, case.sizes))
    return built.to(device=device, dtype=dtype_of(case.dtype))


def _seed(seed: int) -> None:
    """Seed as torch.manual_seed does, which takes a millisecond for the kinds of devices that are not there."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def _recorded(spec: RecordedSpec, case: Case, device: str, home: Path | None) -> Any:
    path = (home or Path.cwd()) / spec.path
    try:
        value = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise PairError(f"recorded({spec.path!r}): no such file {path}; record it again with torch.save") from None
    return map_tensors(value, lambda t: t.to(dtype_of(case.dtype)) if t.is_floating_point() else t)


# --- walking and copying -------------------------------------------------------------------------------------


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same nested value with every tensor changed. Modules are copied with their tensors changed; generators
    are copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, torch.Generator):
        return torch.Generator(device=value.device).set_state(value.get_state())
    if isinstance(value, torch.nn.Module):
        return module_copies.changed_copy(value, change)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(v, change) for v in value)
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    return value


def tensors_in(value: Any, path: str = "", *, buffers: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor in a nested value, including the parameters of modules and their
    `buffers`."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, torch.nn.Module):
        for name, parameter in [*value.named_parameters(), *(value.named_buffers() if buffers else ())]:
            yield f"{path}.{name}", parameter
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{i}]", buffers=buffers)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}[{key!r}]", buffers=buffers)


def changing(pair: Pair, name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor of an input that a call may change."""
    if name in pair.changed:
        keeps = name in pair.keeping_parameters
        parameters = {path for path, _ in tensors_in(value, name, buffers=False)} if keeps else set()
        yield from ((path, tensor) for path, tensor in tensors_in(value, name) if path not in parameters)


def unchanging(pair: Pair, values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor of these inputs that no call may change."""
    for name, value in values.items():
        if name not in pair.changed:
            yield from tensors_in(value, name)
        elif name in pair.keeping_parameters:
            yield from tensors_in(value, name, buffers=False)


def generators_in(value: Any) -> Iterator[torch.Generator]:
    """Yield every generator in a nested value."""
    if isinstance(value, torch.Generator):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from generators_in(item)


def bytes_in(value: Any) -> int:
    """Return the bytes of all tensors in a nested value."""
    return sum(t.numel() * t.element_size() for _, t in tensors_in(value))


def clone(value: Any) -> Any:
    """Return a copy in fresh memory that keeps each tensor's layout (strides, offset of the storage's start)."""
    return map_tensors(value, _clone_tensor)


def _clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return tensor.clone()
    if 0 in tensor.stride() and tensor.numel() > 1:
        index = tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())
        return tensor[index].clone().expand(tensor.shape)
    # The whole storage is copied, so that the view keeps its strides and offset.
    whole = memory_of(tensor).clone()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether several elements of an expanded tensor lie in one place."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage in one dimension, including the memory between its elements."""
    return tensor.detach().new_empty(0).set_(tensor.untyped_storage())


def copy_values(into: Any, values: Any, *, counted: bool = True) -> None:
    """Copy other values into the same memory, tensor by tensor of two nested values of one form; states of generators,
    too.

    Unless `counted`, torch's version counters stay as they are, as where a custom kernel writes.
    """
    for (_, tensor), (_, value) in zip(tensors_in(into), tensors_in(values), strict=True):
        _copy_tensor(tensor.detach() if counted else tensor.data, value)
    for generator, other in zip(generators_in(into), generators_in(values), strict=True):
        generator.set_state(other.get_state())


def _copy_tensor(target: torch.Tensor, values: torch.Tensor) -> None:
    # What is expanded is written to once.
    for dim, stride in enumerate(target.stride()):
        if not stride:
            width = min(1, target.shape[dim])
            target, values = target.narrow(dim, 0, width), values.narrow(dim, 0, width)
    target.copy_(values)


def upcast(value: Any) -> Any:
    """Return floating tensors in float64, in fresh memory, and copies of everything else."""
    return map_tensors(
        value, lambda t: t.detach().to(torch.float64, copy=True) if t.is_floating_point() else _clone_tensor(t)
    )


def jitter(pair: Pair, values: Mapping[str, Any], seed: int, name: str, eps: float) -> dict[str, Any]:
    """Return the inputs moved by up to the relative amount `eps`, within their domain: a draw close to this one.

    Below the smallest normal number the spacing is that of the smallest normal number, so that values move by `eps` of
    it.
    """

    def moved(spec: Any, generator: torch.Generator, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return _clone_tensor(tensor)
        work = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        noise = torch.rand(tensor.shape, generator=generator, device=generator.device, dtype=work).to(tensor.device)
        share, tiny, old = noise.sub_(0.5).mul_(2 * eps), torch.finfo(tensor.dtype).tiny, tensor.detach()
        subnormal = old + old.sign() * tiny * share
        near = torch.where(old.abs() < tiny, subnormal, old * share.add(1.0)).to(tensor.dtype)
        leaf = tensor_spec(spec)
        if leaf is not None and isinstance(leaf.values, Floats) and (leaf.values.low, leaf.values.high) != (None, None):
            return _within(near, leaf.values)
        return near

    every = {**pair.inputs, **pair.step_inputs}
    result: dict[str, Any] = {}
    for key, value in values.items():
        large = next((t.device.type for _, t in tensors_in(value) if t.numel() > DRAW_ON_DEVICE), "cpu")
        generator = generator_for(seed, f"jitter {name} {key}", large)
        result[key] = map_tensors(value, functools.partial(moved, every[key], generator))
    return result


# --- one line that reproduces --------------------------------------------------------------------------------


STEPS = " steps"
"""End of the part of the line that says the most steps that are taken."""


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
