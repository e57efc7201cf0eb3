"""Check the optimized side of a pair, on a few draws, for faults that it can have although its outputs are right.

Each check is a function in CHECKS. It accepts a `Probe` and raises NotEquivalent, whose message names the fault. A
check covers a whole kind of fault, not one example of it. Module `timing_checks` looks for faults that show only while
a side is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from perfsuite.correctness import proofs
from perfsuite.correctness.integrity.calls import (
    call_order,
    drift,
    nondeterminism,
    partial_keys,
    reused_memory,
    unseen_inputs,
)
from perfsuite.correctness.integrity.late_work import late_output
from perfsuite.correctness.integrity.memory import (
    out_of_bounds,
    poisoned_memory,
    private_buffer,
    touched_input,
    undeclared_mutation,
    unwritten_output,
)
from perfsuite.correctness.integrity.outputs import lazy_output, other_fields
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.correctness.integrity.reference_calls import calls_reference
from perfsuite.correctness.integrity.steps import overwritten_step_inputs, several_instances
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import as_side
from perfsuite.records import Case
from perfsuite.state import process_state

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
    "other_fields",
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
    unseen_inputs,  # first, before the reference has computed anything
    lazy_output,
    other_fields,
    late_output,
    undeclared_mutation,
    nondeterminism,  # before the checks of memory, which must not be blamed for changes from call to call
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
    other_fields,
)
"""Checks whose result depends little on the draw. The draws of a proof take turns: each draw makes some of them."""


def check(pair: Pair, case: Case, device: str, *, home: Path | None = None, number: int | None = None) -> None:
    """Make every check of the optimized side on one draw. Raises NotEquivalent for a fault of that side, and PairError
    for a fault of the reference.

    `number` is the draw's number in a proof with several draws, each of which makes some of the checks IN_TURN. Only
    one draw in three waits for late outputs and looks for drift. With None, all checks are made.
    """
    side = as_side(pair.optimized)
    probe = Probe(pair=pair, side=side, name="optimized", case=case, device=device, home=home, number=number)
    for fault in CHECKS:
        if not proofs.has_turn(fault, IN_TURN, number):
            continue
        with process_state.kept(quick=True):  # so that settings changed by one check do not affect the next
            fault(probe)
