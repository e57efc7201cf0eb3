"""Recognise draws that a proof leaves out because the reference faults on them."""

from __future__ import annotations

from collections.abc import Collection

from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import tensor_spec
from perfsuite.draws.cases import case_line, parse_case
from perfsuite.records import Case

MISALIGNED = "offset"
"""Layout whose data may begin at an address that is not aligned."""


def is_left_out(pair: Pair, case: Case, left_out: Collection[str]) -> bool:
    """Return whether the proof leaves this draw out: it is in `left_out`, or one of its inputs is misaligned as in one
    of those draws."""
    if not left_out:
        return False
    if case_line(case) in left_out:
        return True
    misaligned = misaligned_inputs(pair, case)
    return any(misaligned & misaligned_inputs(pair, parse_case(other, case.dtype)) for other in left_out)


def misaligned_inputs(pair: Pair, case: Case) -> set[str]:
    """Return the inputs in the misaligned layout whose spec does not require an alignment."""
    specs = {**pair.inputs, **pair.step_inputs}
    free = {name for name, spec in specs.items() if (leaf := tensor_spec(spec)) is not None and not leaf.align}
    return {name for name, how in case.inputs.items() if how.layout == MISALIGNED} & free
