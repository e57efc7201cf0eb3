"""The rule by which two sides are the same function: the error against a float64 truth.

Truth t is the reference in float64 on the inputs rounded to the working dtype and upcast. With e the reference's
own error in the working dtype, m how far one rounding of the inputs moves t, and eps the working dtype's, every element
o of an optimized output must hold

    |o − t|  ≤  hypot(K · max(e, RMS(e)), MOVED · max(m, RMS(m)))  +  C · eps · (|t| + RMS(t))

and the output as a whole, over its n elements,

    RMS(o − t)  ≤  hypot(k · RMS(e), MOVED · RMS(m))  +  (C_NORM + (C − C_NORM) / √n) · eps · RMS(t)

where k = K_NORM + (K − K_NORM) / √n.

The error e of an element is an RMS too, because a single run can be exact by luck: over the draw itself and REPLICAS
neighbours (more for an output of few elements), whose inputs lie within two units in the last place, and in which the
result of every operation moves by up to one, so that its rounding is drawn anew. In half precision both are half a
unit: sums are kept in float32 there, and their order matters less than the rounding of the output. TF32 cuts digits of
the inputs off, which is up to one unit. A rounding of a value between two operations may move the output as far as a
rounding of the inputs moves t, by m. It moves many elements together, so that it does not average out. A jump is no
such movement.

The budget with replicas is at least √(1/8) of the budget without them, so that an output within that share of the
latter holds the rule, and no replica is made (`hold`). This settles 97 of 100 draws of the pairs here.

Errors that lean to one side are looked for over all draws (perfsuite.bias).

The constants are global; no pair has tolerances of its own.

K = 16      The largest of 10⁹ Gaussian errors lies near 6 RMS. A reference that sums in a tree is up to several times
            more accurate than an honest kernel that sums in sequence: on an H200, cuBLAS in float32 over 2048 terms
            reached 9.2 RMS(e) of such a reference.
K_NORM = 6  Over many elements the tail averages out; what remains is the other order of summation. No lower precision
            passes: TF32 is over 1000 times the error of float32.
            Here n counts different values only: equal rows have equal errors, which do not average out. It is 1 for
            an output that is nothing but rounding (see CAP): the gradient of the only key of an attention is the
            rounding of one number times a row.
C = 4       An output may differ in its last places also where the reference happens to be exact.
C_NORM = 1  As K_NORM; rounding once to the working dtype costs 0.3 eps.
MOVED = 8   Of 60 right kernels of 31 functions in float32 none was beyond the other terms by more than 0.16 of m. On an
            H200 the gradients of flash-attn in float16, which keeps its output in float16 for the backward pass, needed
            4, and attention in TF32 2.
CAP         Where K · RMS(e), without the movement of t, exceeds √(K · eps) · RMS(t) the draw is ill-conditioned: it is
            still checked, but does not count as proof. Where the reference alone is not finite it is discarded. Both
            are counted, and too few remaining draws are a failure, never a pass.

Where all is tiny the budget is K times the smallest normal number, since GPUs flush what is below it to zero, in each
term of a sum; in float16, which they do not flush, it is C of the smallest steps. -0.0 is equal to 0.0 unless the pair
says `signed_zeros=True`: right kernels differ in it, as x·(x > 0) and max(x, 0) do. NaN and ±inf must stand in the same
places; integers and bools must be equal; dtype, shape, device and the class of strides must agree. Elements that the
pair's `excuse` names, within rounding of a declared threshold, are left out and counted; more than EXCUSED_SHARE of all
is a failure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from perfsuite import bias, differences, execution
from perfsuite import inputs as make
from perfsuite.bias import Biases
from perfsuite.errors import PairError
from perfsuite.execution import Leaf, Leaves
from perfsuite.pair import TF32, Pair, Side, as_side
from perfsuite.records import Case, Evidence
from perfsuite.specs import TensorSpec

K = 16.0
K_NORM = 6.0
C = 4.0
C_NORM = 1.0
MOVED = 8.0
REPLICAS = 3
MAX_REPLICAS = 7
FEW = 0
"""The value of `replicas` with which `establish` makes the fewest: one, or two for a small output."""
NONE = -1
"""The value with which it makes none: the reference's own error on the draw is all that is known of it."""
SURE = (1 + MAX_REPLICAS) ** -0.5
"""An output within this share of the budget without replicas is within the budget by all: an RMS over n samples, of
which the draw itself is one, is at least √(1/n) of each."""
REPLICAS_UP_TO = 1 << 16
"""With inputs of more elements the reference's error is well known from one draw, and the fewest replicas are made."""
SAMPLES = 64
"""Replicas are added until the smallest output has this many samples of the reference's error, or MAX_REPLICAS."""
EXCUSED_SHARE = 0.01
MIN_PROOFS = 5
MIN_PROOF_SHARE = 0.25
TRUTH_EPS = 2.0**-42
"""A cheaper truth is held to the rule with this for eps: 1024 times float64's, and 2¹⁹ times finer than float32's."""


