"""Checks for faults that equal outputs do not show, made of every pair on a handful of draws.

Each check is a function of a `Probe`, registered in CHECKS, that raises NotEquivalent naming the fault. They look for a
kind of fault, never for one example of it. `scrutiny` looks for faults that show only while a side is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from perfsuite import process_state, proofs
from perfsuite.integrity.calls import call_order, drift, nondeterminism, partial_keys, reused_memory, unseen_inputs
from perfsuite.integrity.late_work import late_output
from perfsuite.integrity.memory import (
    out_of_bounds,
    poisoned_memory,
    private_buffer,
    touched_input,
    undeclared_mutation,
    unwritten_output,
)
from perfsuite.integrity.outputs import lazy_output
from perfsuite.integrity.probe import Probe
from perfsuite.integrity.reference_calls import calls_reference
from perfsuite.integrity.steps import overwritten_step_inputs, several_instances
from perfsuite.pair import Pair
from perfsuite.records import Case
from perfsuite.sides import as_side

__all__ = [
    "CHECKS",
    "Probe",
    "call_order",
    "calls_reference",
    "check",
    "drift",
    "late_output",
    "lazy_output",
    "nondeterminism",
    "out_of_bounds",
    "overwritten_step_inputs",
    "partial_keys",
    "poisoned_memory",
    "private_buffer",
    "reused_memory",
    "several_instances",
    "touched_input",
    "undeclared_mutation",
    "unseen_inputs",
    "unwritten_output",
]

CHECKS: tuple[Callable[[Probe], None], ...] = (
    unseen_inputs,  # first: before the reference has answered anything
    lazy_output,
    late_output,
    undeclared_mutation,
    nondeterminism,  # a change from call to call must not be blamed on memory
    call_order,
    several_instances,
    overwritten_step_inputs,
    reused_memory,
    partial_keys,
    private_buffer,
    unwritten_output,
    out_of_bounds,
    calls_reference,
    drift,
    touched_input,
)
IN_TURN = (
    several_instances,
    unseen_inputs,
    call_order,
    overwritten_step_inputs,
    reused_memory,
    partial_keys,
    private_buffer,
    calls_reference,
)
"""Checks that depend little on the draw: the draws of a proof take turns at them."""


def check(pair: Pair, case: Case, device: str, *, home: Path | None = None, number: int | None = None) -> None:
    """Make every check of the optimized side on one draw. NotEquivalent names a fault of that side, PairError one of
    the reference.

    `number` is the draw's number in a proof with several draws, which take turns at the checks IN_TURN; one draw in
    three waits for outputs that come late. None: all checks are made.
    """
    side = as_side(pair.optimized)
    probe = Probe(pair=pair, side=side, name="optimized", case=case, device=device, home=home, number=number)
    for fault in CHECKS:
        if not proofs.has_turn(fault, IN_TURN, number):
            continue
        with process_state.kept(quick=True):  # a change that one check leaves must not reach the next
            fault(probe)
