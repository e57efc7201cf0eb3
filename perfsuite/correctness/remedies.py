"""Find which side raised an error in a proof, and the declaration that may be missing."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from perfsuite.correctness import truths
from perfsuite.correctness.reference_task import task_of
from perfsuite.declare import expressions
from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import Dim, tensors_of
from perfsuite.records import Case

EXPANDED_WRITTEN = "more than one element of the written-to tensor refers to a single memory location"
"""Part of torch's message if an expanded tensor is changed in place."""
LEAF_WRITTEN = "a leaf Variable that requires grad is being used in an in-place operation"
"""Part of torch's message if an input that requires a gradient is changed in place."""
WRITTEN_BEFORE_BACKWARD = "has been modified by an inplace operation"
"""Part of torch's message if a tensor that the backward pass needs was changed."""
OUT_DIFFERENTIATED = "arguments don't support automatic differentiation"
"""Part of torch's message if an operation with out= is differentiated."""
NOT_DIFFERENTIABLE = "is not differentiable with respect to argument"
"""Part of torch's message if an input of an operation has no gradient."""
MISPLACED = "storage_offset divisible by"
"""Part of torch's message if data begins at an offset that an operation does not support."""
CALL_THE_REFERENCE = frozenset(call.__code__ for call in (truths.begin, truths.Runs.truth, task_of))
"""Code objects of the functions that call a reference, and no other side."""


def is_of_reference(error: BaseException) -> bool:
    """Return whether the error was raised where a proof calls the reference."""
    calls = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return not CALL_THE_REFERENCE.isdisjoint(calls)


def remedy_of(error: BaseException, pair: Pair, case: Case) -> str:
    """Return the declaration that may be missing if a side raises this error on the draw; empty if none is known."""
    if EXPANDED_WRITTEN in str(error):
        return (
            '; name what a backward pass uses up: consumes={"grad_output"} for the incoming gradient, consumes={…} for '
            "an input; or what the sides change: mutates={…}"
        )
    if LEAF_WRITTEN in str(error):
        return "; name each input that the sides change in place: mutates={…}"
    if OUT_DIFFERENTIATED in str(error) or WRITTEN_BEFORE_BACKWARD in str(error):
        return "; if its gradients are not needed, declare gradients=False"
    if NOT_DIFFERENTIABLE in str(error):
        return "; an input that has no gradient is declared tensor(…, differentiable=False)"
    if MISPLACED in str(error):
        return "; if its data must begin at a multiple of some bytes, declare it: tensor(…, align=16)"
    return "" if is_of_reference(error) else for_empty(pair, case)


def for_empty(pair: Pair, case: Case) -> str:
    """Return the declarations that leave out the draw's sizes of 0; empty if it has none."""
    empty = [name for name in sorted(pair.symbols) if case.sizes.get(name) == 0]
    if not empty:
        return ""
    dimensions = set().union(*(expressions.names(d) for d in _dims(pair) if isinstance(d, str)))
    # Any other size is the length of a list, or a bound of values.
    others = ", ".join(f'"{name}": size(1, …)' for name in empty if name not in dimensions)
    how = [f"sizes={{{others}}}"] if others else []
    how += ["tensor(…, least=1)"] if dimensions.intersection(empty) else []
    named = " or ".join(f"{name}=0" for name in empty)
    return f"; if it is never called with {named}, declare it: {', '.join(how)}"


def _dims(pair: Pair) -> Iterator[Dim]:
    for spec in {**pair.inputs, **pair.step_inputs}.values():
        for tensor in tensors_of(spec):
            yield from tensor.dims
