"""Ways of calling that differ in the backward pass."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from perfsuite import faults
from perfsuite.correctness import execution, forms, incoming_gradients
from perfsuite.correctness.contexts.calling import (
    at_seldom_sizes,
    call_in,
    detached,
    differentiable,
    gradients_are_right,
    gradients_of,
    graph_of,
    hold,
    hold_anew,
    in_threads,
    on,
    sizes_line,
    truth_with_gradients,
    where_only,
)
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.correctness.rule import eps_of
from perfsuite.correctness.truths import Truth
from perfsuite.declare.pair import Pair
from perfsuite.declare.pair_fields import GRAD_OUTPUT
from perfsuite.declare.sides import as_side
from perfsuite.declare.specs import ModuleSpec, holds
from perfsuite.draws import inputs as make
from perfsuite.draws import memory_layouts
from perfsuite.draws.input_kinds import TRANSPOSED, drawn_tensors
from perfsuite.draws.memory_layouts import overlaps
from perfsuite.errors import in_one_line
from perfsuite.records import InputCase

MOST_ALONE = 4
"""The most differentiable inputs that are tried one at a time on one draw."""
GRAPHS = 4
"""Number of other calls whose autograd graphs are alive at the same time."""
RAISING = "torch::autograd::Error"
"""Name of the autograd node that torch inserts to refuse a second differentiation."""
SECOND_EPS = 4
"""Factor on eps for second derivatives. Those of two implementations of one formula differ more than its values do: by
up to 1.8 times the budget of the values."""


def one_gradient_needed(probe: Probe) -> None:
    """Call where only one of several inputs needs a gradient, and where all inputs except one need a gradient."""
    paths = differentiable(probe)
    if len(paths) < 2:
        return
    step = -(-len(paths) // MOST_ALONE)
    for path in paths[probe.case.seed % step :: step]:
        others = tuple(p for p in paths if p != path)
        _hold_some(probe, (path,), others, f"where only {path} needs a gradient")
        if len(others) > 1:
            _hold_some(probe, others, (path,), f"where all inputs but {path} need a gradient")


def two_gradients_needed(probe: Probe) -> None:
    """Call where at least two inputs need a gradient and at least two do not. Needs four differentiable inputs; the
    draw's seed chooses among them."""
    paths = differentiable(probe)
    if len(paths) < 4:
        return
    random_ = random.Random(probe.case.seed)
    some = random_.sample(paths, random_.randint(2, len(paths) - 2))
    others = tuple(path for path in paths if path not in some)
    _hold_some(probe, some, others, f"where only {' and '.join(some)} need a gradient")


def _hold_some(probe: Probe, marked: Collection[str], others: Collection[str], words: str) -> None:
    call_side = functools.partial(where_only, only=marked, differentiate=True)
    known = functools.partial(truth_with_gradients, probe, {f"gradient of {path}" for path in others})
    hold(probe, call_side, words, known=known)


def some_outputs_used(probe: Probe) -> None:
    """Run a backward pass from at least two outputs, but not from all. Needs at least three outputs."""
    if not differentiable(probe) or len(incoming_gradients.real_of(probe.truth().reference)) < 3:
        return

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        leaves, _, marked, _ = graph_of(call, pair, values, seed)
        real, random_ = incoming_gradients.real_of(leaves), random.Random(seed)
        some = random_.sample(list(real), random_.randint(2, len(real) - 1))
        used = {name: real[name] for name in some if real[name].requires_grad}  # on one side an output may need none
        weights = incoming_gradients.for_outputs(used, seed, pair.output_dtype)
        return gradients_of(leaves, list(used.values()), marked, weights)

    hold_anew(probe, call_side, "where only some of its outputs are used")