@dataclass(frozen=True, slots=True)
class Nearness:
    """How far a neighbour of a draw lies from it, in units in the last place of the working precision."""

    inputs: float
    """How far each element of an input moves at most."""
    results: float
    """How far the result of an operation of the reference moves at most."""
    rounding: float
    """How far one rounding moves an element of an input at most."""


FULL = Nearness(inputs=2.0, results=1.0, rounding=0.5)
HALF = Nearness(inputs=0.5, results=0.5, rounding=0.5)
NEARNESS = {"bfloat16": HALF, "float16": HALF, TF32: Nearness(inputs=1.0, results=0.5, rounding=1.0)}


Given: TypeAlias = Callable[[int], dict[str, Any]]
"""The inputs of a step of a stateful pair, by its number."""
Way: TypeAlias = Callable[[Callable[..., Any], Pair, dict[str, Any], int], Leaves]
"""Another way of calling a side than `execution.run`: (what to call, pair, inputs, seed) → leaves."""


class NotEquivalent(Exception):  # noqa: N818 - named as the verdict is
    """The optimized side is not the same function: a readable message, and the draw where one showed it."""

    def __init__(self, message: str, case: Case | None = None) -> None:
        super().__init__(message)
        self.case = case


class NotTimed(NotEquivalent):
    """The results are right, but what was timed is not the function's work."""


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
    biases: Biases = field(default_factory=Biases)
    answers_differ: bool | None = None
    """Whether, on some draw, the reference answered other inputs otherwise; None before the first was looked at."""
    roundings: bool = False
    """Whether the reference's roundings could be looked at, on a draw of enough different values."""
    fault: str = ""
    """What is wrong with the reference: of every draw from then on."""
    compiles: bool = False
    """Whether a draw made a side compile."""
    raised: NotEquivalent | None = None
    """How the reference raised first."""

    def discard(self, raised: NotEquivalent) -> None:
        """The reference raises on the draw that is under way."""
        self.discarded += 1
        self.raised = self.raised or raised

    def check(self, pair: Pair) -> None:
        """NotEquivalent where the reference raised on so many draws that too little is proven."""
        if self.raised is not None and self.discarded > (1 - MIN_PROOF_SHARE) * self.draws:
            raise self.raised

    def evidence(self, pair: Pair, dtype: str, device: str) -> Evidence:
        """The tally as a record; NotEquivalent where the draws prove nothing."""
        proofs = self.draws - self.discarded - self.ill_conditioned
        if proofs == 0 or (self.draws >= MIN_PROOFS and proofs < MIN_PROOF_SHARE * self.draws):
            raise NotEquivalent(
                f"{pair.name}: {self.discarded} of {self.draws} draws were discarded, because the reference alone "
                f"overflows, and {self.ill_conditioned} are ill-conditioned in {dtype}, or the reference computes "
                f"in less than {dtype} (in TF32, or rounded to half precision inside): too little is proven; bound the "
                f"inputs with values=floats(low, high), let the reference compute in {dtype}, or declare "
                f'precision="tf32" where products may be'
            )
        if self.draws >= MIN_PROOFS and self.answers_differ is False:
            raise NotEquivalent(
                f"{pair.name}: the reference gives the same answer whatever its inputs are, on all of {self.draws} "
                f"draws: the task is degenerate, and equal answers prove nothing; draw inputs that matter"
            )
        for message in self.biases.found():
            raise NotEquivalent(f"{pair.name}: {message}")
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
    errors: dict[str, torch.Tensor]
    """The reference's own error in each element, an RMS over the replicas."""
    moved: dict[str, torch.Tensor]
    """How far one rounding of the inputs moves the truth of each element, an RMS over the replicas."""
    ill_conditioned: bool
    rounding: frozenset[str]
    """The outputs that are ill-conditioned by themselves."""
    eps: float
    periods: dict[str, float]
    excused: Any = None
    plain: bool = True
    """Every input was contiguous: then the class of strides must be the reference's own."""
    declared_precision: bool = False
    shared: frozenset[tuple[str, str]] = frozenset()
    """Outputs of the reference's that have memory in common with another output or an input."""
    complete: bool = True
    """The error is over as many replicas as the rule asks for."""


