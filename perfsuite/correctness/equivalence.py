"""Check whether two sides are the same function on a draw, by the rule in `rule.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from perfsuite.correctness import execution, side_calls, truths
from perfsuite.correctness.comparison import judge_output
from perfsuite.correctness.differences import Doubles
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.reference_task import Task, draws_of, task_of
from perfsuite.correctness.rule import CAREFUL, FEW, NEAR, NONE, REPLICAS, TRUTH_EPS, sure
from perfsuite.correctness.rule import C as C
from perfsuite.correctness.rule import K as K
from perfsuite.correctness.side_calls import InputsFactory
from perfsuite.correctness.tally import Tally
from perfsuite.correctness.truths import Discard, Truth, TruthFunction
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.records import Case


def judge(
    pair: Pair,
    truth: Truth,
    produced: Leaves,
    *,
    name: str = "optimized",
    tally: Tally | None = None,
    strict_strides: bool = True,
) -> None:
    """Raise NotEquivalent if the errors of `produced` exceed their budget. Add the figures to `tally`."""
    expected, got = list(truth.reference), list(produced)
    if sorted(expected) != sorted(got):  # the keys of a dict may have another order
        raise NotEquivalent(_structure_message(pair, name, expected, got))
    doubles = Doubles(produced)
    for leaf in expected:
        try:
            judge_output(pair, truth, leaf, produced[leaf], doubles, name, tally, strict_strides=strict_strides)
        except NotEquivalent as error:
            error.steps = execution.steps_of(leaf) if pair.is_stateful else None
            raise


class ReferenceResults:
    """Compute what a draw needs from the reference: its truths and the checks of its task. The tested side has no part
    in them."""

    def truths(
        self,
        pair: Pair,
        case: Case,
        device: str,
        *,
        gradients: bool,
        home: Path | None,
        drawn: InputsFactory | None = None,
    ) -> TruthFunction:
        """Return the truths of the draw as a function of the number of replicas. `drawn` returns the inputs, if the
        caller has them already."""
        call_side = side_calls.proof_call(case, gradients=gradients)
        return truths.by_replicas(pair, case, device, gradients=gradients, home=home, call_side=call_side, drawn=drawn)

    def task(self, pair: Pair, case: Case, device: str, *, home: Path | None) -> Task:
        """Return what the draw shows about the reference."""
        try:
            return task_of(pair, case, device, home)
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
    results: ReferenceResults | None = None,
) -> None:
    """Prove one side on one draw, or raise NotEquivalent. Count the draw in `tally`."""
    tally = tally if tally is not None else Tally()
    results = results or ReferenceResults()
    tally.draws += 1

    drawn = side_calls.drawn_once(pair, case, device, home)
    known = results.truths(pair, case, device, gradients=gradients, home=home, drawn=drawn)
    try:
        known(NONE)
    except Discard:
        tally.discarded += 1
        return
    if not tally.answers_differ or (not tally.roundings and tally.draws <= draws_of(pair)):
        task = results.task(pair, case, device, home=home)
        tally.fault = tally.fault or task.fault
        tally.roundings |= task.roundings
        if task.answers_differ is not None:
            tally.answers_differ = tally.answers_differ or task.answers_differ
    if tally.fault:
        raise PairError(tally.fault)
    shared: set[tuple[str, str]] = set()
    side = side or as_side(pair.optimized)
    call_side = side_calls.proof_call(case, gradients=gradients)
    produced = side_calls.produce(
        pair, side, case, device, gradients=gradients, home=home, shared=shared, call_side=call_side, drawn=drawn()
    )
    truth = hold(pair, known, produced, name=side_name, tally=tally)
    tally.ill_conditioned += truth.ill_conditioned
    tally.has_answer |= any(leaf is not None for leaf in truth.leaves.values())
    tally.empty += not any(leaf.numel() if torch.is_tensor(leaf) else 1 for leaf in truth.leaves.values())
    for output, other in sorted(shared - truth.shared):
        raise NotEquivalent(
            f"{pair.name}: the {side_name} side returns {output} in the memory of {other}; writing to one changes the "
            f"other; return a copy where the reference does",
            names_its_cause=True,
        )


def hold(
    pair: Pair,
    known: TruthFunction,
    produced: Leaves,
    *,
    name: str = "optimized",
    tally: Tally | None = None,
    strict_strides: bool = True,
    enough: int = REPLICAS,
) -> Truth:
    """Call `judge` with as many replicas as needed, and return the truth that was decisive.

    NONE or FEW replicas are enough if `produced` is then surely within the budget by all of them. With `enough` FEW, it
    passes if it is within the budget by these few. Before a side fails whose error is near its budget, or where no
    replica shows an error, CAREFUL replicas decide.
    """
    for replicas in (NONE, FEW, REPLICAS):
        truth = known(replicas)
        if truth.is_complete or replicas == enough:
            break
        if _surely(pair, truth, produced, name, tally, strict_strides):
            return truth
    trial = Tally()
    try:
        judge(pair, truth, produced, name=name, tally=trial, strict_strides=strict_strides)
    except NotEquivalent as error:
        if error.excess > NEAR and not _has_zeros_alone(truth):
            raise
        # Among many elements and draws, some errors are larger than a few replicas show.
        truth, trial = known(CAREFUL), Tally()
        judge(pair, truth, produced, name=name, tally=trial, strict_strides=strict_strides)
    if tally is not None:
        tally.take(trial)
    return truth


def _has_zeros_alone(truth: Truth) -> bool:
    """Return whether an output is 0 everywhere, exactly by all replicas, so that nothing is known about its error.

    The terms of its elements may cancel, as in 1 + tanh(-20). Few replicas then show their rounding errors.
    """
    exact, _ = truth.doubles
    return any(
        leaf.numel() and not any(t.any() for t in (exact[name], truth.errors[name], truth.moved[name]))
        for name, leaf in truth.leaves.items()
        if isinstance(leaf, torch.Tensor) and name in truth.errors
    )


def _surely(pair: Pair, truth: Truth, produced: Leaves, name: str, tally: Tally | None, strict_strides: bool) -> bool:
    """Return whether the budget by these replicas shows that `produced` is within the budget by all replicas. Only then
    are the figures added to `tally`."""
    if truth.ill_conditioned and not truth.surely_ill_conditioned:
        return False  # all replicas decide whether the draw proves anything
    if truth.rounding != truth.surely_rounding:
        # More replicas may show that these outputs are not mere rounding errors. They then have the smaller budget.
        smaller = replace(truth, rounding=truth.surely_rounding)
        smaller.doubles = truth.doubles
        if not _is_sure(pair, smaller, produced, name, Tally(), strict_strides):
            return False
    trial = Tally()
    if not _is_sure(pair, truth, produced, name, trial, strict_strides):
        return False
    if tally is not None:
        tally.take(trial)
    return True


def _is_sure(pair: Pair, truth: Truth, produced: Leaves, name: str, trial: Tally, strict_strides: bool) -> bool:
    """Return whether all outputs are within the share `sure` of their budgets. Add the figures to `trial`."""
    try:
        judge(pair, truth, produced, name=name, tally=trial, strict_strides=strict_strides)
    except NotEquivalent:
        return False
    return not trial.excused and trial.worst <= sure(truth.replicas, truth.needed)


def check_truth(pair: Pair, case: Case, device: str, *, gradients: bool = False) -> None:
    """Compare the pair's cheaper truth with the reference in float64, by the same rule with eps = TRUTH_EPS."""
    assert pair.truth is not None
    case = replace(case, dtype="float64")
    plain = replace(pair, truth=None, precision=None)
    try:
        truth = truths.establish(plain, case, device, gradients=gradients, eps=TRUTH_EPS)
    except Discard:
        return
    side = Side(call=pair.truth, stateful=pair.is_stateful)
    with truths.blaming_truth(pair):
        cheap = side_calls.produce(plain, side, case, device, gradients=gradients)
    try:
        judge(plain, truth, cheap, name="truth=", strict_strides=False)
    except NotEquivalent as error:
        raise NotEquivalent(f"{error}; truth= must compute the same function as the reference") from None


def _structure_message(pair: Pair, side: str, expected: list[str], got: list[str]) -> str:
    def outputs(names: list[str]) -> int:
        return sum(not n.startswith("gradient of ") and not n.endswith("(in place)") for n in names)

    if outputs(expected) != outputs(got):
        return (
            f"{pair.name}: the {side} side returns {outputs(got)} output{'s' * (outputs(got) != 1)} where the "
            f"reference returns {outputs(expected)}"
        )
    missing = [n for n in expected if n not in got]
    alone, name = ("reference", missing[0]) if missing else (f"{side} side", next(n for n in got if n not in expected))
    output, _, given = name.partition(" is ")
    has = f"returns its input {given} as {output}" if given else f"has {name}"
    return f"{pair.name}: the {side} side's outputs are arranged otherwise than the reference's: only the {alone} {has}"
