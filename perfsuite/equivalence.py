"""The rule by which two sides are the same function: the error against a float64 truth.

Truth t is the reference in float64 on the inputs rounded to the working dtype and upcast. With e the reference's
own error in the working dtype and eps that dtype's, every element o of an optimized output must hold

    |o − t|  ≤  K · RMS(e)  +  C · eps · (|t| + RMS(t))

and the output as a whole, over its n elements,

    RMS(o − t)  ≤  (K_NORM + (K − K_NORM) / √n) · RMS(e)  +  C · eps · RMS(t).

The constants are global; no pair has tolerances of its own.

K = 8       For Gaussian rounding errors of the reference's own size the largest of 10⁹ elements lies near 6 RMS; a
            different order of summation costs up to a third more.
K_NORM = 3  Over many elements the tail averages out: a fast kernel may be three times as inaccurate as the
            reference, which allows another order of summation, and no lower precision (TF32 is over 1000 times).
C = 4       An output may differ in its last places also where the reference happens to be exact.
CAP         Where K · RMS(e) exceeds √eps · RMS(t) the draw is ill-conditioned: it is still checked, but does not
            count as proof. Where the reference alone is not finite it is discarded. Both are counted, and too few
            remaining draws are a failure, never a pass.
REPLICAS    The reference's error is measured on the draw and on neighbours a few ulp away, so that a small output
            on which it is exact by luck does not bound the optimized side by zero.

NaN and ±inf must stand in the same places; integers and bools must be equal; dtype, shape, device and the class of
strides must agree. Elements that the pair's `excuse` names, within rounding of a declared threshold, are left out
and counted; more than EXCUSED_SHARE of all is a failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perfsuite import execution
from perfsuite import inputs as make
from perfsuite.errors import PairError
from perfsuite.execution import Leaf, Leaves
from perfsuite.pair import Pair, Side, as_side
from perfsuite.records import Case, Evidence
from perfsuite.specs import TensorSpec

K = 8.0
K_NORM = 3.0
C = 4.0
REPLICAS = 3
EXCUSED_SHARE = 0.01
MIN_PROOFS = 5
MIN_PROOF_SHARE = 0.25
TRUTH_SLACK = 2.0**-40
"""A cheaper truth must agree with the reference in float64 to this, relative to RMS(t): 4096 times float64's eps."""


class NotEquivalent(Exception):  # noqa: N818 - named as the verdict is
    """The optimized side is not the same function: a readable message."""


class Discard(Exception):  # noqa: N818 - a draw set aside, not an error
    """The reference alone overflows on this draw: nothing can be learnt from it."""


@dataclass(slots=True)
class Tally:
    """What a run of draws has established so far."""

    draws: int = 0
    discarded: int = 0
    ill_conditioned: int = 0
    elements: int = 0
    excused: int = 0
    worst: float = 0.0

    def evidence(self, pair: Pair, dtype: str, device: str) -> Evidence:
        """The tally as a record; NotEquivalent where the draws prove nothing."""
        proofs = self.draws - self.discarded - self.ill_conditioned
        if self.draws >= MIN_PROOFS and proofs < max(1, MIN_PROOF_SHARE * self.draws):
            raise NotEquivalent(
                f"{pair.name}: {self.discarded} of {self.draws} draws were discarded, because the reference alone "
                f"overflows, and {self.ill_conditioned} are ill-conditioned in {dtype}: too little is proven; "
                f"bound the inputs with values=floats(low, high)"
            )
        if self.excused > EXCUSED_SHARE * self.elements:
            raise NotEquivalent(
                f"{pair.name}: {self.excused} of {self.elements} elements were excused as near a threshold, more "
                f"than {EXCUSED_SHARE:.0%}; narrow `excuse` to what is within rounding"
            )
        return Evidence(
            pair=pair.name,
            dtype=dtype,
            device=device,
            draws=self.draws,
            discarded=self.discarded + self.ill_conditioned,
            elements=self.elements,
            excused=self.excused,
            worst=self.worst,
        )