# --- one draw ------------------------------------------------------------------------------------------------


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
    way: Way | None = None,
) -> Truth:
    """Truth, the reference and its error on this draw. Discard where the reference alone is not finite.

    `replicas` is the fewest, and at most REPLICAS; an output of few elements takes more. `eps` is the working dtype's
    unless given; `drawn` are other inputs of the case's sizes than its seed gives. The sides are called in another
    `way` than usual.
    """
    working = pair.precision or case.dtype
    reference = as_side(pair.reference)
    truth_side = Side(call=pair.truth, stateful=pair.is_stateful) if pair.truth is not None else reference
    least = eps or 0.0
    eps = eps or _eps(working)
    nearness = NEARNESS.get(working, FULL)
    to_working = _rounder(case.dtype, working)

    @functools.cache
    def step_inputs(i: int) -> dict[str, Any]:
        values: dict[str, Any] = to_working(make.build_step(pair, case, device, i))
        return values

    rounded = to_working(make.build(pair, case, device, home=home) if drawn is None else drawn)
    all_replicas = FEW if sum(t.numel() for _, t in make.tensors_in(rounded)) > REPLICAS_UP_TO else REPLICAS
    replicas = min(replicas, all_replicas)
    truth = _run(truth_side, pair, make.upcast(rounded), case, gradients, _upcast(step_inputs), way)
    given = make.clone(rounded)
    own = _run(reference, pair, given, case, gradients, _copied(step_inputs), way)
    shared = frozenset() if pair.is_stateful else frozenset(execution.shared_memory(pair, own, given))
    del given
    _check_reference(pair, own, truth)
    periods = {name: spec.period for name, spec in pair.inputs.items() if isinstance(spec, TensorSpec) and spec.period}
    spread = {
        n: _Spread(own[n], t, _period(periods, n), eps, nearness, same=working == "float64")
        for n, t in truth.items()
        if _is_real(t)
    }
    scale = differences.largest_rms(t for _, t in make.tensors_in(rounded) if t.is_floating_point())
    number = 0 if replicas == NONE else _replicas(truth, replicas)
    for i in range(number):
        beside = functools.partial(make.jitter, pair, seed=case.seed, eps=nearness.inputs * eps)
        near = beside(rounded, name=f"neighbour {i}")

        @functools.cache
        def near_step(step: int, i: int = i, beside: Callable[..., dict[str, Any]] = beside) -> dict[str, Any]:
            return beside(step_inputs(step), name=f"neighbour {i}, step {step}")

        t = _run(truth_side, pair, make.upcast(near), case, gradients, _upcast(near_step), way)
        # The neighbour's inputs are made by now: only the reference itself runs with its roundings redrawn.
        with execution.redrawn_roundings(case.seed + i, nearness.results, least):
            r = _run(reference, pair, near, case, gradients, _copied(near_step), way)
        for name, errors in spread.items():
            errors.add(r.get(name), t.get(name), scale)
    rounding = frozenset(name for name, errors in spread.items() if errors.ill_conditioned())
    excused = pair.excuse(*make.upcast(rounded).values()) if pair.excuse is not None else None
    plain = all(how.layout == "contiguous" for how in case.inputs.values())
    return Truth(
        leaves=truth,
        reference=own,
        errors=_running_maximum({name: errors.error() for name, errors in spread.items()}, pair),
        moved=_running_maximum({name: errors.one_rounding() for name, errors in spread.items()}, pair),
        ill_conditioned=_ill_conditioned(rounding, spread),
        rounding=rounding,
        eps=eps,
        periods=periods,
        excused=excused,
        plain=plain,
        declared_precision=pair.precision not in (None, TF32),
        shared=shared,
        complete=number >= _replicas(truth, all_replicas),
    )


class _Spread:
    """The reference's error in one output, gathered over the replicas."""

    def __init__(
        self, own: Leaf, truth: Leaf, period: float | None, eps: float, nearness: Nearness, *, same: bool
    ) -> None:
        self.truth, self.period, self.eps = differences.as_double(truth), period, eps
        self.roundings = nearness.inputs / nearness.rounding
        self.rms_t = differences.rms(truth)
        self.own = differences.difference(differences.as_double(own), self.truth, period).abs()
        self.moved = torch.zeros_like(self.own)
        self.size_t = differences.finite_size(self.truth, differences.finite(self.truth))
        # In float64 the reference is its own truth: only the neighbours tell of its error.
        self.samples, self.moves = 0 if same else 1, 0

    def add(self, reference: Leaf, truth: Leaf, scale: float) -> None:
        """A neighbour's reference and truth; `scale` is the size of the inputs."""
        if not _is_real(reference) or not _is_real(truth):
            return
        r, t = differences.as_double(reference), differences.as_double(truth)
        if r.shape != self.truth.shape or t.shape != self.truth.shape:
            return
        # Roots of sums of squares throughout: the squares of float64's own errors would underflow.
        self.own = self.own.hypot(differences.difference(r, t, self.period))
        self.samples += 1
        moved = differences.difference(t, self.truth, self.period).abs()
        # A jump (a tie broken, a threshold crossed) is not what rounding the inputs does to a continuous function.
        jump = (self.size_t + (self.rms_t + scale)) * math.sqrt(K * self.eps)
        self.moved = self.moved.hypot(torch.where(moved <= jump, moved, 0.0))
        self.moves += 1

    def error(self) -> torch.Tensor:
        return self.own / math.sqrt(max(1, self.samples))

    def one_rounding(self) -> torch.Tensor:
        return self.moved / self.roundings / math.sqrt(max(1, self.moves))

    def ill_conditioned(self) -> bool:
        own = differences.rms(self.error())
        return own > 0 and K * own > math.sqrt(K * self.eps) * self.rms_t


