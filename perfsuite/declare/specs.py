"""Describe an input: its shape in symbolic sizes, its dtype and its values.

A spec is a plain description. `perfsuite.draws.cases` draws from it with Hypothesis, and `perfsuite.draws.inputs`
builds tensors. This module does not import torch, so declaring a pair costs nothing.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from perfsuite.declare import expressions
from perfsuite.errors import PairError

if TYPE_CHECKING:
    import torch

Dim: TypeAlias = "int | str"
Bound: TypeAlias = "int | str"


@dataclass(frozen=True, kw_only=True, slots=True)
class Floats:
    """Real values. Without bounds, they have every magnitude of the dtype, including NaN and infinities.

    `low` and `high` bound the domain. Extreme values are then within the bounds and finite.
    """

    low: float | None = None
    high: float | None = None
    nonfinite: bool = True
    offset: bool = True

    @property
    def bounded(self) -> bool:
        return self.low is not None and self.high is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Integers:
    """Integers in [low, high), as in `torch.randint`. Bounds may be names of sizes.

    A tuple of upper bounds has one for each column of the last dimension. With `outside`, some drawn values are outside
    the bounds, for functions that define the result in that case. One value in eight is one of `also`.
    """

    low: Bound = 0
    high: Bound | tuple[Bound, ...] = 2
    outside: bool = False
    also: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Values drawn by a function of (generator, shape, dtype), on the CPU."""

    make: Callable[[torch.Generator, tuple[int, ...], torch.dtype], torch.Tensor]


Values: TypeAlias = "Floats | Integers | Sampled"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A tensor of symbolic sizes. `dtype=None` means the precision under test."""

    dims: tuple[Dim, ...]
    dtype: str | None = None
    values: Values = Floats()
    period: float | None = None
    layouts: tuple[str, ...] | None = None
    differentiable: bool = True
    align: int = 0
    least: int = 0
    by_rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalarSpec:
    """A Python number or bool: a size by name, or a draw from `values`."""

    values: Floats | Integers | tuple[bool | int | float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListSpec:
    """`count` inputs of one spec, as a list."""

    count: Dim
    item: Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSpec:
    """A `torch.nn.Module` with its parameters, which is built for each draw from the sizes.

    The draw seeds the weights. Those that are then all equal, such as zero biases, are changed a little. The module is
    cast to the dtype under test and moved to the device.
    """

    build: Callable[..., torch.nn.Module]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSpec:
    """An input saved by `torch.save` in a real run. Floating-point tensors are cast to the dtype under test."""

    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantSpec:
    """The same Python value in every draw."""

    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorSpec:
    """A `torch.Generator` of the device, seeded by the draw."""


# A spec, or a tuple, list or dict of specs.
Spec: TypeAlias = "TensorSpec | ScalarSpec | ListSpec | ModuleSpec | RecordedSpec | ConstantSpec | GeneratorSpec | Any"

ANY_WHOLE = Integers()
"""Values of a tensor of integers, or bools, without a declared range."""
RANKS = "ranks"
"""Name of the size that is the number of processes in which a pair is called."""
MIDDLE_EXPANDED = "middle expanded"
EXPANDED = ("expanded", "inner expanded", MIDDLE_EXPANDED)
LAYOUTS = ("contiguous", "transposed", "strided", "offset", *EXPANDED, "rows", "slice", "permuted", "channels last")
"""Memory layouts of a drawn tensor.

