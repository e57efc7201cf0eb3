"""Call the optimized side in other ways than the equivalence proof does, such as under autocast or in another thread.

In each way it must give what the reference gives in that way. A way in which the reference raises is skipped. A side
may refuse some ways, such as a second or a double backward pass, by raising, as many kernels do. A wrong answer is a
fault in every way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from perfsuite.correctness import execution, proofs
from perfsuite.correctness import many_elements as large
from perfsuite.correctness.contexts.backward import (
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
from perfsuite.correctness.contexts.calling import gradients_are_right
from perfsuite.correctness.contexts.forward import (
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
from perfsuite.correctness.contexts.gpu import captured_graph, other_stream
from perfsuite.correctness.contexts.steps import (
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
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.declare.pair import Pair
from perfsuite.declare.pair_fields import CONTEXTS
from perfsuite.declare.sides import as_side
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case
from perfsuite.state import process_state

__all__ = ["COSTLY", "WAYS", "check"]

COMPILED_CALL = os.path.join("torch", "_dynamo", "eval_frame.py")
"""End of the path of the torch file that calls compiled functions."""


def many_elements(probe: Probe) -> None:
    """Call the side on more elements than a 32-bit index can count."""
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
"""The only ways that are tried on a CPU for a compiled side, unless the profile is "thorough": each way then takes
seconds, because the side is compiled again."""
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
"""Ways that are never tried for a compiled side. torch.compile compiles, captures graphs and replays them in one thread
at a time. For the other ways in this list it compiles again, which takes seconds."""
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
"""Ways whose result depends little on the draw. The draws of a proof take turns: each draw tries some of them."""
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
    """Raise NotEquivalent if the optimized side is right in a plain call and wrong in another way; the message names
    the way.

    With `thorough`, the expensive ways are tried, too. `number` is the draw's number in a proof with several draws,
    each of which tries some of the ways IN_TURN. With None, all ways are tried.
    """
    probe = Probe(pair=pair, side=as_side(pair.optimized), name="optimized", case=case, device=device, home=home)
    if not pair.is_stateful and not probe.answers_rightly():
        return  # the equivalence proof reports it
    ways = WAYS
    if pair.is_stateful:
        first_steps(probe)
        ways = (*STATEFUL, *COSTLY_STATEFUL) if thorough else STATEFUL
    elif _is_compiled(probe):
        number = None  # the proof of a compiled side has only one draw
        ways = tuple(way for way in (*WAYS, *COSTLY) if way not in NOT_COMPILED) if thorough else COMPILED
    else:
        if not gradients_are_right(probe):
            return  # the gradients proof reports it
        ways = (*WAYS, *COSTLY) if thorough else WAYS
    probe.number = number
    with execution.recompiling():
        for way in ways:
            if proofs.has_turn(way, IN_TURN, number) and way.__name__ not in pair.unsupported:
                with process_state.kept(quick=True):
                    _try(way, probe)


def _is_compiled(probe: Probe) -> bool:
    """Return whether a call runs code compiled by torch.compile."""
    entered = False

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        if not entered and event == "call" and frame.f_code.co_filename.endswith(COMPILED_CALL):
            # The same file also calls functions that must not be compiled, including many of torch's own.
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
