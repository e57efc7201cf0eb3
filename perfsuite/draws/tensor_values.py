"""Draw the values of a tensor from a seed, in several regimes."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from perfsuite.declare.specs import Floats, Integers, Sampled, TensorSpec, bounds
from perfsuite.errors import PairError
from perfsuite.records import Case

LARGE = "large"
"""Regime of values whose squares overflow in float16, as those of large activations do."""
LARGE_ACTIVATION = 2.0**9
"""Typical magnitude of a value in the regime LARGE."""
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
    LARGE,
    "denormal",
    "nonfinite",
)
BOUNDED_REGIMES = ("normal", "sorted", "repeated", "zeros", "halves", "offset", "edges", "tiny")
INTEGER_REGIMES = ("normal", "sorted", "repeated", "edges")
HALVES = "halves"
OTHERS = "others"
"""Regime in which all integers are among `also`, such as ignored labels."""
BLANK = "blank"
"""Regime in which floats are zero, even outside their bounds, because only the sizes matter. The memory is not even
written."""
BLANK_DRAWN = 1 << 16
"""Most integers that are drawn in the regime BLANK. Larger tensors repeat them."""
MILD = ("normal", "sorted", HALVES, "edges")
"""Regimes of values with which a wrong layout is detected."""

# Above this number of elements, values are drawn on the target device: drawing 50 M on a CPU takes most of a second.
DRAW_ON_DEVICE = 1 << 16


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PairError(f"dtype {name!r} is not a torch dtype")
    return dtype


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
                every = BOUNDED_REGIMES if values.bounded else (*BOUNDED_REGIMES, "mixed", "huge", LARGE)
            left_out = {"nonfinite": not values.nonfinite, "offset": not values.offset}
            return tuple(regime for regime in every if not left_out.get(regime))


def generator_for(seed: int, name: str, device: str) -> torch.Generator:
    """Return a generator that depends only on the seed and the input's name."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed_for(seed, name))
    return generator


def seed_for(seed: int, name: str) -> int:
    """Return a seed for the input of this name. It has 32 bits, because a CPU generator uses no more."""
    return zlib.crc32(f"{seed} {name}".encode())