@dataclass(slots=True)
class Truth:
    """Truth and the reference's own behaviour on one draw: what any other side is held against."""

    leaves: Leaves
    reference: Leaves
    rms_error: dict[str, float]
    ill_conditioned: bool
    eps: float
    periods: dict[str, float]
    excused: Any = None
    plain: bool = True
    """Every input was contiguous: then the class of strides must be the reference's own."""
    declared_precision: bool = False


# --- one draw ------------------------------------------------------------------------------------------------


def establish(
    pair: Pair, case: Case, device: str, *, gradients: bool, home: Path | None = None, replicas: int = REPLICAS
) -> Truth:
    """Truth, the reference and its error on this draw. Discard where the reference alone is not finite."""
    working = pair.precision or case.dtype
    reference = as_side(pair.reference)
    truth_side = Side(call=pair.truth) if pair.truth is not None else reference
    eps = torch.finfo(make.dtype_of(working)).eps
    drawn = make.build(pair, case, device, home=home)
    rounded = _cast(drawn, working)
    truth = _run(truth_side, pair, make.upcast(rounded), case, device, gradients, make.upcast)
    own = _run(reference, pair, make.clone(rounded), case, device, gradients, lambda v: _cast(v, working))
    _check_reference(pair, own, truth)
    periods = {name: spec.period for name, spec in pair.inputs.items() if isinstance(spec, TensorSpec) and spec.period}
    squares = {name: _square_error(own[name], truth[name], _period(periods, name)) for name in truth}
    generator = make.generator_for(case.seed, "jitter", "cpu")
    for _ in range(replicas):
        beside = make.jitter(pair, rounded, generator, eps)
        t = _run(truth_side, pair, make.upcast(beside), case, device, gradients, make.upcast)
        r = _run(reference, pair, beside, case, device, gradients, lambda v: _cast(v, working))
        for name in truth:
            if name in r and name in t:
                squares[name] += _square_error(r[name], t[name], _period(periods, name))
    rms_error = {name: _rms_over_replicas(s) for name, s in squares.items()}
    ill = any(
        K * rms_error[name] > math.sqrt(eps) * _rms(truth[name]) and rms_error[name] > 0
        for name, leaf in truth.items()
        if _is_real(leaf)
    )
    excused = pair.excuse(*make.upcast(rounded).values()) if pair.excuse is not None else None
    plain = all(how.layout == "contiguous" for how in case.inputs.values())
    return Truth(
        leaves=truth,
        reference=own,
        rms_error=rms_error,
        ill_conditioned=ill,
        eps=eps,
        periods=periods,
        excused=excused,
        plain=plain,
        declared_precision=pair.precision is not None,
    )


def judge(
    pair: Pair,
    truth: Truth,
    produced: Leaves,
    *,
    name: str = "optimized",
    tally: Tally | None = None,
    strict_strides: bool = True,
) -> None:
    """NotEquivalent where `produced` is not within the budget of the truth; the figures go into `tally`."""
    expected, got = list(truth.reference), list(produced)
    if expected != got:
        raise NotEquivalent(_structure_message(pair, name, expected, got))
    for leaf_name in expected:
        _judge_leaf(pair, truth, leaf_name, produced[leaf_name], name, tally, strict_strides)


def produce(pair: Pair, side: Side, case: Case, device: str, *, gradients: bool, home: Path | None = None) -> Leaves:
    """What the side makes of the case's inputs in the case's dtype; a crash becomes NotEquivalent."""
    drawn = make.build(pair, case, device, home=home)
    if pair.precision is not None:
        drawn = _cast(_cast(drawn, pair.precision), case.dtype)
    return _run(side, pair, make.clone(drawn), case, device, gradients, lambda v: v)


def check_case(
    pair: Pair,
    case: Case,
    device: str,
    *,
    side: Side | None = None,
    side_name: str = "optimized",
    gradients: bool = False,
    tally: Tally | None = None,
    home: Path | None = None,
) -> None:
    """Prove one side on one draw, or raise NotEquivalent. The draw is counted in `tally`."""
    tally = tally if tally is not None else Tally()
    tally.draws += 1
    try:
        truth = establish(pair, case, device, gradients=gradients, home=home)
    except Discard:
        tally.discarded += 1
        return
    tally.ill_conditioned += truth.ill_conditioned
    produced = produce(pair, side or as_side(pair.optimized), case, device, gradients=gradients, home=home)
    judge(pair, truth, produced, name=side_name, tally=tally)