def second_backward(probe: Probe) -> None:
    """Run two backward passes through one retained graph, with different incoming gradients. The second one is
    compared."""
    if not differentiable(probe) or set(probe.pair.consumes) - {GRAD_OUTPUT}:
        return

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        leaves, outputs, marked, weights = graph_of(call, pair, values, seed)
        given = list(marked.values())
        # A side that keeps values computed from these gives wrong gradients in the second pass.
        others = incoming_gradients.drawn(leaves, seed + 1, pair.output_dtype)[1]
        torch.autograd.grad(outputs, given, others, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(outputs, given, weights, allow_unused=True)
        return detached(leaves) | {f"gradient of {p}": g for p, g in zip(marked, again, strict=True)}

    known = functools.partial(truth_with_gradients, probe, set())
    hold(probe, call_side, "in a second backward pass with retain_graph=True", known=known, refusable=True)


def written_gradients(probe: Probe) -> None:
    """Write to a gradient that a backward pass returned, as gradient clipping does. Neither the other gradients nor
    those of a second pass through the same graph may change. Incoming gradients are all 1, as those of a sum, or all
    0."""
    if not differentiable(probe) or set(probe.pair.consumes) - {GRAD_OUTPUT}:
        return
    if second_backward.__name__ in probe.pair.unsupported or not incoming_gradients.are_ordinary(probe.case):
        return
    for value in (0, 1):
        _hold_written(probe, value)


def _hold_written(probe: Probe, value: int) -> None:
    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        _, outputs, marked, weights = graph_of(call, pair, values, seed)
        given, weights = list(marked.values()), [torch.full_like(w, value) for w in weights]
        names = [f"gradient of {path}" for path in marked]
        first = torch.autograd.grad(outputs, given, [w.clone() for w in weights], retain_graph=True, allow_unused=True)
        before = execution.copies_of(dict(zip(names, first, strict=True)))
        written = next((g for g in first if g is not None and not overlaps(g)), None)
        if written is not None:
            written.add_(1)
        after = {n: b if g is written else g for (n, b), g in zip(before.items(), first, strict=True)}
        again = torch.autograd.grad(outputs, given, weights, allow_unused=True)
        later = {f"{n} in a second pass": g for n, g in zip(names, again, strict=True)}
        return execution.copies_of(after) | later

    words = f"when a returned gradient is written to, where the incoming ones are {value}"
    hold_anew(probe, call_side, words, refusable=True, reference_may_refuse=True)


def saved_tensor_hooks(probe: Probe) -> None:
    """Run a backward pass where hooks replace each saved tensor with a contiguous copy, as
    torch.autograd.graph.save_on_cpu does. Inputs are transposed if the pair allows that layout."""
    if not differentiable(probe) or probe.pair.consumes:
        return
    laid_out = dict(probe.case.inputs)
    for name, spec in drawn_tensors(probe.pair).items():
        if TRANSPOSED in memory_layouts.layouts(probe.pair, name, spec):
            laid_out[name] = replace(laid_out.get(name, InputCase()), layout=TRANSPOSED)
    probe = on(probe, replace(probe.case, inputs=laid_out))
    try:
        if not probe.answers_rightly() or not gradients_are_right(probe):
            return  # the equivalence and gradients proofs report it
    except Exception:  # those proofs report this, too
        return

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            graph = graph_of(call, pair, values, seed)
            return gradients_of(*graph)

    known = functools.partial(truth_with_gradients, probe, set())
    hold(
        probe,
        call_side,
        "where saved_tensors_hooks give contiguous copies of what it saves",
        known=known,
        refusable=True,
    )


def backward_in_other_thread(probe: Probe) -> None:
    """Run the backward pass in another thread than the call."""
    if not differentiable(probe):
        return

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        (found,) = in_threads([functools.partial(gradients_of, *graph_of(call, pair, values, seed))])
        return found

    known = functools.partial(truth_with_gradients, probe, set())
    hold(probe, call_side, "in a backward pass in another thread", known=known)


def two_graphs(probe: Probe) -> None:
    """Run a backward pass after other calls, as where a layer is used several times. In the other calls all inputs, or
    all except one, have other values, and their backward passes come later. Before all of these, one call with the same
    values runs with its own backward pass."""
    if not differentiable(probe):
        return
    others = [probe.drawn(probe.other_case(number)) for number in range(GRAPHS)]
    kept = {n: spec for n, spec in probe.pair.inputs.items() if n not in probe.pair.changed}
    # Modules first, so that no call with another module comes between the calls that share one.
    names = sorted(kept, key=lambda name: not holds(kept[name], ModuleSpec))

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        _, *same = graph_of(call, pair, make.clone(values), seed + 1)
        gradients_of({}, *same)
        graph = graph_of(call, pair, values, seed)
        beside = []
        for number, other in enumerate(others):
            given = make.clone(other)
            if len(names) > 1 and number % 2 == 0:  # share one input, like the weights of a reused layer
                shared = names[number // 2 % len(names)]
                given[shared] = values[shared]
            beside.append(graph_of(call, pair, given, seed))
        found = gradients_of(*graph)
        for other in beside:
            gradients_of(*other)
        return found

    known = functools.partial(truth_with_gradients, probe, set())
    hold(probe, call_side, "in a backward pass that comes after another call, and before theirs", known=known)


def nan_gradients(probe: Probe) -> None:
    """Run a backward pass with incoming gradients that are NaN, as after a scaled loss has overflowed. Each gradient
    must show it to a gradient scaler: it may not be finite where the reference's is not. A gradient of zeros is left
    out, because a side may return it without reading the incoming ones."""
    if not differentiable(probe):
        return

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        leaves, outputs, marked, weights = graph_of(call, pair, values, seed)
        found = gradients_of(leaves, outputs, marked, [torch.full_like(weight, math.nan) for weight in weights])
        gradients = {n: found[n] for n in (f"gradient of {path}" for path in marked)}
        return {n: not isinstance(g, torch.Tensor) or bool(g.isfinite().all()) for n, g in gradients.items()}

    try:
        read = _nonzero_gradients(probe.truth(gradients=True))
        expected = call_in(probe, as_side(probe.pair.reference), call_side)
    except Exception:  # Discard among others
        return
    try:
        found = call_in(probe, probe.side, call_side)
    except Exception as error:
        if faults.is_of_device(error):
            return
        raise probe.fault(
            f"raises {in_one_line(error)} in a backward pass whose incoming gradients are NaN, unlike the reference"
        ) from None
    for name in read:
        if found[name] and not expected[name]:
            raise probe.fault(
                f"gives a finite {name} where the incoming gradients are NaN, unlike the reference: what watches for "
                f"an overflow, as a gradient scaler does, does not see it"
            )


def _nonzero_gradients(truth: Truth) -> list[str]:
    """Return the names of the gradients that have a finite element other than 0, apart from rounding errors."""
    return [
        name
        for name, leaf in truth.leaves.items()
        if name.startswith("gradient of ")
        and isinstance(leaf, torch.Tensor)
        and bool((leaf.isfinite() & (leaf != 0)).any())
        and name not in truth.rounding
        and name not in truth.terms
    ]


def inputs_with_graphs(probe: Probe) -> None:
    """Call with inputs that are outputs of other operations, as the inputs of a layer are. The side may not write to
    them."""
    names = [n for n in execution.differentiable(probe.pair) if not holds(probe.pair.inputs[n], ModuleSpec)]
    if not differentiable(probe) or not names or probe.pair.changed:
        return

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        marked = execution.require_gradients(pair, values)
        with torch.enable_grad():
            given = {n: make.map_tensors(v, _with_graph) if n in names else v for n, v in values.items()}
            leaves = execution.with_changed(pair, given, call(*given.values()))
        for name in names:
            for (path, tensor), (_, before) in zip(
                make.tensors_in(given[name], name), make.tensors_in(values[name], name), strict=True
            ):
                if not forms.identical(tensor, before):
                    raise probe.fault(f"changes its input {path} in place where it is the output of another operation")
        outputs, weights = incoming_gradients.drawn(leaves, seed, pair.output_dtype)
        return gradients_of(leaves, outputs, marked, weights)

    known = functools.partial(truth_with_gradients, probe, set())
    hold(probe, call_side, "where its inputs are outputs of other operations", known=known)


def _with_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is the output of an operation if the tensor needs a gradient, and the tensor itself
    otherwise."""
    return tensor.clone() if tensor.requires_grad else tensor


def double_backward(probe: Probe) -> None:
    """Differentiate the side's gradients with respect to its inputs and to the incoming gradients."""
    if not differentiable(probe):
        return

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        leaves, outputs, marked, weights = graph_of(call, pair, values, seed)
        given, differentiate = list(marked.values()), functools.partial(torch.autograd.grad, create_graph=True)
        first = differentiate(outputs, given, weights, allow_unused=True)
        if not all(g is None or g.requires_grad for g in first) or _refuses(first):
            raise RuntimeError("a gradient without a graph: it cannot be differentiated, and says so")
        # Only now do the incoming gradients need a gradient. Before, they alone would have given a graph to a side that
        # refuses by returning gradients without a graph.
        if pair.output_dtype is None:  # otherwise the incoming gradients of both sides differ in dtype
            weights = [weight.detach().clone().requires_grad_() for weight in weights]
            first = differentiate(outputs, given, weights, allow_unused=True)
        else:
            weights = []
        named = {f"gradient of {p}": g for p, g in zip(marked, first, strict=True) if g is not None}
        again, directions = incoming_gradients.drawn(named, seed)
        real = incoming_gradients.real_of(leaves)
        names = [name for name, output in real.items() if output.requires_grad]
        by = {**marked, **{f"incoming gradient of {n}": w for n, w in zip(names, weights, strict=bool(weights))}}
        second: Any = [None] * len(by)
        if again:
            second = torch.autograd.grad(again, list(by.values()), directions, allow_unused=True)
        # A constant has no graph, and its derivative is 0.
        found = {f"second derivative of {p}": g for p, g in zip(by, second, strict=True)}
        found |= {f"gradient of {p} with create_graph": g for p, g in zip(marked, first, strict=True)}
        likes = [*by.values(), *given]
        if weights:  # an output that needs a gradient on the other side alone is a constant here
            constants = {f"second derivative of incoming gradient of {n}": real[n] for n in real if n not in names}
            found |= dict.fromkeys(constants)
            likes += constants.values()
        return {n: torch.zeros_like(x) if g is None else g for (n, g), x in zip(found.items(), likes, strict=True)}

    eps = SECOND_EPS * eps_of(probe.pair.precision or probe.case.dtype)
    hold(probe, call_side, "when its gradients are differentiated once more", eps=eps, refusable=True)


def _refuses(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Return whether a backward pass through the graph of these gradients would raise, as with once_differentiable.

    torch.autograd.grad may stop before the node that raises, and return None as the gradient instead.
    """
    left = [g.grad_fn for g in gradients if g is not None and g.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if node.name() == RAISING:
            return True
        found = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= found
        left += found
    return False


def changed_before_backward(probe: Probe) -> None:
    """Write to the inputs, or to the outputs, between the call and the backward pass.

    torch raises if the backward pass needs the overwritten values. A side must raise, too, or else return the
    gradients of the call. Outputs in the memory of an input, and that input, are not written to: torch gives such views
    another graph then, in which some layouts of the input lose its gradient.
    """
    if not differentiable(probe) or probe.pair.consumes:
        return
    known = functools.partial(truth_with_gradients, probe, set())
    for what in ("inputs", "outputs"):

        def call_side(
            call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int, what: str = what
        ) -> Leaves:
            leaves, outputs, marked, weights = graph_of(call, pair, values, seed)
            kept = execution.copies_of(detached(leaves))
            shared = _in_one_memory(pair, leaves, values)
            inputs = {name: value for name, value in values.items() if name not in pair.changed}
            written = inputs if what == "inputs" else leaves
            for _, tensor in make.tensors_in({n: v for n, v in written.items() if n not in shared}):
                if (tensor.is_floating_point() or tensor.is_complex()) and not overlaps(tensor):
                    tensor.detach().add_(1)
            return gradients_of(kept, outputs, marked, weights)

        words = f"where its {what} are written to before the backward pass, and does not refuse it"
        hold(probe, call_side, words, known=known, refusable=True, reference_may_refuse=True)


def _in_one_memory(pair: Pair, leaves: Leaves, values: Mapping[str, Any]) -> set[str]:
    """Return the names of the outputs and the inputs of which an output is in the memory of an input."""
    found = execution.shared_memory(pair, leaves, values)
    prefix = execution.INPUT
    return {name for both in found if both[1].startswith(prefix) for name in (both[0], both[1].removeprefix(prefix))}


def after_calls_without_gradients(probe: Probe) -> None:
    """Compute gradients after a call under torch.inference_mode(), which is the first call at these sizes, and a call
    under torch.no_grad()."""
    if not differentiable(probe) or probe.pair.changed or probe.pair.consumes:
        return
    first = at_seldom_sizes(probe)
    if any(True for _ in make.generators_in(list(first.drawn().values()))):
        return

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        with torch.inference_mode():
            call(*make.clone(values).values())
        with torch.no_grad():
            call(*values.values())
        return gradients_of(*graph_of(call, pair, values, seed))

    known = functools.partial(truth_with_gradients, first, set())
    words = f"with gradients after calls under inference_mode() and no_grad() at {sizes_line(first)}"
    hold(first, call_side, words, known=known)
