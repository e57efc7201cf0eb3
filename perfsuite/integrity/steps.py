"""Faults of stateful pairs that one instance, called by itself, does not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from perfsuite import execution, process_state, truths
from perfsuite import inputs as make
from perfsuite.errors import NotEquivalent, first_line
from perfsuite.execution import Leaves
from perfsuite.integrity.memory import unwritten
from perfsuite.integrity.probe import STEPS, Probe
from perfsuite.records import Case
from perfsuite.sides import Side

INSTANCES = 9
"""The instances that step in turn on the first draw."""


def several_instances(probe: Probe) -> None:
    """Instances that are all built before any steps, and then step in turn, must not share state. On the first draw
    there are more than two: a side may have a few slots that they take in turn."""
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
        judged = zip(cases, states, strict=False)  # not those beside them
        return [(case, execution.of_all_steps(found)) for case, found in judged]

    _hold(probe, in_turn, "when several instances of it step in turn: they share state")


def overwritten_step_inputs(probe: Probe) -> None:
    """The inputs of a step may be overwritten once it has returned: a side that needs them later keeps a copy."""
    if not probe.pair.is_stateful or not probe.pair.step_inputs:
        return
    other = probe.other_case()

    def overwriting(side: Side) -> list[tuple[Case, Leaves]]:
        given: list[dict[str, Any]] = []

        def noted(values: dict[str, Any]) -> dict[str, Any]:
            given.append(values)
            return values

        states: dict[int, Leaves] = {}
        with execution.quiet(side):
            for number, found in enumerate(_stepping(probe, side, probe.case, noted)):
                states = found
                if given:
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
    """Raise NotEquivalent where the side is wrong when it is run in this way and right otherwise, and the reference is
    right in this way."""
    try:
        with process_state.kept(quick=True):  # what it changes must not reach the reference
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
    except Exception:  # Discard among others: the reference does not support it
        return
    if not isinstance(found, NotEquivalent):
        raise probe.fault(f"raises {type(found).__name__} ({first_line(found)}) {words}") from None
    if memory := unwritten(probe):
        raise memory from None
    if probe.is_right_on(probe.case, probe.other_case()):
        raise probe.fault(f"is wrong {words}: {found}") from None