def check_truth(pair: Pair, case: Case, device: str, *, gradients: bool = False) -> None:
    """Prove the pair's cheaper truth against the reference in float64."""
    assert pair.truth is not None
    drawn = make.build(pair, replace(case, dtype="float64"), device)
    cheap = _run(Side(call=pair.truth), pair, make.upcast(drawn), case, device, gradients, make.upcast)
    plain = _run(as_side(pair.reference), pair, make.upcast(drawn), case, device, gradients, make.upcast)
    if list(cheap) != list(plain):
        raise NotEquivalent(_structure_message(pair, "truth", list(plain), list(cheap)))
    for name, leaf in plain.items():
        if not _is_real(leaf):
            continue
        r, t = _as_double(leaf), _as_double(cheap[name])
        finite = r.isfinite() & t.isfinite()
        error = float((r - t)[finite].abs().max()) if finite.any() else 0.0
        scale = max(_rms(leaf), _rms(cheap[name]))
        # Cancellation leaves a truth near zero; what was cancelled is of the order of the inputs, about one.
        if error > TRUTH_SLACK * max(scale, 1.0):
            raise NotEquivalent(
                f"{pair.name}: truth= differs from the reference in float64 by {error:.3g} in {name}; "
                f"it must compute the same function"
            )


def _run(
    side: Side,
    pair: Pair,
    values: dict[str, Any],
    case: Case,
    device: str,
    gradients: bool,
    prepare: Callable[[Any], Any],
) -> Leaves:
    execution.poison(pair, values)
    with execution.quiet(side):
        if pair.is_stateful:
            states = execution.run_steps(
                execution.callable_of(side), pair, case, values, pair.steps, lambda v, _: prepare(v), device
            )
            return {name: leaf for state in states.values() for name, leaf in state.items()}
        return execution.run(execution.callable_of(side), pair, values, gradients=gradients, seed=case.seed)


def _cast(value: Any, dtype: str) -> Any:
    """Floating tensors rounded to the working dtype, in fresh memory."""
    target = make.dtype_of(dtype)
    return make.map_tensors(value, lambda t: t.to(target) if t.is_floating_point() and t.dtype != target else t)


def _check_reference(pair: Pair, own: Leaves, truth: Leaves) -> None:
    if list(own) != list(truth):
        raise PairError(f"{pair.name}: the reference returns other outputs in float64; it must not depend on the dtype")
    for name, leaf in own.items():
        t = truth[name]
        if _is_real(leaf) != _is_real(t):
            raise PairError(f"{pair.name}: {name} of the reference is of another kind in float64; take out its casts")
        if not _is_real(leaf):
            continue
        r, t64 = _as_double(leaf), _as_double(t)
        if r.shape != t64.shape:
            raise PairError(f"{pair.name}: {name} of the reference has another shape in float64")
        if not _same_nonfinite(r, t64):
            raise Discard(name)


# --- leaves --------------------------------------------------------------------------------------------------


