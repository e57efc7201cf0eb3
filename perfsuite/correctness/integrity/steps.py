"""Faults of stateful pairs that do not show when one instance runs alone and keeps its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from perfsuite.correctness import execution, truths
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.memory import unwritten
from perfsuite.correctness.integrity.probe import STEPS, Probe
from perfsuite.declare.sides import Side
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent, first_line
from perfsuite.records import Case
from perfsuite.state import process_state

INSTANCES = 9
"""Number of instances that step in turn on the first draw."""


def several_instances(probe: Probe) -> None:
    """Check that instances share no state when all are built first and then step in turn. On the first draw there are
    INSTANCES of them, because a side may hand out a few state slots in turn; on later draws there are two."""
    if not probe.pair.is_stateful:
        return
    cases = (probe.case, probe.other_case())
    others = 0 if probe.number else INSTANCES - len(cases)
    beside = [probe.other_case(number) for number in range(1, 1 + others)]

    def in_turn(side: Side) -> list[tuple[Case, Leaves]]:
        every = [_stepping(probe, side, case) for case in (*cases, *beside)]
        states: list[dict[int, Leaves]] = []
        with execution.quiet(side):
            for _ in range(1 + max(STEPS)):
                states = [next(each) for each in every]
        judged = zip(cases, states, strict=False)  # only the first two instances are compared
        return [(case, execution.of_all_steps(found)) for case, found in judged]

    _hold(probe, in_turn, "when several instances of it step in turn: they share state")


def overwritten_step_inputs(probe: Probe) -> None:
    """Check that the inputs of a step may be overwritten once it has returned. A side that needs them later must keep a
    copy."""
    if not probe.pair.is_stateful or not probe.pair.step_inputs:
        return
    other = probe.other_case()

    def overwriting(side: Side) -> list[tuple[Case, Leaves]]:
        given: list[dict[str, Any]] = []

        def noted(values: dict[str, Any]) -> dict[str, Any]:
            given.append({name: make.regrouped(value) for name, value in values.items()})
            return values

        states: dict[int, Leaves] = {}
        with execution.quiet(side):
            for number, found in enumerate(_stepping(probe, side, probe.case, noted)):
                states = found
                if given:
                    # To the tensors that were given, also if the step has emptied a list of them.
                    make.copy_values(given.pop(), make.build_step(probe.pair, other, probe.device, number))
        return [(probe.case, execution.of_all_steps(states))]

    _hold(probe, overwriting, "where the inputs of a step are overwritten after it: it keeps them, and no copy")


def _stepping(
    probe: Probe, side: Side, case: Case, noted: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values
) -> Iterator[dict[int, Leaves]]:
    values = probe.drawn(case)
    execution.poison(probe.pair, values)
    return execution.stepping(
        execution.callable_of(side),
        probe.pair,
        values,
        STEPS,
        lambda i: noted(probe.step_inputs(case, i)),
    )


def _hold(probe: Probe, run: Callable[[Side], list[tuple[Case, Leaves]]], words: str) -> None:
    """Raise NotEquivalent if the side is wrong or raises when it is run in this way, and the reference is right.

    A wrong answer counts only if the side is right in the usual way; otherwise the equivalence proof reports it.
    """
    try:
        with process_state.kept(quick=True):  # so that settings changed by the side do not affect the reference
            for case, leaves in run(probe.side):
                probe.judge(leaves, case)
        return
    except truths.Discard:
        return
    except Exception as error:
        found = error
    reference = probe.of_reference()
    try:
        if not all(reference.is_right(leaves, case) for case, leaves in run(reference.side)):
            return
    except Exception:  # Discard, or the reference does not support this
        return
    if not isinstance(found, NotEquivalent):
        raise probe.fault(f"raises {type(found).__name__} ({first_line(found)}) {words}") from None
    if memory := unwritten(probe):
        raise memory from None
    if probe.is_right_on(probe.case, probe.other_case()):
        raise probe.fault(f"is wrong {words}: {found}") from None