"expanded": along the first dimension; "inner expanded": along the last; "middle expanded": along the first one between
them, as for heads that share keys; "rows": a part of wider rows, as of a projection that is split into three; "slice":
all rows except the last, as in `logits[:, :-1]`; "permuted": the two dimensions before the last exchanged in memory.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Range of one symbolic size in drawn cases: [low, high], a multiple of `multiple_of`."""

    low: int = 0
    high: int = 33
    multiple_of: int = 1

    def allows(self, value: int) -> bool:
        """Return whether the size may have this value."""
        return self.low <= value <= self.high and value % self.multiple_of == 0


def floats(
    low: float | None = None, high: float | None = None, *, nonfinite: bool = True, offset: bool = True
) -> Floats:
    """Declare real values, in [low, high] if bounds are given.

    Without bounds, some draws contain NaN and infinities. Some draws have small differences of large values, for which
    a variance computed from two sums loses its digits. `nonfinite=False` and `offset=False` exclude these.
    """
    if low is not None and high is not None and not low <= high:
        raise PairError(f"floats({low}, {high}): the lower bound is above the upper one; swap them")
    return Floats(low=low, high=high, nonfinite=nonfinite and low is None and high is None, offset=offset)


def integers(
    low: Bound = 0, high: Bound | Sequence[Bound] = 2, *, outside: bool = False, also: Sequence[int] = ()
) -> Integers:
    """Declare integers in [low, high). Bounds may be sizes ("V", "2*V-1"). A sequence `high` has one bound per column.

    `also` are single values that occur in addition, such as -100 for labels that a loss ignores.
    """
    upper = high if isinstance(high, (int, str)) else tuple(high)
    for bound in (low, *(upper if isinstance(upper, tuple) else (upper,))):
        if isinstance(bound, str):
            expressions.names(bound)
    return Integers(low=low, high=upper, outside=outside, also=tuple(also))


def sampled(make: Callable[[torch.Generator, tuple[int, ...], torch.dtype], torch.Tensor]) -> Sampled:
    """Declare values from a function of (generator, shape, dtype) that returns a CPU tensor."""
    return Sampled(make=make)


KNOWN_DTYPES = (
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "complex128",
    "complex64",
    "bool",
    *(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")),
)


def tensor(
    *dims: Dim,
    dtype: str | None = None,
    values: Values | None = None,
    period: float | None = None,
    layouts: Sequence[str] | None = None,
    differentiable: bool = True,
    align: int = 0,
    least: int = 0,
    by_rank: int | None = None,
) -> TensorSpec:
    """Declare a tensor input of shape `dims`. Each is an int, the name of a size that inputs share, or an expression of
    such sizes, such as "2*half".

    `dtype=None` means the precision under test. `period` compares the tensor on a circle, if it is also an output.
    `layouts` restricts the memory layouts that are drawn. `differentiable=False` excludes it from the gradient check.
    The offset of the data is drawn too: a multiple of `align` bytes (a power of two), or else of one element. With
    `least=1` none of its sizes is drawn as 0. In a pair with `ranks=`, each process gets an equal part along dimension
    `by_rank`, as in `tensor("ranks * batch", "width", by_rank=0)`. Other inputs are the same in all processes.
    """
    _check_dimensions(dims, by_rank)
    if dtype is not None:
        _check_dtype(dtype, values)
    if least < 0:
        raise PairError(f"tensor: least={least}; give 0 or more")
    if align < 0 or align & (align - 1):
        raise PairError(f"tensor: align={align} is no power of two; give the bytes that the kernel requires, e.g. 16")
    unknown = set(layouts or ()) - set(LAYOUTS)
    if unknown:
        raise PairError(f"tensor: unknown layout {sorted(unknown)[0]!r}; choose from {', '.join(LAYOUTS)}")
    if values is None:
        values = Floats() if dtype is None or dtype.startswith(("float", "bfloat")) else ANY_WHOLE
    return TensorSpec(
        dims=dims,
        dtype=dtype,
        values=values,
        period=period,
        layouts=tuple(layouts) if layouts else None,
        differentiable=differentiable,
        align=align,
        least=least,
        by_rank=by_rank,
    )


def _check_dimensions(dims: Sequence[Dim], by_rank: int | None) -> None:
    for dim in dims:
        if isinstance(dim, str):
            expressions.names(dim)
        elif dim < 0:
            raise PairError(f"tensor: a dimension of {dim}; give 0 or more")
    place = range(len(dims))
    if by_rank is not None and not (type(by_rank) is int and by_rank in place and _is_multiple_of_ranks(dims[by_rank])):
        raise PairError(
            f"tensor: by_rank={by_rank!r} must be the place of a dimension that is a multiple of the number of ranks, "
            f'as tensor("ranks * batch", by_rank=0)'
        )


def _check_dtype(dtype: str, values: Values | None) -> None:
    if dtype not in KNOWN_DTYPES:
        raise PairError(f"tensor: dtype={dtype!r} is not one of {', '.join(KNOWN_DTYPES)}")
    if dtype.startswith("complex") and not isinstance(values, Sampled):
        raise PairError(
            f"tensor: dtype={dtype!r}, and only real values are drawn: declare the real and the imaginary parts as two "
            f"inputs, and let both sides join them with torch.complex; or give values=sampled(…)"
        )
    if isinstance(values, Floats) and not dtype.startswith(("float", "bfloat")):
        raise PairError(f"tensor: dtype={dtype!r} holds whole numbers; give values=integers(low, high)")


def _is_multiple_of_ranks(dim: Dim) -> bool:
    """Return whether the dimension is divisible by the number of ranks, whatever the other sizes are. This is tested
    with some sizes that are not divisible."""
    if not isinstance(dim, str) or RANKS not in expressions.names(dim):
        return False
    tried = [{**dict.fromkeys(expressions.names(dim), size), RANKS: n} for size in (7, 11) for n in (2, 3, 5)]
    return all(expressions.value(dim, sizes) % sizes[RANKS] == 0 for sizes in tried)


def scalar(values: Floats | Integers | Sequence[bool | int | float]) -> ScalarSpec:
    """Declare a Python number or bool in a range, or one of a list such as [True, False]. A workload sets it by the
    input's name."""
    if isinstance(values, (Floats, Integers)):
        return ScalarSpec(values=values)
    given = tuple(values) if isinstance(values, (list, tuple)) else ()
    if not given or not all(isinstance(value, (bool, int, float)) for value in given):
        raise PairError(
            f"scalar({values!r}): give a range or a list, as scalar(floats(0, 1)), scalar(integers(1, 9)) or "
            f"scalar([True, False]); what never varies is constant({values!r})"
        )
    return ScalarSpec(values=given)