def _judge_leaf(
    pair: Pair, truth: Truth, name: str, got: Leaf, side: str, tally: Tally | None, strict_strides: bool
) -> None:
    reference, t = truth.reference[name], truth.leaves[name]
    where = f"{pair.name}: {name} of the {side} side"
    if reference is None and isinstance(got, torch.Tensor):
        # An unused input: no gradient and a gradient of zeros mean the same.
        if name.startswith("gradient of ") and not got.any():
            return
        raise NotEquivalent(f"{where} is a tensor where the reference has None")
    if got is None and isinstance(reference, torch.Tensor):
        if name.startswith("gradient of ") and not reference.any():
            return
        raise NotEquivalent(f"{where} is None where the reference has a value")
    _judge_form(where, reference, got, truth, strict_strides)
    if not _is_real(reference):
        if isinstance(got, torch.Tensor) and isinstance(reference, torch.Tensor):
            if not torch.equal(got, reference):
                at = (got != reference).nonzero()[0].tolist()
                raise NotEquivalent(
                    f"{where} differs at {at}: {got[tuple(at)].item()} instead of {reference[tuple(at)].item()} "
                    f"(whole numbers and bools must be equal)"
                )
        elif got != reference:
            raise NotEquivalent(f"{where} is {got!r} instead of {reference!r}")
        return
    o, t64, r = _as_double(got), _as_double(t), _as_double(reference)
    if not _same_nonfinite(o, t64):
        wrong = (o.isnan() != t64.isnan()) | (o.isinf() != t64.isinf()) | (o.isinf() & t64.isinf() & (o != t64))
        at = wrong.nonzero()[0].tolist()
        raise NotEquivalent(
            f"{where} is {_item(o, at):.9g} at {at} where the truth is {_item(t64, at):.9g}: "
            f"NaN and infinities must stand in the same places ({int(wrong.sum())} of {o.numel()} elements)"
        )
    period = _period(truth.periods, name)
    error = _difference(o, t64, period).abs()
    rms_t, rms_e = _rms(t), truth.rms_error[name]
    floor = C * truth.eps
    budget = K * rms_e + floor * (torch.where(t64.isfinite(), t64, 0.0).abs() + rms_t)
    considered = t64.isfinite()
    if truth.excused is not None:
        excuse = truth.excused.get(name) if isinstance(truth.excused, Mapping) else truth.excused
        if excuse is not None:
            near = excuse.to(considered.device).expand(considered.shape) & considered
            considered = considered & ~(near & (error > budget))
            if tally is not None:
                tally.excused += int((near & (error > budget)).sum())
    if tally is not None:
        tally.elements += o.numel()
    if not considered.any():
        return
    share = torch.where(considered, error / budget.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    worst = float(share.max())
    count = int(considered.sum())
    norm_budget = (K_NORM + (K - K_NORM) / math.sqrt(count)) * rms_e + floor * rms_t
    norm = math.sqrt(float((error[considered] ** 2).mean()))
    if tally is not None:
        tally.worst = max(tally.worst, worst, norm / norm_budget if norm_budget else 0.0)
    if worst > 1.0:
        at = _unravel(int(share.argmax()), share.shape)
        beyond = int((share > 1).sum())
        raise NotEquivalent(
            f"{where} is wrong at {at}: {_item(o, at):.9g}, truth {_item(t64, at):.9g}, reference "
            f"{_item(r, at):.9g}; error {_item(error, at):.3g} is {worst:.3g} times its budget of "
            f"{_item(budget, at):.3g} ({beyond} of {o.numel()} elements beyond budget)"
        )
    if norm > norm_budget:
        raise NotEquivalent(
            f"{where} is inaccurate as a whole: its RMS error {norm:.3g} is {norm / norm_budget:.3g} times its "
            f"budget of {norm_budget:.3g} (the reference's own is {rms_e:.3g})"
        )


def _judge_form(where: str, reference: Leaf, got: Leaf, truth: Truth, strict_strides: bool) -> None:
    if isinstance(reference, torch.Tensor) != isinstance(got, torch.Tensor):
        raise NotEquivalent(f"{where} is {_kind(got)} where the reference has {_kind(reference)}")
    if not isinstance(reference, torch.Tensor) or not isinstance(got, torch.Tensor):
        return
    forms: tuple[tuple[str, object, object], ...] = (
        ("shape", tuple(reference.shape), tuple(got.shape)),
        ("dtype", reference.dtype, got.dtype),
        ("device", reference.device, got.device),
    )
    for what, expected, actual in forms:
        # A side that declares a lower working precision still returns the dtype of its inputs.
        if expected != actual and not (what == "dtype" and truth.declared_precision):
            raise NotEquivalent(f"{where} has {what} {actual} where the reference has {expected}")
    if not strict_strides or got.numel() <= 1:
        return
    lies, should = strides_class(got), strides_class(reference)
    weaker = STRIDES.index(lies) > STRIDES.index(should)
    if weaker or (truth.plain and lies != should):
        raise NotEquivalent(f"{where} is {lies} in memory where the reference is {should} (strides {got.stride()})")


STRIDES = ("contiguous", "channels last", "permuted", "strided", "overlapping")
"""From strong to weak: code downstream may rely on what the reference gives, never on more."""


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every element, NaN equal to NaN."""
    same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() or a.is_complex() else a == b
    return bool(same.all())


def strides_class(tensor: torch.Tensor) -> str:
    """How the tensor lies in memory: one of STRIDES."""
    if tensor.is_contiguous():
        return "contiguous"
    if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
        return "overlapping"
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels last"
    order = sorted(range(tensor.ndim), key=lambda d: tensor.stride(d), reverse=True)
    return "permuted" if tensor.permute(order).is_contiguous() else "strided"


def _kind(leaf: Leaf) -> str:
    return f"a tensor of {leaf.dtype}" if isinstance(leaf, torch.Tensor) else f"{leaf!r}"


def _is_real(leaf: Leaf) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.is_floating_point() or leaf.is_complex()
    return isinstance(leaf, float)


def _as_double(leaf: Leaf) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        if leaf.is_complex():
            leaf = torch.view_as_real(leaf.resolve_conj())
        return leaf.double()
    return torch.tensor(float(leaf or 0.0), dtype=torch.float64)


def _rms(leaf: Leaf) -> float:
    values = _as_double(leaf)
    finite = values[values.isfinite()]
    return math.sqrt(float((finite**2).mean())) if finite.numel() else 0.0


def _difference(a: torch.Tensor, b: torch.Tensor, period: float | None) -> torch.Tensor:
    """a − b, zero where either is not finite; on a circle where there is a period."""
    delta = torch.where(a.isfinite() & b.isfinite(), a - b, 0.0)
    return torch.remainder(delta + period / 2, period) - period / 2 if period else delta


def _square_error(own: Leaf, truth: Leaf, period: float | None) -> torch.Tensor:
    """(sum of squared errors, count) as one tensor, so that replicas add up."""
    if not _is_real(own) or not _is_real(truth):
        return torch.zeros(2, dtype=torch.float64)
    r, t = _as_double(own), _as_double(truth)
    if r.shape != t.shape:
        return torch.zeros(2, dtype=torch.float64)
    finite = r.isfinite() & t.isfinite()
    total = (_difference(r, t, period)[finite] ** 2).sum()
    return torch.stack([total.cpu(), finite.sum().double().cpu()])


def _rms_over_replicas(sums: torch.Tensor) -> float:
    return math.sqrt(float(sums[0] / sums[1])) if sums[1] else 0.0


def _same_nonfinite(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.isposinf(), b.isposinf())
        and torch.equal(a.isneginf(), b.isneginf())
    )


def _period(periods: Mapping[str, float], name: str) -> float | None:
    return next((p for key, p in periods.items() if name.startswith((f"{key} (in place)", f"{key}["))), None)


def _item(tensor: torch.Tensor, at: list[int]) -> float:
    return float(tensor[tuple(at)]) if at else float(tensor)


def _unravel(index: int, shape: tuple[int, ...] | torch.Size) -> list[int]:
    at: list[int] = []
    for size in reversed(shape):
        at.insert(0, index % size)
        index //= size
    return at


def _structure_message(pair: Pair, side: str, expected: list[str], got: list[str]) -> str:
    def outputs(names: list[str]) -> int:
        return sum(not n.startswith("gradient of ") and not n.endswith("(in place)") for n in names)

    if outputs(expected) != outputs(got):
        return (
            f"{pair.name}: the {side} side returns {outputs(got)} output{'s' * (outputs(got) != 1)} where the "
            f"reference returns {outputs(expected)}"
        )
    missing = [n for n in expected if n not in got] or [n for n in got if n not in expected]
    return f"{pair.name}: the {side} side's outputs are arranged otherwise than the reference's: {missing[0]}"
