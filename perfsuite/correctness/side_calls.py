"""Call a side on the inputs of a draw: once, or for the steps of a stateful pair."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from perfsuite.correctness import execution, incoming_gradients
from perfsuite.correctness.execution import Leaves
from perfsuite.declare.pair import Pair
from perfsuite.declare.pair_fields import GRAD_OUTPUT
from perfsuite.declare.sides import Side, as_side
from perfsuite.draws import inputs as make
from perfsuite.errors import GlobalStateChanged, PairError
from perfsuite.records import Case

StepInputs: TypeAlias = Callable[[int], dict[str, Any]]
"""Number of a step of a stateful pair → the step's inputs."""
InputsFactory: TypeAlias = Callable[[], dict[str, Any]]
"""Function that returns the inputs of a draw. The caller may change them."""
CallSide: TypeAlias = Callable[[Callable[..., Any], Pair, dict[str, Any], Any], Leaves]
"""Function that calls a side instead of `execution.run` or `run_steps`: (callable, pair, inputs, seed) → leaves. For a
stateful pair, the fourth argument is a `StepInputs`."""


def proof_call(case: Case, *, gradients: bool, kind: str | None = None) -> CallSide | None:
    """Return the function with which a proof calls a side, or None without gradients.

    The incoming gradients are of this kind, or of the draw's own kind.
    """
    return functools.partial(_run_with, kind or incoming_gradients.kind_of(case)) if gradients else None


def _run_with(kind: str, call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
    if kind == incoming_gradients.EXPANDED and GRAD_OUTPUT in pair.consumes:  # an expanded tensor cannot be written to
        kind = incoming_gradients.PLAIN
    return execution.run(call, pair, values, gradients=True, seed=seed, kind=kind)


def is_proof_call(call_side: CallSide | None) -> TypeGuard[functools.partial[Leaves]]:
    """Return whether `proof_call` returned this function."""
    return isinstance(call_side, functools.partial) and call_side.func is _run_with


def produce(
    pair: Pair,
    side: Side,
    case: Case,
    device: str,
    *,
    gradients: bool,
    home: Path | None = None,
    on_return: Callable[[], None] = lambda: None,
    shared: set[tuple[str, str]] | None = None,
    call_side: CallSide | None = None,
    drawn: dict[str, Any] | None = None,
) -> Leaves:
    """Return the side's outputs on the case's inputs in the case's dtype.

    `drawn` are these inputs, if the caller has them; they may be changed. `on_return` is called as soon as the side
    has returned, while its inputs still exist. Outputs that share memory are added to `shared`.
    """
    values = drawn if drawn is not None else make.clone(make.build(pair, case, device, home=home))
    leaves = run(side, pair, values, case, gradients, lambda i: make.build_step(pair, case, device, i), call_side)
    on_return()
    if shared is not None and not pair.is_stateful:
        shared |= execution.shared_memory(pair, leaves, values)
    del values
    return leaves


def drawn_once(pair: Pair, case: Case, device: str, home: Path | None) -> InputsFactory:
    """Return a function that returns a copy of the case's inputs at each call. They are built at the first call."""

    @functools.cache
    def made() -> dict[str, Any]:
        return make.build(pair, case, device, home=home)

    return lambda: make.clone(made())


def run(
    side: Side,
    pair: Pair,
    values: dict[str, Any],
    case: Case,
    gradients: bool,
    step_inputs: StepInputs,
    call_side: CallSide | None = None,
) -> Leaves:
    """Return the side's outputs on these inputs, which may be changed. For a stateful pair, `step_inputs`
    returns the inputs of each step.

    Raises PairError if the reference leaves global state changed, and GlobalStateChanged if another side does.
    """
    execution.poison(pair, values)
    with execution.settings_kept(side) as changed, execution.quiet(side):
        if pair.is_stateful and call_side is not None:
            leaves = call_side(execution.callable_of(side), pair, values, step_inputs)
        elif pair.is_stateful:
            states = execution.run_steps(execution.callable_of(side), pair, values, _steps(pair, case), step_inputs)
            leaves = execution.of_all_steps(states)
        elif call_side is not None:
            leaves = call_side(execution.callable_of(side), pair, values, case.seed)
        else:
            leaves = execution.run(execution.callable_of(side), pair, values, gradients=gradients, seed=case.seed)
    if changed:
        reference = side.call is as_side(pair.reference).call
        who = f"{pair.name}: the {'reference' if reference else 'optimized'} side"
        words = f"{next(iter(changed.values()))} for all that runs after it; put it back, or set it for both sides"
        raise PairError(f"{who} {words}") if reference else GlobalStateChanged(who, words)
    return leaves


def _steps(pair: Pair, case: Case) -> Sequence[int]:
    """Return the numbers of steps after which the states are compared."""
    most = case.steps if case.steps is not None else max(pair.steps)
    return [n for n in pair.steps if n <= most] or pair.steps[:1]


def upcast(step_inputs: StepInputs) -> StepInputs:
    """Return `step_inputs` with each step's inputs in float64."""
    return lambda i: make.upcast(step_inputs(i))


def copied(step_inputs: StepInputs) -> StepInputs:
    """Return `step_inputs` with a copy of each step's inputs."""
    return lambda i: make.clone(step_inputs(i))
