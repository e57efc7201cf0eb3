"""Other ways of calling the optimized side: each must give what the reference gives when it is called in the same way.

A way that the reference does not support (it raises there) is left out. A side may refuse a second or a double backward
pass by raising, as many kernels do; a wrong answer is a fault everywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from perfsuite import execution, process_state, proofs
from perfsuite import many_elements as large
from perfsuite.contexts.backward import (
    after_calls_without_gradients,
    backward_in_other_thread,
    changed_before_backward,
    double_backward,
    inputs_with_graphs,
    nan_gradients,
    one_gradient_needed,
    saved_tensor_hooks,
    second_backward,
    some_outputs_used,
    two_gradients_needed,
    two_graphs,
    written_gradients,
)
from perfsuite.contexts.calling import gradients_are_right
from perfsuite.contexts.forward import (
    after_other_dtype,
    autocast,
    grad_mode_off,
    inference_mode,
    no_gradient_needed,
    one_tensor,
    other_default_dtype,
    other_thread,
    rewritten_inputs,
    two_threads,
    uncounted_writes,
    uneven_lists,
)
from perfsuite.contexts.gpu import captured_graph, other_stream
from perfsuite.contexts.steps import (
    every_step,
    first_steps,
    many_steps,
    needing_gradients,
    outside_changes,
    same_step_tensors,
    step_layouts,
    step_sizes,
    uneven_step_lists,
)
from perfsuite.errors import NotEquivalent
from perfsuite.integrity.probe import Probe
from perfsuite.pair import Pair
from perfsuite.pair_fields import CONTEXTS
from perfsuite.records import Case
from perfsuite.sides import as_side

__all__ = ["COSTLY", "WAYS", "check"]

COMPILED_CALL = os.path.join("torch", "_dynamo", "eval_frame.py")
"""File of torch that calls compiled functions."""


def many_elements(probe: Probe) -> None:
    """Call on more elements than 32 bits can count."""
    large.check(probe)


WAYS: tuple[Callable[[Probe], None], ...] = (
    inference_mode,
    no_gradient_needed,
    other_thread,
    two_threads,
    grad_mode_off,
    autocast,
    one_gradient_needed,
    two_gradients_needed,
    some_outputs_used,
    two_graphs,
    second_backward,
    double_backward,
    changed_before_backward,
    after_calls_without_gradients,
    after_other_dtype,
    other_default_dtype,
    uncounted_writes,
    rewritten_inputs,
    one_tensor,
    uneven_lists,
    inputs_with_graphs,
    nan_gradients,
    written_gradients,
    saved_tensor_hooks,
    backward_in_other_thread,
    other_stream,
    captured_graph,
)
COMPILED = (no_gradient_needed, one_gradient_needed)
"""Ways that are tried on a CPU where the side compiles, unless the profile is "thorough": each way takes seconds
then."""
NOT_COMPILED = (
    two_gradients_needed,
    some_outputs_used,
    two_threads,
    after_calls_without_gradients,
    after_other_dtype,
    other_default_dtype,
    rewritten_inputs,
    one_tensor,
    inputs_with_graphs,
    saved_tensor_hooks,
    backward_in_other_thread,
)
"""Ways that are not tried where the side is compiled. torch.compile compiles, captures graphs and replays them in one
thread at a time; for the other ways it compiles anew, which takes seconds."""
COSTLY: tuple[Callable[[Probe], None], ...] = (many_elements,)
STATEFUL: tuple[Callable[[Probe], None], ...] = (
    every_step,
    outside_changes,
    needing_gradients,
    same_step_tensors,
    step_layouts,
    step_sizes,
    uneven_step_lists,
)
EVERY_DRAW = (inference_mode, no_gradient_needed, one_gradient_needed)
IN_TURN = tuple(way for way in (*WAYS, *STATEFUL) if way not in EVERY_DRAW)
"""Ways that depend little on the draw: the draws of a proof take turns at them."""
COSTLY_STATEFUL: tuple[Callable[[Probe], None], ...] = (many_steps,)


def check(
    pair: Pair,
    case: Case,
    device: str,
    *,
    home: Path | None = None,
    thorough: bool = False,
    number: int | None = None,
) -> None:
    """Raise NotEquivalent, naming the way, where the optimized side is right in a plain call and wrong in that way.

    With `thorough` the expensive ways are tried, too. `number` is the draw's number in a proof with several draws: each
    draw takes a part of the ways IN_TURN. All ways are tried where it is None.
    """
    probe = Probe(pair=pair, side=as_side(pair.optimized), name="optimized", case=case, device=device, home=home)
    if not pair.is_stateful and not probe.answers_rightly():
        return  # equivalence says how
    ways = WAYS
    if pair.is_stateful:
        first_steps(probe)
        ways = (*STATEFUL, *COSTLY_STATEFUL) if thorough else STATEFUL
    elif _is_compiled(probe):
        number = None  # its proof takes one draw
        ways = tuple(way for way in (*WAYS, *COSTLY) if way not in NOT_COMPILED) if thorough else COMPILED
    else:
        if not gradients_are_right(probe):
            return  # gradients says how
        ways = (*WAYS, *COSTLY) if thorough else WAYS
    probe.number = number
    with execution.recompiling():
        for way in ways:
            if proofs.has_turn(way, IN_TURN, number) and way.__name__ not in pair.unsupported:
                with process_state.kept(quick=True):
                    _try(way, probe)


def _is_compiled(probe: Probe) -> bool:
    """Return whether a call runs code that torch.compile made."""
    entered = False

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        if not entered and event == "call" and frame.f_code.co_filename.endswith(COMPILED_CALL):
            # The same file keeps functions from being compiled, many of torch's own among them.
            entered = type(frame.f_locals.get("self")).__name__ in ("OptimizeContext", "RunOnlyContext")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        probe.call(probe.drawn())
    finally:
        process_state.set_profile(before)
    return entered


def _try(way: Callable[[Probe], None], probe: Probe) -> None:
    try:
        way(probe)
    except NotEquivalent as error:
        if way.__name__ not in CONTEXTS:
            raise
        remedy = f"if the kernel does not support this, declare unsupported={{{way.__name__!r}: 'why'}}"
        raise NotEquivalent(f"{error}; {remedy}", error.case) from None
