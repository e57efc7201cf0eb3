"""Ways of running the steps of a stateful pair that occur in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from perfsuite.correctness import equivalence, execution, side_calls, truths
from perfsuite.correctness.contexts.calling import (
    UNEVEN,
    call_in,
    hold,
    hold_anew,
    sizes_of_items,
    sizes_of_their_own,
    smaller,
    uneven,
)
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.correctness.rule import FEW, NONE
from perfsuite.correctness.side_calls import StepInputs
from perfsuite.correctness.truths import Discard, TruthFunction
from perfsuite.declare.pair import Pair
from perfsuite.declare.specs import EXPANDED, TensorSpec
from perfsuite.draws import inputs as make
from perfsuite.draws import memory_layouts
from perfsuite.draws.memory_layouts import with_layout
from perfsuite.errors import NotEquivalent

MANY_STEPS = 300
"""Number of steps that shows a fault which begins only after the steps that the equivalence proof compares."""
STEPS = (1, 2, 3, 5, 8, 13)
"""Steps after which states are compared here, up to the last of the pair's own steps. By step 13, a side that captures
a graph after some warm-up steps has captured it."""


def first_steps(probe: Probe) -> None:
    """Raise NotEquivalent if the first steps are wrong when they run in the usual way."""
    known = _known(probe)
    try:
        known(NONE)
    except Exception:  # Discard among others
        return
    equivalence.hold(probe.pair, known, call_in(probe, probe.side, _steps), name=probe.name)


def every_step(probe: Probe) -> None:
    """Keep the result of every step until the last one, as a caller may. No later step may write to it."""

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], step_inputs: StepInputs) -> Leaves:
        step = call(*values.values())
        returned = {i: step(*step_inputs(i).values()) for i in range(1, _steps_of(pair)[-1] + 1)}
        return {f"{name}{execution.after(i)}": leaf for i, r in returned.items() for name, leaf in execution.flatten(r)}

    hold_anew(probe, call_side, "where the results of its steps are kept")


def outside_changes(probe: Probe) -> None:
    """Write between the steps to the tensors that the steps change, as loading a checkpoint does."""

    moved: list[str] = []

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], step_inputs: StepInputs) -> Leaves:
        views = {path: tensor.view_as(tensor) for path, tensor in _stepped(pair, values)}

        def halved(i: int) -> dict[str, Any]:
            if i > 1:
                for tensor in views.values():
                    tensor.mul_(0.5)
            return step_inputs(i)

        leaves = _steps(call, pair, values, halved)
        now = {path: tensor.data_ptr() for path, tensor in _stepped(pair, values)}
        moved[:] = [path for path, view in views.items() if now.get(path) != view.data_ptr()]
        return leaves | {f"{path}, as seen by a view of it": tensor for path, tensor in views.items()}

    try:
        hold_anew(probe, call_side, "where its tensors are written to between steps")
    except NotEquivalent as error:
        call_in(probe, probe.side, call_side)  # the last call may have been the reference's
        if not moved:
            raise
        raise NotEquivalent(f"{error}; it moves {moved[0]} to other memory, where no view of it is") from None


def needing_gradients(probe: Probe) -> None:
    """Run the steps on tensors that need gradients, as parameters do. Buffers of modules never need them."""

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], step_inputs: StepInputs) -> Leaves:
        able = {path for name, value in values.items() for path, _ in make.tensors_in(value, name, buffers=False)}
        for path, tensor in _stepped(pair, values):
            if path in able:
                tensor.requires_grad_()
        with torch.enable_grad():
            return _steps(call, pair, values, step_inputs)

    hold_anew(probe, call_side, "where its tensors need gradients")


def same_step_tensors(probe: Probe) -> None:
    """Give every step the same tensors with other values in them, like gradient buffers that are reused."""

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], step_inputs: StepInputs) -> Leaves:
        held = step_inputs(1)

        def same(i: int) -> dict[str, Any]:
            if i > 1:
                make.copy_values(held, step_inputs(i))
            # In new lists, because a step may empty its own.
            return {name: make.regrouped(value) for name, value in held.items()}

        return _steps(call, pair, values, same)

    if probe.pair.step_inputs:
        words = "where every step gets the same tensors, with other values in them"
        # A reference that keeps these tensors gives other results here. The side is not compared then.
        hold(probe, call_side, words, known=_known(probe), reference_may_refuse=True)


def step_layouts(probe: Probe) -> None:
    """Give successive steps inputs in different memory layouts."""
    specs = {
        name: spec
        for name, spec in probe.pair.step_inputs.items()
        if isinstance(spec, TensorSpec) and name not in probe.pair.changed
    }
    allowed = {
        n: [x for x in memory_layouts.layouts(probe.pair, n, spec) if x not in EXPANDED] for n, spec in specs.items()
    }

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], step_inputs: StepInputs) -> Leaves:
        def laid_out(i: int) -> dict[str, Any]:
            built = step_inputs(i)
            for name, layouts in allowed.items():
                plain, layout = built[name].contiguous(), layouts[i % len(layouts)]
                built[name] = with_layout(plain, layout, specs[name].align)
            return built

        return _steps(call, pair, values, laid_out)

    if specs:
        hold_anew(probe, call_side, "where each input of its steps has another memory layout", refusable=True)


def step_sizes(probe: Probe) -> None:
    """Give every second step smaller inputs, like the last batch of an epoch."""
    specs = {name: spec for name, spec in probe.pair.step_inputs.items() if isinstance(spec, TensorSpec)}
    others = {name: spec for name, spec in probe.pair.step_inputs.items() if name not in specs}
    sizes = sizes_of_their_own(specs.values(), [probe.pair.inputs, others])

    for which in (0, 1) if sizes else ():

        def call_side(
            call: Callable[..., Any], pair: Pair, values: dict[str, Any], step_inputs: StepInputs, which: int = which
        ) -> Leaves:
            def some_smaller(i: int) -> dict[str, Any]:
                made = {n: smaller(v, specs[n], sizes) if n in specs else v for n, v in step_inputs(i).items()}
                return made if i % 2 == which else step_inputs(i)

            return _steps(call, pair, values, some_smaller)

        hold_anew(probe, call_side, "where the inputs of some steps are smaller", refusable=True)


def uneven_step_lists(probe: Probe) -> None:
    """Run the steps on lists whose tensors differ in size, as the parameters of a model do."""
    sizes = sizes_of_items(probe.pair)

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], step_inputs: StepInputs) -> Leaves:
        values.update(uneven(pair.inputs, values, sizes))
        return _steps(call, pair, values, lambda i: uneven(pair.step_inputs, step_inputs(i), sizes))

    if sizes:
        hold_anew(probe, call_side, UNEVEN, refusable=True)


def many_steps(probe: Probe) -> None:
    """Compare the state after MANY_STEPS steps, many more than the equivalence proof compares.

    Each replica costs twice as many steps of the reference, which may take minutes, so few of them are made.
    """
    pair = replace(probe.pair, steps=(MANY_STEPS,))
    known = truths.by_replicas(pair, probe.case, probe.device, most=1, gradients=False, home=probe.home)
    try:
        known(NONE)
    except Discard:
        return
    produced = side_calls.produce(pair, probe.side, probe.case, probe.device, gradients=False, home=probe.home)
    equivalence.hold(pair, known, produced, name=probe.name, enough=FEW)


def _steps(call: Callable[..., Any], pair: Pair, values: dict[str, Any], step_inputs: StepInputs) -> Leaves:
    return execution.of_all_steps(execution.run_steps(call, pair, values, _steps_of(pair), step_inputs))


def _known(probe: Probe) -> TruthFunction:
    return truths.by_replicas(probe.pair, probe.case, probe.device, gradients=False, home=probe.home, call_side=_steps)


def _steps_of(pair: Pair) -> list[int]:
    return [i for i in STEPS if i <= max(2, *pair.steps)]


def _stepped(pair: Pair, values: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every floating-point tensor that a step changes."""
    for name in sorted(pair.changed):
        if name in values:
            yield from ((p, t) for p, t in make.changing(pair, name, values[name]) if t.is_floating_point())