@dataclass(frozen=True, slots=True)
class _Random:
    """Random numbers of one shape, drawn on one device."""

    generator: torch.Generator
    device: str
    shape: tuple[int, ...]

    def uniform(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return numbers in [0, 1)."""
        return torch.rand(self.shape, generator=self.generator, device=self.device, dtype=dtype)

    def normal(self, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers of the standard normal distribution."""
        return torch.randn(self.shape, generator=self.generator, device=self.device, dtype=dtype)

    def below(self, end: int) -> torch.Tensor:
        """Return integers in [0, end)."""
        return torch.randint(0, end, self.shape, generator=self.generator, device=self.device)


def draw_values(
    spec: TensorSpec, name: str, case: Case, device: str, regime: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return values of the spec in this regime and shape, drawn from the case's seed and the input's name."""
    dtype = dtype_of(spec.dtype or case.dtype)
    if regime == BLANK and isinstance(spec.values, Floats):
        return torch.zeros(shape, dtype=dtype, device=device)
    large = math.prod(shape) > DRAW_ON_DEVICE
    source = device if large and not isinstance(spec.values, Sampled) else "cpu"
    random = _Random(generator_for(case.seed, name, source), source, shape)
    match spec.values:
        case Sampled() as values:
            return to_device(_sampled(random, values, name, dtype).to(dtype), device)
        case Integers() as values:
            return to_device(_whole(random, values, case.sizes, regime, dtype), device)
        case Floats() as values:
            made = _floats(random, values, regime, dtype).to(dtype)
            return to_device(made if regime == "nonfinite" else within(made, values), device)


def to_device(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return the tensor on the device. The host does not wait for the copy: CUDA reads pageable memory before the call
    returns, and a wait for all earlier work at each of thousands of small tensors takes a part of a proof's time."""
    return tensor.to(device, non_blocking=True)


def _sampled(random: _Random, values: Sampled, name: str, dtype: torch.dtype) -> torch.Tensor:
    made = values.make(random.generator, random.shape, dtype)
    if not isinstance(made, torch.Tensor) or tuple(made.shape) != random.shape:
        found = f"shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else f"a {type(made).__name__}"
        raise PairError(
            f"input {name.partition('@')[0]!r}: the function in values=sampled(…) gives {found} where a tensor of "
            f"shape {random.shape} is asked for; make it of the shape that it is given"
        )
    if made.layout is not torch.strided:
        raise PairError(
            f"input {name.partition('@')[0]!r}: the function in values=sampled(…) gives a tensor of the layout "
            f"{made.layout}, and only dense inputs are drawn; draw it dense, and let both sides convert it"
        )
    return made


def within(tensor: torch.Tensor, values: Floats) -> torch.Tensor:
    """Return the values clamped to finite ones within the bounds, which rounding to the dtype may have exceeded."""
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


def _whole(
    random: _Random, values: Integers, sizes: Mapping[str, Any], regime: str, dtype: torch.dtype
) -> torch.Tensor:
    low, high = bounds(values, sizes)
    numel = math.prod(random.shape)
    if regime == BLANK and numel > BLANK_DRAWN and len(high) == 1:
        few = _whole(replace(random, shape=(BLANK_DRAWN,)), values, sizes, regime, dtype)
        return few.repeat(-(-numel // BLANK_DRAWN))[:numel].view(random.shape)
    whole = _integers(random, low, high, regime, dtype)
    return _with_others(random, whole, values.also, every=regime == OTHERS).to(dtype)


def _integers(random: _Random, low: int, high: tuple[int, ...], regime: str, dtype: torch.dtype) -> torch.Tensor:
    upper = torch.tensor(high if len(high) > 1 else high[0], device=random.device)
    span = (upper - low).clamp_min(1)  # an empty range yields its lower bound
    unit = random.uniform(torch.float64)
    drawn = low + (unit * span).long()
    if regime == "edges":
        drawn = torch.where(unit < 0.5, torch.full_like(drawn, low), (low + span - 1).expand_as(drawn))
    elif regime == "repeated" and drawn.numel():
        drawn = drawn.flatten()[:1].expand(drawn.numel()).reshape(random.shape).clamp(max=low + span - 1)
    elif regime == "sorted" and drawn.ndim:
        drawn = drawn.sort(dim=0).values
    elif regime == "outside":
        far = 2**40 if dtype.is_floating_point else min(2**40, torch.iinfo(dtype).max)
        beyond = torch.tensor([-1, -far, far], device=random.device)
        pick = random.below(4)
        off = torch.where(pick == 3, upper.expand(drawn.shape), beyond[pick.clamp(max=2)])
        drawn = torch.where(unit < 0.4, off, drawn)
    return drawn


def _with_others(random: _Random, whole: torch.Tensor, also: tuple[int, ...], *, every: bool) -> torch.Tensor:
    """Replace one value in eight, or every one, by one of `also`."""
    if not also:
        return whole
    random = replace(random, shape=tuple(whole.shape))
    others = torch.tensor(also, device=random.device)[random.below(len(also))]
    chosen = random.below(8) == 0
    return others if every else torch.where(chosen, others, whole)


def _floats(random: _Random, values: Floats, regime: str, dtype: torch.dtype) -> torch.Tensor:
    if regime == "zeros":
        return _zeros(random, values)
    info = torch.finfo(dtype)
    work = torch.float64 if math.prod(random.shape) <= DRAW_ON_DEVICE else torch.float32
    interval = _interval(values)
    if interval is None:
        real = random.normal(work)
    else:
        low, high = interval
        real = random.uniform(work) * (high - low) + low
    match regime:
        case "halves" | "sorted" | "repeated":
            real = _arranged(real, regime)
        case "offset":
            real = _offset(real, interval)
        case "tiny" | "huge" | "large" | "denormal" | "mixed":
            real = _scaled(random, real, values, regime, info)
        case "edges" if interval is not None:  # only one tensor of a nested input may have bounds
            real = _at_ends(random, real, *interval)
        case "nonfinite":
            real = _with_nonfinite(random, real)
    if interval is None:
        return real
    if regime == "tiny" and not (values.low or 0.0) <= 0.0 <= (values.high or 0.0):
        real = torch.full_like(real, interval[0])
    return real.clamp(values.low, values.high)


def _zeros(random: _Random, values: Floats) -> torch.Tensor:
    """Return zeros of either sign or, with bounds, the value nearest to zero."""
    zeros = torch.zeros(random.shape, device=random.device)
    if values.low is not None or values.high is not None:
        return zeros.clamp(values.low, values.high)
    return zeros.copysign(random.uniform() - 0.5)


def _interval(values: Floats) -> tuple[float, float] | None:
    """Return the ends of the interval from which bounded values are drawn; None for values without bounds."""
    if values.low is None and values.high is None:
        return None
    low = values.low if values.low is not None else (values.high or 0.0) - 4.0
    return low, values.high if values.high is not None else low + 4.0


def _arranged(real: torch.Tensor, regime: str) -> torch.Tensor:
    if regime == "halves":  # few different values: ties, exact zeros, and values halfway between integers
        return (2 * real).round() / 2
    if regime == "sorted":
        return real.sort(dim=-1).values if real.ndim else real
    if not real.numel():
        return real
    row = max(1, real.shape[-1] if real.ndim else 1)
    return real.flatten()[:row].repeat(-(-real.numel() // row))[: real.numel()].reshape(real.shape)


def _offset(real: torch.Tensor, interval: tuple[float, float] | None) -> torch.Tensor:
    """Return large values with small differences, for which E[x²] − E[x]² loses its digits."""
    middle, offset, deviation = 0.0, 16.0, 2.0**-2
    if interval is not None:
        low, high = interval
        middle, offset, deviation = (low + high) / 2, (high - low) * 3 / 8, 2.0**-6
    return middle + offset + (real - middle) * deviation


def _scaled(random: _Random, real: torch.Tensor, values: Floats, regime: str, info: torch.finfo) -> torch.Tensor:
    """Return the values at another scale.

    All except denormal values, and large ones in float16, are far enough from the ends of the dtype's range that
    products of a few of them neither overflow nor underflow, in any order.
    """
    # With one bound, the values are as far beyond it as other values are from zero.
    origin = next((bound for bound in (values.low, values.high) if bound is not None), 0.0)
    match regime:
        case "tiny":
            scaled: torch.Tensor = real * info.tiny**0.25
        case "denormal":
            scaled = real * info.tiny / 8
        case "huge":
            scaled = origin + (real - origin) * info.max**0.25
        case "large":
            scaled = origin + (real - origin) * LARGE_ACTIVATION
        case _:  # "mixed"
            decades = min(6.0, math.log10(info.max) / 2)
            scale = 10 ** ((random.uniform(real.dtype) * 2 - 1) * decades)
            scaled = origin + (real - origin) * scale
    return scaled


def _at_ends(random: _Random, real: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return a random mix of the ends of the interval and the value nearest to zero between the drawn extremes."""
    pick = random.below(3)
    middle = min(max(0.0, float(real.min())), float(real.max())) if real.numel() else 0.0
    return torch.where(pick == 0, real.new_tensor(low), torch.where(pick == 1, real.new_tensor(high), middle))


NONFINITE_SHARE = 0.15
"""Share of the elements of a row that are not finite, apart from one element at a random place."""
_NAN, _INFINITE, _MINUS_INFINITE, _MIXED, _ALL_MINUS_INFINITE = range(5)
"""Kinds of rows with values that are not finite. The last is a row of minus infinity alone, as of masked scores."""


def _with_nonfinite(random: _Random, real: torch.Tensor) -> torch.Tensor:
    """Replace values by NaN and infinities. Rows of each kind follow each other, along the last or the first dimension.

    If each row held NaN, a reduction would give NaN for every row, and what it does with infinities would not show.
    """
    if not real.numel():
        return real
    first = real.ndim > 1 and float(replace(random, shape=()).uniform()) < 0.5
    rows = real.movedim(0, -1) if first else real
    flat = rows.reshape(-1, rows.shape[-1] if rows.ndim else 1)
    count, length = flat.shape
    random = replace(random, shape=(count, length))
    kind = (torch.arange(count, device=random.device) + replace(random, shape=()).below(5))[:, None] % 5
    special = torch.tensor([math.nan, math.inf, -math.inf, math.nan], dtype=real.dtype, device=random.device)
    special[3] = -special[3]  # NaN with other bits, as ∞ − ∞ gives on many processors
    of_row = torch.tensor([math.nan, math.inf, -math.inf, math.nan, -math.inf], dtype=real.dtype, device=random.device)
    which = random.below(4)
    values = torch.where((kind == _MIXED) | ((kind == _NAN) & (which % 3 == 0)), special[which], of_row[kind])
    one = torch.arange(length, device=random.device) == replace(random, shape=(count, 1)).below(length)
    hit = one | (random.uniform(real.dtype) < NONFINITE_SHARE) | (kind == _ALL_MINUS_INFINITE)
    made = torch.where(hit, values, flat).reshape(rows.shape)
    return (made.movedim(-1, 0) if first else made).contiguous()