def listof(count: Dim, item: Spec) -> ListSpec:
    """Declare a list of `count` inputs of one spec, e.g. an optimizer's parameters."""
    if isinstance(count, bool) or not isinstance(count, (int, str)):
        raise PairError(
            f"listof: a {type(count).__name__} is no number of items; give that number and the spec of one item, as "
            f'listof(2, tensor("n")) or listof("count", tensor("n")); declare inputs of different specs one by one'
        )
    return ListSpec(count=count, item=item)


def module(build: Callable[..., torch.nn.Module]) -> ModuleSpec:
    """Declare a module input. `build` is called with the sizes that its parameters name. The gradients of the module's
    parameters are compared too. Weights and running statistics that `build` leaves all equal, such as zero biases, are
    changed a little in each draw; other buffers are as `build` makes them."""
    return ModuleSpec(build=build)


def recorded(path: str) -> RecordedSpec:
    """Declare an input that was recorded in a real run with `torch.save`. The path is relative to the test module."""
    return RecordedSpec(path=path)


def constant(value: Any) -> ConstantSpec:
    """Declare a Python value that is the same in every draw."""
    return ConstantSpec(value=value)


def generator() -> GeneratorSpec:
    """Declare a `torch.Generator` of the device, which is in the same state at the start of each call of each side.

    Draw from it in a fixed dtype, as in `torch.rand(x.shape, generator=generator, device=x.device)`, because the
    reference in float64 must get the same numbers.
    """
    return GeneratorSpec()


