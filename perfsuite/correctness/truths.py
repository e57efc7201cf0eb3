"""Compute the truth of a draw: the reference in float64, its outputs in the working dtype, and their errors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from perfsuite.correctness import differences, execution, incoming_gradients, side_calls
from perfsuite.correctness.differences import Doubles
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.forms import is_real, unusual_kind
from perfsuite.correctness.harness_faults import raises_harness_faults
from perfsuite.correctness.redrawn_roundings import redrawn_roundings
from perfsuite.correctness.reference_errors import ReferenceErrors, any_ill_conditioned, running_maximum
from perfsuite.correctness.rule import (
    CAREFUL,
    FEW,
    FULL,
    MAX_REPLICAS,
    NEARNESS,
    NONE,
    REPLICAS,
    REPLICAS_UP_TO,
    SAMPLES,
    TRUTH_EPS,
    eps_of,
    sure,
)
from perfsuite.correctness.side_calls import CallSide, InputsFactory, StepInputs
from perfsuite.declare import declared_functions
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.declare.specs import TensorSpec
from perfsuite.declare.workload import TF32
from perfsuite.draws import inputs as make
from perfsuite.errors import PairError
from perfsuite.records import Case

DERIVATIVES = ("gradient of ", "second derivative of ")
"""Prefixes of the names of leaves that are not outputs of a side, but derivatives of its inputs."""


class Discard(Exception):  # noqa: N818 - a draw set aside, not an error
    """The draw proves nothing, because only the reference overflows on it."""


@dataclass(slots=True)
class Truth:
    """The truth and the reference's own outputs on one draw, with which every other side is compared."""

    leaves: Leaves
    reference: Leaves
    errors: dict[str, torch.Tensor]
    """The reference's own error in each element: an RMS over the replicas."""
    moved: dict[str, torch.Tensor]
    """Change of the truth of each element by one rounding of the inputs: an RMS over the replicas."""
    ill_conditioned: bool
    rounding: frozenset[str]
    """Outputs that are ill-conditioned by themselves, so that they consist only of rounding errors."""
    surely_rounding: frozenset[str]
    """Outputs of `rounding` that remain ill-conditioned whatever further replicas show."""
    surely_ill_conditioned: bool
    eps: float
    periods: dict[str, float]
    excused: Any = None
    plain: bool = True
    """Whether every input is contiguous, in which case the class of strides must be the reference's own."""
    declared_precision: bool = False
    shared: frozenset[tuple[str, str]] = frozenset()
    """Outputs of the reference that share memory with another output or an input."""
    undefined: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Name of a gradient → mask of the elements at which its input is NaN, where a function has no derivative."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Name of a gradient that is 0 everywhere → typical magnitude of the terms that cancel in it."""
    replicas: int = 0
    """Number of replicas from which the error was computed."""
    needed: int = 0
    """Number of replicas that the rule requires."""
    expected: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of `comparison`: (output's name, dtype) → object with which answers are compared."""
    doubles: tuple[Doubles, Doubles] = field(init=False, repr=False, compare=False)
    """`leaves` and `reference` in float64."""

    def without(self, names: Collection[str]) -> Truth:
        """Return the truth without these outputs."""

        def kept(leaves: dict[str, Any]) -> dict[str, Any]:
            return {name: leaf for name, leaf in leaves.items() if name not in names}

        return replace(
            self,
            leaves=kept(self.leaves),
            reference=kept(self.reference),
            errors=kept(self.errors),
            moved=kept(self.moved),
            rounding=self.rounding.difference(names),
            surely_rounding=self.surely_rounding.difference(names),
        )

    @property
    def is_complete(self) -> bool:
        """True if the error was computed from all replicas that the rule requires."""
        return self.replicas >= self.needed

    def __post_init__(self) -> None:
        self.doubles = Doubles(self.leaves), Doubles(self.reference)


TruthFunction: TypeAlias = Callable[[int], Truth]
"""Number of replicas → truth of one draw, with the reference's error over this number of replicas."""


def overflows(pair: Pair) -> str:
    """Return the message for a reference that overflows on a workload's inputs."""
    return (
        f"{pair.name}: the reference overflows on the workload's own inputs; bound them with values=floats(low, high)"
    )


def by_replicas(
    pair: Pair, case: Case, device: str, *, most: int = CAREFUL, drawn: InputsFactory | None = None, **options: Any
) -> TruthFunction:
    """Return a function from a number of replicas, at most `most`, to the truth of one draw. Each truth is computed
    once. `drawn` returns the inputs, if the caller has them. The other `options` are those of `establish`.

    A truth with more replicas reuses those of the previous truth. If the tensors are large, it starts again, so that
    their memory is free while a side runs.
    """
    kept: list[Runs] = []

    @functools.cache
    @raises_harness_faults
    def known(replicas: int) -> Truth:
        if kept:
            runs = kept.pop()
        else:
            runs = begin(pair, case, device, drawn=drawn() if drawn is not None else None, **options)
        truth = runs.truth(min(replicas, most))
        if runs.elements <= REPLICAS_UP_TO:
            kept.append(runs)
        return truth

    return known


@raises_harness_faults
def establish(
    pair: Pair,
    case: Case,
    device: str,
    *,
    gradients: bool,
    home: Path | None = None,
    replicas: int = REPLICAS,
    eps: float | None = None,
    drawn: dict[str, Any] | None = None,
    call_side: CallSide | None = None,
) -> Truth:
    """Compute the truth, the reference's outputs and their error on this draw. Raises Discard if only the reference is
    not finite.

    `replicas` is the fewest number. Outputs with few elements need more, and if the inputs are large, fewer are made,
    except with CAREFUL. `eps` is that of the working dtype unless given. `drawn` are inputs to use instead of those of
    the case's seed, with the same sizes. `call_side` calls the sides in another way.
    """
    runs = begin(pair, case, device, gradients=gradients, home=home, eps=eps, drawn=drawn, call_side=call_side)
    return runs.truth(replicas)


def begin(pair: Pair, case: Case, device: str, **options: Any) -> Runs:
    """Run the reference on the draw without replicas, with the options of `establish`."""
    return Runs(_Draw(pair, case, device, **options))


def _excused(draw: _Draw, truth: Leaves) -> Any:
    """Return the mask, or the masks by output, of the elements that the pair excuses. Raises PairError if a mask fits
    no output."""
    masks = draw.pair.excused(make.upcast(draw.inputs), draw.eps)
    if (
        masks is None
        or draw.pair.is_stateful
        or (draw.call_side is not None and not side_calls.is_proof_call(draw.call_side))
    ):
        return masks  # not checked, because the outputs have other names
    pair, derivatives = draw.pair.name, tuple(f"{kind}{name}" for kind in DERIVATIVES for name in draw.pair.inputs)
    shapes = {name: tuple(leaf.shape) for name, leaf in truth.items() if isinstance(leaf, torch.Tensor)}
    if not isinstance(masks, Mapping):
        of_inputs = [tuple(tensor.shape) for _, tensor in make.tensors_in(draw.inputs)]  # a mask of gradients
        if shapes and not any(_fits(masks, shape) for shape in (*shapes.values(), *of_inputs)):
            of_all = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise PairError(f"{pair}: excuse= returns a mask of shape {_shape(masks)}, which fits no output: {of_all}")
        return masks
    if masks and not any(name in truth or str(name).startswith(derivatives) for name in masks):
        outputs = ", ".join(name for name in truth if not name.startswith(DERIVATIVES))
        raise PairError(f"{pair}: excuse= returns a mask of {next(iter(masks))!r}, which is no output: {outputs}")
    for name, mask in masks.items():
        if mask is not None and name in shapes and not _fits(mask, shapes[name]):
            raise PairError(
                f"{pair}: excuse= returns a mask of shape {_shape(mask)} for {name}, which has shape {shapes[name]}"
            )
    return masks


def _fits(mask: Any, shape: Sequence[int]) -> bool:
    """Return whether the mask can be expanded to this shape."""
    own = _shape(mask)
    return len(own) <= len(shape) and all(m in (1, n) for m, n in zip(reversed(own), reversed(shape), strict=False))


def _shape(mask: Any) -> tuple[int, ...]:
    try:
        return tuple(torch.as_tensor(mask).shape)
    except (TypeError, ValueError, RuntimeError):
        kind = type(mask).__name__
        raise PairError(f"excuse= returns a {kind}; return a mask, a tensor of bool, or a dict of masks") from None


def of_reference(pair: Pair, case: Case, device: str, drawn: dict[str, Any]) -> Leaves:
    """Run the reference in the working precision on these inputs, which it may change. Return its outputs."""
    draw = _Draw(pair, case, device, gradients=False, drawn=drawn)
    return draw.own(draw.inputs, draw.step_inputs)


class _Draw:
    """A draw's inputs in the working precision. Runs the reference on them and on neighbouring inputs."""

    def __init__(
        self,
        pair: Pair,
        case: Case,
        device: str,
        *,
        gradients: bool,
        home: Path | None = None,
        eps: float | None = None,
        drawn: dict[str, Any] | None = None,
        call_side: CallSide | None = None,
    ) -> None:
        working = pair.precision or case.dtype
        to_working = make.rounder(case.dtype, working)
        self.pair, self.case, self.gradients, self.call_side = pair, case, gradients, call_side
        self.reference = as_side(pair.reference)
        self.exact = Side(call=pair.truth, stateful=pair.is_stateful) if pair.truth is not None else self.reference
        self.least, self.eps = eps or 0.0, eps or eps_of(working)
        self.nearness = NEARNESS.get(working, FULL)
        self.is_double = working == "float64"
        self.inputs = to_working(make.build(pair, case, device, home=home) if drawn is None else drawn)
        self.step_inputs: StepInputs = functools.cache(lambda i: to_working(make.build_step(pair, case, device, i)))

    def first_inputs(self) -> dict[str, Any]:
        """Return the inputs and those of the first step, because a state is often zero at first."""
        of_step = self.step_inputs(1) if self.pair.step_inputs else {}
        return {**self.inputs, **of_step}

    def truth(self, inputs: dict[str, Any], step_inputs: StepInputs) -> Leaves:
        """Return the truth in float64. Raises PairError if `truth` raises and the reference does not."""
        arguments = (
            self.pair,
            make.upcast(inputs),
            self.case,
            self.gradients,
            side_calls.upcast(step_inputs),
            self.call_side,
        )
        if self.pair.truth is None:
            return side_calls.run(self.exact, *arguments)
        try:
            with blaming_truth(self.pair):
                return side_calls.run(self.exact, *arguments)
        except PairError:
            self.own(make.clone(inputs), step_inputs)  # if the reference raises too, it does not support the draw
            raise

    def own(self, inputs: dict[str, Any], step_inputs: StepInputs) -> Leaves:
        """Run the reference in the working precision, on inputs that it may change."""
        return side_calls.run(
            self.reference, self.pair, inputs, self.case, self.gradients, side_calls.copied(step_inputs), self.call_side
        )

    def neighbour(self, number: int) -> tuple[Leaves, Leaves]:
        """Return (truth, outputs of the reference) on neighbouring inputs. The reference runs with other rounding
        errors."""
        beside = functools.partial(make.jitter, self.pair, seed=self.case.seed, eps=self.nearness.inputs * self.eps)
        near = beside(self.inputs, name=f"neighbour {number}")
        step_inputs: StepInputs = functools.cache(
            lambda i: beside(self.step_inputs(i), name=f"neighbour {number}, step {i}")
        )
        truth = self.truth(near, step_inputs)
        # The neighbour's inputs are already made, so only the reference itself runs with other rounding errors.
        with redrawn_roundings(self.case.seed + number, self.nearness.results, self.least):
            return truth, self.own(near, step_inputs)


class Runs:
    """Runs of the reference on a draw and on neighbouring draws. `truth` adds the neighbours that it needs."""

    def __init__(self, draw: _Draw) -> None:
        """Run the reference in float64 and in the working precision. Raises Discard if the two differ in their
        non-finite elements."""
        self.draw, pair, self.number = draw, draw.pair, 0
        self.exact, own_inputs = draw.truth(draw.inputs, draw.step_inputs), make.clone(draw.inputs)
        self.own = draw.own(own_inputs, draw.step_inputs)
        self.shared = (
            frozenset() if pair.is_stateful else frozenset(execution.shared_memory(pair, self.own, own_inputs))
        )
        del own_inputs
        self.doubles = exact, own = Doubles(self.exact), Doubles(self.own)
        _check_reference(pair, self.own, self.exact, self.doubles)
        of_inputs = ((name, spec) for name, spec in pair.inputs.items() if isinstance(spec, TensorSpec))
        self.periods = {name: spec.period for name, spec in of_inputs if spec.period}
        real = [name for name, leaf in self.exact.items() if is_real(leaf)]
        self.error_of = {
            n: ReferenceErrors(
                own[n],
                exact[n],
                period_of(self.periods, n),
                eps=draw.eps,
                roundings=draw.nearness.inputs / draw.nearness.rounding,
                first=0 if draw.is_double else 1,
            )
            for n in real
        }
        self.norms = _norms_of_floats(draw.first_inputs())
        self.scale = max((differences.rms_of(tensor, norm) for tensor, norm in self.norms.values()), default=0.0)
        self.of_inputs = sum(tensor.numel() for _, tensor in make.tensors_in(draw.inputs))
        self.elements = self.of_inputs + sum(errors.truth.numel() for errors in self.error_of.values())

    @functools.cached_property
    def excused(self) -> Any:
        return _excused(self.draw, self.exact)

    def truth(self, replicas: int) -> Truth:
        """Return the truth with the number of replicas that `establish` makes for `replicas`."""
        draw, pair, call_side = self.draw, self.draw.pair, self.draw.call_side
        large = replicas <= REPLICAS and self.of_inputs > REPLICAS_UP_TO
        all_replicas = FEW if large else max(replicas, REPLICAS)
        wanted = 0 if replicas == NONE else _replicas(self.exact, min(replicas, all_replicas))
        while self.number < wanted:
            self._add(*draw.neighbour(self.number))
            self.number += 1
        error_of, needed = self.error_of, _replicas(self.exact, all_replicas)
        rounding = frozenset(name for name, errors in error_of.items() if errors.ill_conditioned())
        share = min(1.0, sure(self.number, needed))
        surely = frozenset(name for name in rounding if error_of[name].ill_conditioned(share))
        kind = call_side.args[0] if side_calls.is_proof_call(call_side) else incoming_gradients.PLAIN
        found = Truth(
            leaves=self.exact,
            reference=self.own,
            errors=running_maximum({name: errors.error() for name, errors in error_of.items()}, pair),
            moved=running_maximum({name: errors.one_rounding() for name, errors in error_of.items()}, pair),
            ill_conditioned=any_ill_conditioned(rounding, error_of),
            rounding=rounding,
            surely_rounding=surely,
            surely_ill_conditioned=any_ill_conditioned(surely, error_of),
            eps=draw.eps,
            periods=self.periods,
            excused=self.excused,
            plain=all(how.layout == "contiguous" for how in draw.case.inputs.values()),
            declared_precision=pair.precision not in (None, TF32),
            shared=self.shared,
            undefined=_undefined(self.norms),
            terms=_terms(draw.inputs, self.exact, self.doubles[0], self.norms, kind=kind),
            replicas=self.number,
            needed=needed,
        )
        found.doubles = self.doubles
        return found

    def _add(self, near_truth: Leaves, near: Leaves) -> None:
        of_truth, of_reference = Doubles(near_truth), Doubles(near)
        for name, errors in self.error_of.items():
            if is_real(near.get(name)) and is_real(near_truth.get(name)):
                errors.add(of_reference[name], of_truth[name], self.scale)


def blaming_truth(pair: Pair) -> AbstractContextManager[None]:
    """Return a context manager that reports an error in its block as an error of the pair's `truth`."""
    return declared_functions.of_pair(pair.name, "truth", "what the reference is called with, in float64")


def _replicas(truth: Leaves, fewest: int) -> int:
    counts = [n for leaf in truth.values() if is_real(leaf) and (n := leaf.numel() if torch.is_tensor(leaf) else 1)]
    if not counts:
        return fewest
    # If `fewest` is 0, the inputs are large, and each replica costs two runs of the reference. One is needed: otherwise
    # a reference with pairwise summation would set the bound for a correct kernel that sums sequentially.
    least, most = (fewest, MAX_REPLICAS) if fewest else (1, 2)
    return max(least, min(most, -(-SAMPLES // min(counts)) - 1))


def _check_reference(pair: Pair, own: Leaves, truth: Leaves, doubles: tuple[Doubles, Doubles]) -> None:
    exact = "in float64" if pair.truth is None else "than truth= returns; let truth= return what the reference does"
    if list(own) != list(truth):
        remedy = "in float64; it must not depend on the dtype" if pair.truth is None else exact
        raise PairError(f"{pair.name}: the reference returns other outputs {remedy}")
    for name, leaf in own.items():
        if isinstance(leaf, torch.Tensor) and (kind := unusual_kind(leaf)):
            remedy = (
                "let the sides compute dense gradients, as with sparse=False, or declare gradients=False"
                if name.startswith("gradient of ")
                else "let both sides return its values, as with to_dense()"
            )
            raise PairError(
                f"{pair.name}: {name} of the reference is a {kind} tensor; only dense tensors are compared: {remedy}"
            )
        t = truth[name]
        if is_real(leaf) != is_real(t):
            remedy = "in float64; take out its casts" if pair.truth is None else exact
            raise PairError(f"{pair.name}: {name} of the reference is of another kind {remedy}")
        if not is_real(leaf):
            continue
        t64, r = (of[name] for of in doubles)
        if r.shape != t64.shape:
            raise PairError(f"{pair.name}: {name} of the reference has another shape {exact}")
        if not differences.same_nonfinite(r, t64):
            raise Discard(name)


def _norms_of_floats(inputs: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, float]]:
    """Return path → (tensor, its 2-norm) for each floating-point or complex tensor in the inputs."""
    every = (tensor for name, value in inputs.items() for tensor in make.tensors_in(value, name))
    floats = {path: tensor for path, tensor in every if tensor.is_floating_point() or tensor.is_complex()}
    return dict(zip(floats, zip(floats.values(), differences.norms(floats.values()), strict=True), strict=True))


def _undefined(norms: Mapping[str, tuple[torch.Tensor, float]]) -> dict[str, torch.Tensor]:
    found = {}
    for path, (tensor, norm) in norms.items():
        if math.isnan(norm):
            mask = tensor.detach().isnan()
            if tensor.is_complex():  # for both parts
                mask = mask.unsqueeze(-1).expand(*mask.shape, 2)
            found[f"gradient of {path}"] = found[f"second derivative of {path}"] = mask
    return found


def _terms(
    inputs: Mapping[str, Any],
    truth: Leaves,
    exact: Doubles,
    norms: Mapping[str, tuple[torch.Tensor, float]],
    *,
    kind: str,
) -> dict[str, float]:
    """Return the magnitude (incoming gradient · output / input) for each gradient that is 0 except for rounding."""
    returned = {n: exact[n] for n, t in truth.items() if isinstance(t, torch.Tensor) and is_real(t)}
    outputs = [output for n, output in returned.items() if not n.startswith(DERIVATIVES)]
    elements = max((output.numel() for output in outputs), default=0)
    weighted = incoming_gradients.size_of(kind, elements) * max(map(differences.rms, outputs), default=0.0)
    found = {}
    for name, value in inputs.items():
        for path, tensor in make.tensors_in(value, name, buffers=False):
            gradient = truth.get(f"gradient of {path}")
            if not isinstance(gradient, torch.Tensor) or not gradient.numel():
                continue
            own = differences.rms_of(*norms[path]) if path in norms else differences.rms(tensor.detach())
            size = weighted / own if own else 0.0
            if size and differences.rms(exact[f"gradient of {path}"]) <= TRUTH_EPS * size:
                found[f"gradient of {path}"] = size
    return found


def period_of(periods: Mapping[str, float], name: str) -> float | None:
    """Return the period of an output that is an input changed in place; None if it has none."""
    return next((p for key, p in periods.items() if name.startswith((f"{key} (in place)", f"{key}["))), None)