def _replicas(truth: Leaves, fewest: int) -> int:
    counts = [n for leaf in truth.values() if _is_real(leaf) and (n := leaf.numel() if torch.is_tensor(leaf) else 1)]
    if not counts:
        return fewest
    # With none asked for the inputs are large, and each costs two runs of the reference. One there must be: a reference
    # that sums in a tree would else bound an honest kernel that sums in sequence.
    least, most = (fewest, MAX_REPLICAS) if fewest else (1, 2)
    return max(least, min(most, -(-SAMPLES // min(counts)) - 1))


def _ill_conditioned(rounding: Collection[str], names: Collection[str]) -> bool:
    """Any output, or every gradient: one that is zero in truth (as of a bias before softmax) is only rounding."""
    gradients = {name for name in names if name.startswith("gradient of ")}
    return not gradients.issuperset(rounding) or (bool(gradients) and gradients.issubset(rounding))


def _running_maximum(errors: dict[str, torch.Tensor], pair: Pair) -> dict[str, torch.Tensor]:
    """For a stateful pair the reference's error after i steps is the largest up to there."""
    if not pair.is_stateful:
        return errors
    largest: dict[str, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, error in errors.items():
        base = name.rpartition(" after ")[0]
        before = largest.get(base)
        if before is not None and before.shape == error.shape:
            error = torch.maximum(error, before)
        result[name] = largest[base] = error
    return result


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
    if sorted(expected) != sorted(got):  # a dict's keys may come in another order
        raise NotEquivalent(_structure_message(pair, name, expected, got))
    for leaf_name in expected:
        _judge_leaf(pair, truth, leaf_name, produced[leaf_name], name, tally, strict_strides)


def rounded_to_precision(pair: Pair, case: Case) -> Callable[[Any], Any]:
    """Rounds drawn inputs to the precision that the pair declares, in the case's dtype: those that the truth is of."""
    to = _rounder(case.dtype, pair.precision or case.dtype)
    back = _rounder(pair.precision or case.dtype, case.dtype)
    return lambda values: back(to(values))


def produce(
    pair: Pair,
    side: Side,
    case: Case,
    device: str,
    *,
    gradients: bool,
    home: Path | None = None,
    settled: Callable[[], None] = lambda: None,
    shared: set[tuple[str, str]] | None = None,
    way: Way | None = None,
) -> Leaves:
    """What the side makes of the case's inputs in the case's dtype.

    `settled` is called as soon as the side has returned, while its inputs still live. What has memory in common is
    added to `shared`.
    """
    rounded = rounded_to_precision(pair, case)
    drawn = rounded(make.build(pair, case, device, home=home))
    values = make.clone(drawn)
    leaves = _run(side, pair, values, case, gradients, lambda i: rounded(make.build_step(pair, case, device, i)), way)
    settled()
    if shared is not None and not pair.is_stateful:
        shared |= execution.shared_memory(pair, leaves, values)
    del values
    return leaves


@dataclass(frozen=True, slots=True)
class Task:
    """What one draw says about the reference as a task, whatever side is tried on it."""

    answers_differ: bool | None = None
    """Whether the reference answered other inputs otherwise; None where there were no others."""
    roundings: bool = False
    """Whether the reference's roundings could be looked at."""
    fault: str = ""


class Facts:
    """What is known of a draw before any side is tried on it."""

    def truth(
        self, pair: Pair, case: Case, device: str, *, gradients: bool, home: Path | None, replicas: int = REPLICAS
    ) -> Truth:
        """As `establish`."""
        return establish(pair, case, device, gradients=gradients, home=home, replicas=replicas)

    def task(self, pair: Pair, case: Case, device: str, *, home: Path | None) -> Task:
        """What the draw says about the reference."""
        try:
            return _task(pair, case, device, home)
        except PairError as error:
            return Task(fault=str(error))


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
    facts: Facts | None = None,
) -> None:
    """Prove one side on one draw, or raise NotEquivalent. The draw is counted in `tally`."""
    tally = tally if tally is not None else Tally()
    facts = facts or Facts()
    tally.draws += 1

    @functools.cache
    def known(replicas: int) -> Truth:
        return facts.truth(pair, case, device, gradients=gradients, home=home, replicas=replicas)

    try:
        known(NONE)
    except Discard:
        tally.discarded += 1
        return
    if not tally.answers_differ or (not tally.roundings and tally.draws <= TASK_DRAWS):
        task = facts.task(pair, case, device, home=home)
        tally.fault = tally.fault or task.fault
        tally.roundings |= task.roundings
        if task.answers_differ is not None:
            tally.answers_differ = tally.answers_differ or task.answers_differ
    if tally.fault:
        raise PairError(tally.fault)
    shared: set[tuple[str, str]] = set()
    side = side or as_side(pair.optimized)
    produced = produce(pair, side, case, device, gradients=gradients, home=home, shared=shared)
    truth = hold(pair, known, produced, name=side_name, tally=tally)
    tally.ill_conditioned += truth.ill_conditioned
    for output, other in sorted(shared - truth.shared):
        raise NotEquivalent(
            f"{pair.name}: the {side_name} side returns {output} in the memory of {other}; writing to one changes the "
            f"other"
        )


Known: TypeAlias = Callable[[int], Truth]
"""Number of replicas → the truth of one draw, and the reference's error over so many."""


def truths(pair: Pair, case: Case, device: str, *, most: int = REPLICAS, **options: Any) -> Known:
    """The truths of one draw with at most so many replicas, each established once; `options` are `establish`'s."""

    @functools.cache
    def known(replicas: int) -> Truth:
        return establish(pair, case, device, replicas=min(replicas, most), **options)

    return known


def hold(
    pair: Pair,
    known: Known,
    produced: Leaves,
    *,
    name: str = "optimized",
    tally: Tally | None = None,
    strict_strides: bool = True,
) -> Truth:
    """`judge` with as many replicas as it takes: none where `produced` is surely within the budget by all.

    Returns the truth that decided.
    """
    truth = known(NONE)
    if truth.complete or not _surely(pair, truth, produced, name, tally, strict_strides):
        truth = truth if truth.complete else known(REPLICAS)
        judge(pair, truth, produced, name=name, tally=tally, strict_strides=strict_strides)
    return truth


def _surely(pair: Pair, bare: Truth, produced: Leaves, name: str, tally: Tally | None, strict_strides: bool) -> bool:
    """Whether the budget without replicas shows that `produced` is within that of all. Only then it is counted."""
    if bare.rounding:
        return False
    trial = Tally()
    try:
        judge(pair, bare, produced, name=name, tally=trial, strict_strides=strict_strides)
    except NotEquivalent:
        return False
    if trial.excused or trial.worst > SURE:
        return False
    if tally is None:
        return True
    tally.elements += trial.elements
    tally.worst = max(tally.worst, trial.worst)
    tally.biases.add(trial.biases)
    return True


def _task(pair: Pair, case: Case, device: str, home: Path | None) -> Task:
    """Whether the reference answers other inputs otherwise. PairError where it rounds to half precision."""
    side = as_side(pair.reference)

    def answer(drawn: dict[str, Any], i: Case) -> Leaves:
        given = _upcast(lambda step: make.build_step(pair, i, device, step))
        return _run(side, pair, make.upcast(drawn), i, False, given)

    case = replace(case, inputs={})  # ordinary values: of zeros there is only one kind
    drawn = make.build(pair, case, device, home=home)
    others = replace(case, seed=case.seed ^ 0x2545F49)
    other = make.build(pair, others, device, home=home)
    if same_values(drawn, other) and not pair.step_inputs:
        return Task()  # nothing was drawn: constant or recorded inputs, or empty ones
    here, again, there = answer(drawn, case), answer(drawn, case), answer(other, others)
    for name, leaf in here.items():
        if _is_real(leaf) and _is_random(differences.as_double(leaf), differences.as_double(again.get(name))):
            raise PairError(
                f"{pair.name}: {name} of the reference differs between two calls on the same inputs: let it take its "
                f"random numbers, or what they come from, as an input, e.g. generator()"
            )
    if not any(leaf.numel() for leaf in here.values() if isinstance(leaf, torch.Tensor)):
        return Task()
    looked = False
    if pair.precision is None and pair.excuse is None and not pair.is_stateful:
        looked = _check_roundings(pair, drawn, here, answer)
    differ = any(_differs(leaf, there.get(name)) for name, leaf in here.items())
    return Task(answers_differ=differ, roundings=looked)


def _is_random(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two answers in float64 differ by more than another order of the sums explains."""
    return a.shape != b.shape or differences.rms(differences.difference(a, b, None)) > RANDOM * differences.rms(a)


RANDOM = 1e-3
"""Atomic sums of float64 differ by far less, relative to the RMS of the answer."""


def _differs(a: Leaf, b: Leaf) -> bool:
    if not _is_real(a) or not _is_real(b):
        return not (torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b)
    x, y = differences.as_double(a), differences.as_double(b)
    if x.shape != y.shape or not differences.same_nonfinite(x, y):
        return True
    finite = x.isfinite()
    return bool(((x - y).abs()[finite] > TRUTH_EPS * (x.abs()[finite] + differences.rms(x))).any())


def _check_roundings(
    pair: Pair, drawn: dict[str, Any], here: Leaves, answer: Callable[[dict[str, Any], Case], Leaves]
) -> bool:
    """In float64 every value of a reference moves with its inputs, unless it is rounded on the way.

    Whether there were values enough to tell; PairError where they do not move.
    """
    case = Case(dtype="float64", sizes={}, inputs={}, seed=0)
    near = answer(make.jitter(pair, make.upcast(drawn), 0, "roundings", BESIDE), case)
    looked = False
    for name, leaf in here.items():
        if not _is_real(leaf) or not isinstance(leaf, torch.Tensor) or name.endswith("(in place)"):
            continue
        x, y = differences.as_double(leaf), differences.as_double(near[name])
        if x.shape != y.shape:
            continue
        some = x.isfinite() & (x != x.round())  # counts stay as they are, and rightly
        if x[some].unique().numel() < GENERIC:
            continue
        looked = True
        if float((x == y)[some].double().mean()) > UNMOVED:
            raise PairError(
                f"{pair.name}: {name} of the reference does not move when its float64 inputs do, by up to one part in "
                f"2^24: it is rounded to half precision inside; take out its casts, or declare precision="
            )
    return looked


TASK_DRAWS = 20
BESIDE = 2.0**-24
"""Far above float64's own rounding; a value rounded to half precision stays as it is, but for one in 8,000."""
UNMOVED = 0.95
GENERIC = 16
"""So many different values are no table of constants."""


def check_truth(pair: Pair, case: Case, device: str, *, gradients: bool = False) -> None:
    """Prove the pair's cheaper truth against the reference in float64, by the same rule with eps = TRUTH_EPS."""
    assert pair.truth is not None
    case = replace(case, dtype="float64")
    plain = replace(pair, truth=None, precision=None)
    try:
        truth = establish(plain, case, device, gradients=gradients, eps=TRUTH_EPS)
    except Discard:
        return
    cheap = produce(plain, Side(call=pair.truth, stateful=pair.is_stateful), case, device, gradients=gradients)
    try:
        judge(plain, truth, cheap, name="truth=", strict_strides=False)
    except NotEquivalent as error:
        raise NotEquivalent(f"{error}; truth= must compute the same function as the reference") from None


def _run(
    side: Side,
    pair: Pair,
    values: dict[str, Any],
    case: Case,
    gradients: bool,
    given: Given,
    way: Way | None = None,
) -> Leaves:
    execution.poison(pair, values)
    with execution.settings_kept(side) as changed, execution.quiet(side):
        if pair.is_stateful:
            states = execution.run_steps(execution.callable_of(side), pair, values, pair.steps, given)
            leaves = {name: leaf for state in states.values() for name, leaf in state.items()}
        elif way is not None:
            leaves = way(execution.callable_of(side), pair, values, case.seed)
        else:
            leaves = execution.run(execution.callable_of(side), pair, values, gradients=gradients, seed=case.seed)
    if changed:
        reference = side.call is as_side(pair.reference).call
        what = next(iter(changed.values()))
        text = f"{pair.name}: the {'reference' if reference else 'optimized'} side {what} for all that runs"
        remedy = "after it; put it back, or set it for both sides"
        raise PairError(f"{text} {remedy}") if reference else NotEquivalent(f"{text} {remedy}")
    return leaves


def _upcast(given: Given) -> Given:
    return lambda i: make.upcast(given(i))


def _copied(given: Given) -> Given:
    return lambda i: make.clone(given(i))


def _eps(precision: str) -> float:
    return TF32_EPS if precision == TF32 else torch.finfo(make.dtype_of(precision)).eps


TF32_EPS = 2.0**-10


def _rounder(source: str, target: str) -> Callable[[Any], Any]:
    """Rounds tensors of the one precision to the other; inputs with a dtype of their own keep it."""
    if TF32 in (source, target):
        return lambda value: value
    old, new = make.dtype_of(source), make.dtype_of(target)
    if old == new:
        return lambda value: value
    return lambda value: make.map_tensors(value, lambda t: t.to(new) if t.dtype == old else t)


def _check_reference(pair: Pair, own: Leaves, truth: Leaves) -> None:
    if list(own) != list(truth):
        raise PairError(f"{pair.name}: the reference returns other outputs in float64; it must not depend on the dtype")
    for name, leaf in own.items():
        t = truth[name]
        if _is_real(leaf) != _is_real(t):
            raise PairError(f"{pair.name}: {name} of the reference is of another kind in float64; take out its casts")
        if not _is_real(leaf):
            continue
        r, t64 = differences.as_double(leaf), differences.as_double(t)
        if r.shape != t64.shape:
            raise PairError(f"{pair.name}: {name} of the reference has another shape in float64")
        if not differences.same_nonfinite(r, t64):
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
    dtype = make.dtype_of(pair.output_dtype) if pair.output_dtype and name.startswith("output") else None
    _judge_form(where, reference, got, truth, strict_strides and pair.strides != "any", dtype)
    excuse = _excuse(truth.excused, name, got)
    if not _is_real(reference):
        _judge_exactly(where, reference, got, excuse, tally)
        return
    o, t64, r = differences.as_double(got), differences.as_double(t), differences.as_double(reference)
    if not differences.same_nonfinite(o, t64):
        wrong = (o.isnan() != t64.isnan()) | (o.isinf() != t64.isinf()) | (o.isinf() & t64.isinf() & (o != t64))
        at = wrong.nonzero()[0].tolist()
        raise NotEquivalent(
            f"{where} is {_item(o, at):.9g}{_place(at)} where the truth is {_item(t64, at):.9g}: "
            f"NaN and infinities must stand in the same places ({int(wrong.sum())} of {o.numel()} elements)"
        )
    if pair.signed_zeros:
        _judge_zeros(where, t64, r, o)
    period = _period(truth.periods, name)
    delta = differences.difference(o, t64, period)
    error = delta.abs()
    own, moved = truth.errors[name], truth.moved[name]
    rms_t, rms_e, rms_m = differences.rms(t64), differences.rms(own), differences.rms(moved)
    considered = differences.finite(t64)
    size_t = differences.finite_size(t64, considered)
    eps = max(truth.eps, torch.finfo(dtype).eps) if dtype else truth.eps
    least = _underflow(reference)
    budget = (K * own.clamp_min(rms_e)).hypot(MOVED * moved.clamp_min(rms_m))
    budget = budget + ((size_t + rms_t) * (C * eps)).clamp_min(least)
    if excuse is not None:
        considered = t64.isfinite()
        near = excuse.to(considered.device) & considered & (error > budget)
        considered &= ~near
        _count_excused(tally, near, 0)
    if tally is not None:
        tally.elements += o.numel()
    if not o.numel() or (considered is not None and not considered.any()):
        return
    share = error / budget
    norms, judged, of_truth = _Norms(eps, rms_t, rms_e, rms_m, least), error, t64
    if considered is not None:
        share = torch.where(considered, share, 0.0)
        judged, of_truth, of_error, of_moved = (x[considered] for x in (error, t64, own, moved))
        norms = _Norms(eps, differences.rms(of_truth), differences.rms(of_error), differences.rms(of_moved), least)
    worst, norm, count = float(share.max()), differences.rms(judged), judged.numel()
    if norm > norms.budget(count):
        count = 1 if name in truth.rounding else of_truth.unique().numel()
    beyond_norm = norm / norms.budget(count)
    if tally is not None:
        tally.worst = max(tally.worst, worst, beyond_norm)
    if worst > 1.0:
        at = _unravel(int(share.argmax()), share.shape)
        beyond = int((share > 1).sum())
        raise NotEquivalent(
            f"{where} is wrong{_place(at)}: {_item(o, at):.9g}, truth {_item(t64, at):.9g}, reference "
            f"{_item(r, at):.9g}; error {_item(error, at):.3g} is {worst:.3g} times its budget of "
            f"{_item(budget, at):.3g} ({beyond} of {o.numel()} elements beyond budget)"
        )
    if beyond_norm > 1.0:
        raise NotEquivalent(
            f"{where} is inaccurate as a whole: its RMS error {norm:.3g} is {beyond_norm:.3g} times its "
            f"budget of {norm / beyond_norm:.3g} (the reference's own is {rms_e:.3g})"
        )
    if pair.is_stateful or pair.precision == TF32 or name in truth.rounding:
        return  # rounding adds up over steps, and a product in TF32 cuts digits off
    large = size_t > least / eps  # what is flushed to zero leans by all of its size
    if considered is not None:
        large &= considered
    kept = (delta, differences.difference(r, t64, period), own.hypot(MOVED / K * moved), t64)
    if not large.all():
        kept = (kept[0][large], kept[1][large], kept[2][large], kept[3][large])
    draw = bias.draw_of(*kept, eps=eps, dtype=_dtype_of(got))
    if draw is None:
        return
    if message := bias.alone(name, draw):
        raise NotEquivalent(f"{pair.name}, {side} side: {message}")
    if tally is not None:
        tally.biases.note(name, draw)


def _judge_zeros(where: str, truth: torch.Tensor, reference: torch.Tensor, got: torch.Tensor) -> None:
    """NotEquivalent where a zero has another sign than in the truth, and in the reference's own answer."""
    zero = (truth == 0) & (got == 0)
    wrong = zero & (truth.signbit() == reference.signbit()) & (truth.signbit() != got.signbit())
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise NotEquivalent(
            f"{where} is {_item(got, at)}{_place(at)} where the truth is {_item(truth, at)}: the sign of zero counts, "
            f"as signed_zeros=True says ({int(wrong.sum())} of {got.numel()} elements)"
        )


def _judge_exactly(where: str, reference: Leaf, got: Leaf, excuse: torch.Tensor | None, tally: Tally | None) -> None:
    if not isinstance(got, torch.Tensor) or not isinstance(reference, torch.Tensor):
        if got != reference:
            raise NotEquivalent(f"{where} is {got!r} instead of {reference!r}")
        return
    wrong = got != reference
    if excuse is not None:
        _count_excused(tally, wrong & excuse, got.numel())
        wrong = wrong & ~excuse
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise NotEquivalent(
            f"{where} differs{_place(at)}: {got[tuple(at)].item()} instead of {reference[tuple(at)].item()} "
            f"(whole numbers and bools must be equal)"
        )


def _dtype_of(leaf: Leaf) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, torch.Tensor) else torch.float64


@dataclass(frozen=True, slots=True)
class _Norms:
    """RMS values of one output: its truth, the reference's error, and the movement of the truth by one rounding."""

    eps: float
    truth: float
    error: float
    moved: float
    least: float

    def budget(self, count: int) -> float:
        """The budget of the RMS error for so many independent elements."""
        tail = 1 / math.sqrt(count)
        floor = max((C_NORM + (C - C_NORM) * tail) * self.eps * self.truth, self.least)
        return math.hypot((K_NORM + (K - K_NORM) * tail) * self.error, MOVED * self.moved) + floor


def _underflow(leaf: Leaf) -> float:
    """What a device that flushes what is below the smallest normal number may lose."""
    dtype = _dtype_of(leaf)
    if not dtype.is_floating_point:
        return K * float(torch.finfo(torch.float32).tiny)
    info = torch.finfo(dtype)
    return C * info.tiny * info.eps if dtype == torch.float16 else K * info.tiny


def _excuse(excused: Any, name: str, leaf: Leaf) -> torch.Tensor | None:
    """The elements of this output that the pair excuses; a mask of another shape is not for it."""
    mask = excused.get(name) if isinstance(excused, Mapping) else excused
    if mask is None or not isinstance(leaf, torch.Tensor):
        return None
    try:
        return torch.as_tensor(mask, device=leaf.device).expand(leaf.shape)
    except RuntimeError:
        return None


def _count_excused(tally: Tally | None, near: torch.Tensor, elements: int) -> None:
    if tally is not None:
        tally.excused += int(near.sum())
        tally.elements += elements


def _judge_form(
    where: str, reference: Leaf, got: Leaf, truth: Truth, strict_strides: bool, dtype: torch.dtype | None
) -> None:
    """`dtype` is what a floating output is declared to be in."""
    if isinstance(reference, torch.Tensor) != isinstance(got, torch.Tensor):
        raise NotEquivalent(f"{where} is {_kind(got)} where the reference has {_kind(reference)}")
    if not isinstance(reference, torch.Tensor) or not isinstance(got, torch.Tensor):
        return
    forms: tuple[tuple[str, object, object], ...] = (
        ("shape", tuple(reference.shape), tuple(got.shape)),
        ("dtype", dtype if dtype and reference.is_floating_point() else reference.dtype, got.dtype),
        ("device", reference.device, got.device),
    )
    for what, expected, actual in forms:
        # A side that declares a lower working precision still returns the dtype of its inputs.
        if expected != actual and not (what == "dtype" and truth.declared_precision):
            raise NotEquivalent(f"{where} has {what} {actual} where the reference has {expected}")
    if not strict_strides or got.numel() <= 1:
        return
    lies, should = strides_class(got), strides_class(reference)
    # Whether an operation keeps the layout of its inputs or not, both are usual: code that needs one asks for it.
    weakest = should if truth.plain else max(should, KEPT, key=STRIDES.index)
    if STRIDES.index(lies) > STRIDES.index(weakest) or (truth.plain and lies != should):
        raise NotEquivalent(f"{where} is {lies} in memory where the reference is {should} (strides {got.stride()})")


STRIDES = ("contiguous", "channels last", "permuted", "strided", "overlapping")
"""From strong to weak: code downstream may rely on what the reference gives, never on more."""
KEPT = "permuted"
"""How an elementwise operation may leave its output where its inputs are not contiguous."""


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every element, NaN equal to NaN."""
    same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() or a.is_complex() else a == b
    return bool(same.all())


def same_values(one: Any, other: Any) -> bool:
    """Whether all tensors in two nested values of one form are equal in every element."""
    return all(
        a.shape == b.shape and identical(a, b)
        for (_, a), (_, b) in zip(make.tensors_in(one), make.tensors_in(other), strict=True)
    )


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


def _period(periods: Mapping[str, float], name: str) -> float | None:
    return next((p for key, p in periods.items() if name.startswith((f"{key} (in place)", f"{key}["))), None)


def _item(tensor: torch.Tensor, at: list[int]) -> float:
    return float(tensor[tuple(at)]) if at else float(tensor)


def _place(at: list[int]) -> str:
    """Where an element is; a number has no place."""
    return f" at {at}" if at else ""


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