def holds(spec: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether a spec is of one of these classes, or contains one that is."""
    match spec:
        case ListSpec():
            return holds(spec.item, kinds)
        case tuple() | list():
            return any(holds(s, kinds) for s in spec)
        case Mapping():
            return any(holds(s, kinds) for s in spec.values())
        case _:
            return isinstance(spec, kinds)


def size(low: int = 0, high: int = 33, *, multiple_of: int = 1) -> Size:
    """Declare the range of a symbolic size in drawn cases, both ends included. Without `high`, no size above 33 is
    drawn."""
    if low > high or low < 0 or multiple_of < 1:
        raise PairError(f"size({low}, {high}, multiple_of={multiple_of}): not a range; use 0 <= low <= high")
    if high // multiple_of * multiple_of < low:
        raise PairError(
            f"size({low}, {high}, multiple_of={multiple_of}): no multiple of {multiple_of} lies in the range"
        )
    return Size(low=low, high=high, multiple_of=multiple_of)


def symbols(spec: Any) -> set[str]:
    """Return the names of the sizes that a spec depends on."""
    match spec:
        case TensorSpec():
            given: list[Dim] = list(spec.dims)
            if isinstance(spec.values, Integers):
                bounds = spec.values.high if isinstance(spec.values.high, tuple) else (spec.values.high,)
                given += (*bounds, spec.values.low)
            return set().union(*(expressions.names(g) for g in given if isinstance(g, str)))
        case ModuleSpec():
            parameters = inspect.signature(spec.build).parameters.values()
            return {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        case ListSpec():
            return symbols(spec.item) | (expressions.names(spec.count) if isinstance(spec.count, str) else set())
        case tuple() | list():
            return set().union(*(symbols(s) for s in spec))
        case Mapping():
            return set().union(*(symbols(s) for s in spec.values()))
        case _:
            return set()


def tensors_of(spec: Any) -> Iterator[TensorSpec]:
    """Yield every tensor in a spec."""
    match spec:
        case TensorSpec():
            yield spec
        case ListSpec():
            yield from tensors_of(spec.item)
        case tuple() | list():
            yield from itertools.chain.from_iterable(map(tensors_of, spec))
        case Mapping():
            yield from itertools.chain.from_iterable(map(tensors_of, spec.values()))


def tensor_spec(spec: Any) -> TensorSpec | None:
    """Return the first tensor spec in `spec`; None if there is none. All tensors in it share layout and regime."""
    if isinstance(spec, TensorSpec):
        return spec
    if isinstance(spec, ListSpec):
        return tensor_spec(spec.item)
    if isinstance(spec, (tuple, list)):
        return next(filter(None, map(tensor_spec, spec)), None)
    if isinstance(spec, dict):
        return next(filter(None, map(tensor_spec, spec.values())), None)
    return None


def least_of(spec: Any, name: str) -> int:
    """Return the smallest value of this size that a spec allows; 0 if it does not restrict it."""
    match spec:
        case TensorSpec():
            return spec.least if any(isinstance(d, str) and name in expressions.names(d) for d in spec.dims) else 0
        case ListSpec():
            return least_of(spec.item, name)
        case tuple() | list():
            return max((least_of(s, name) for s in spec), default=0)
        case Mapping():
            return max((least_of(s, name) for s in spec.values()), default=0)
        case _:
            return 0


def resolve(dim: Dim | Bound, sizes: Mapping[str, Any]) -> int:
    """Return the value of a dimension or bound at these sizes."""
    return expressions.value(dim, sizes) if isinstance(dim, str) else dim


def bounds(values: Integers, sizes: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """Return (lower bound of the integers at these sizes, upper bound of each column)."""
    upper = values.high if isinstance(values.high, tuple) else (values.high,)
    return resolve(values.low, sizes), tuple(resolve(b, sizes) for b in upper)


def elements(spec: TensorSpec, sizes: Mapping[str, Any]) -> int:
    """Return the number of elements at these sizes."""
    return math.prod(resolve(d, sizes) for d in spec.dims)


def accepted(call: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, by name, for which the callable has a parameter."""
    parameters = inspect.signature(call).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}
