"""Ways of calling that differ in the forward pass."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from perfsuite.correctness import execution
from perfsuite.correctness.contexts.calling import (
    UNEVEN,
    at_seldom_sizes,
    call_in,
    detached,
    differentiable,
    error_name,
    gradients_of,
    graph_of,
    hold,
    hold_anew,
    in_threads,
    judge,
    on,
    plainly,
    sizes_line,
    sizes_of_items,
    uneven,
    where_only,
)
from perfsuite.correctness.execution import Leaves
from perfsuite.correctness.integrity.probe import Probe, same_leaf
from perfsuite.correctness.rule import eps_of
from perfsuite.correctness.side_calls import CallSide
from perfsuite.correctness.truths import Discard
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.declare.specs import ListSpec, Size, TensorSpec
from perfsuite.draws import inputs as make
from perfsuite.draws.cases import SMALL_HIGH
from perfsuite.draws.tensor_values import dtype_of
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case
from perfsuite.state import process_state

THREAD_CALLS = 3
HALF = (torch.bfloat16, torch.float16)
MOST_REWRITTEN = 1 << 13
"""The most elements that all inputs together may have to be tried by `rewritten_inputs`."""
MOST_SHARED = 3
"""With three or more inputs of one kind, the most combinations of two of them that are tried as one tensor."""
REWRITTEN = "where its inputs get other values after a call"


def inference_mode(probe: Probe) -> None:
    """Call under torch.inference_mode(), with inputs made before it and with inputs made inside it."""
    for inside, words in ((False, "under torch.inference_mode()"), (True, "on inputs made under inference_mode()")):

        def call_side(
            call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int, inside: bool = inside
        ) -> Leaves:
            with torch.inference_mode():
                given = make.clone(values) if inside else values
                return execution.copies_of(execution.with_changed(pair, given, call(*given.values())))

        hold(probe, call_side, words)


def no_gradient_needed(probe: Probe) -> None:
    """Call with grad mode on where no input needs a gradient. Compare the outputs, and whether they need a gradient."""
    call_side = functools.partial(where_only, only=())
    hold(probe, call_side, "with grad mode on where no input needs a gradient", reference_first=True)


def grad_mode_off(probe: Probe) -> None:
    """Call with grad mode off where the inputs need gradients, as when a model is evaluated."""
    if not differentiable(probe):
        return

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        execution.require_gradients(pair, values)
        return plainly(call, pair, values, seed)

    hold(probe, call_side, "with grad mode off where its inputs need gradients")


def other_thread(probe: Probe) -> None:
    """Call in a new thread."""

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        (leaves,) = in_threads([functools.partial(plainly, call, pair, values, seed)])
        return leaves

    hold(probe, call_side, "in another thread")


def two_threads(probe: Probe) -> None:
    """Call in two threads at the same time, each with inputs of its own."""
    cases = (probe.case, probe.other_case())
    try:
        for case in cases:
            probe.truth(case)
    except Discard:
        return
    if not probe.is_right(probe.call(probe.drawn(cases[1]), cases[1]), cases[1]):
        return  # a plain call is wrong: the equivalence proof reports it
    words = "when two threads call it at the same time"
    try:
        both = _at_the_same_time(probe, probe.side, cases)
    except Exception as error:
        fault = probe.fault(f"raises {error_name(error)} {words}")
    else:
        try:
            for case, answers in zip(cases, both, strict=True):
                for produced in answers:
                    judge(probe, functools.partial(probe.truth, case), produced, words)
            return
        except NotEquivalent as error:
            fault = error
    try:
        _at_the_same_time(probe, as_side(probe.pair.reference), cases)
    except Exception:  # the reference does not support it
        return
    raise fault


def _at_the_same_time(probe: Probe, side: Side, cases: Sequence[Case]) -> list[list[Leaves]]:
    """Start one thread for each case, and call the side THREAD_CALLS times in each, at the same time.

    Return the answers of each thread, in the order of the cases.
    """
    call = execution.callable_of(side)
    jobs = [[probe.drawn(case) for _ in range(THREAD_CALLS)] for case in cases]
    together = threading.Barrier(len(jobs), timeout=60)

    def work(drawn: list[dict[str, Any]]) -> list[Leaves]:
        answers = []
        try:
            for values in drawn:
                together.wait()
                answers.append(plainly(call, probe.pair, values, probe.case.seed))
        except BaseException:
            together.abort()  # otherwise the other threads would wait for this one
            raise
        return answers

    for drawn in jobs:
        for values in drawn:
            execution.poison(probe.pair, values)
    # A setting may be left changed if one thread saves it while another has changed it. That is no fault of the side.
    with execution.quiet(side), process_state.kept():
        return in_threads([functools.partial(work, drawn) for drawn in jobs])


def autocast(probe: Probe) -> None:
    """Call under torch.autocast to bfloat16 and to float16, also under inference mode, and with a backward pass outside
    the autocast block. The outputs must have the dtypes and the precision of the reference's outputs there."""
    for dtype in HALF:
        _autocast(probe, dtype)


def _autocast(probe: Probe, dtype: torch.dtype) -> None:
    device = torch.device(probe.device).type
    needing = bool(differentiable(probe))  # as the weights of a model do when it is evaluated

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        if needing:
            execution.require_gradients(pair, values)
        with torch.autocast(device, dtype=dtype):
            return plainly(call, pair, values, seed)

    reference = as_side(probe.pair.reference)
    try:
        plain = call_in(probe, reference, plainly)
        under = call_in(probe, reference, call_side)
    except Exception:
        return
    lower = any(not same_leaf(plain.get(name), leaf) for name, leaf in under.items())
    words, own = f"under torch.autocast({device!r}, {dtype})", eps_of(probe.pair.precision or probe.case.dtype)
    eps = max(torch.finfo(dtype).eps, own) if lower else None
    hold(probe, call_side, words, eps=eps)
    if inference_mode.__name__ not in probe.pair.unsupported:

        def inference(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
            with torch.inference_mode(), torch.autocast(device, dtype=dtype):
                return execution.copies_of(execution.with_changed(pair, values, call(*values.values())))

        hold(probe, inference, f"{words} and inference_mode()", eps=eps)
    if not differentiable(probe):
        return

    def backward(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        with torch.autocast(device, dtype=dtype):
            graph = graph_of(call, pair, values, seed)
        return gradients_of(*graph)

    hold(probe, backward, f"in a backward pass after a call {words}", eps=eps)


def after_other_dtype(probe: Probe) -> None:
    """Call after a call in another dtype, which is the first call at these sizes: values that the side caches then may
    have the wrong precision."""
    others = [dtype for dtype in probe.pair.dtypes if dtype != probe.case.dtype]
    if not others or probe.pair.changed:
        return
    first, other = at_seldom_sizes(probe), dtype_of(others[-1])

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        own = {t.dtype for n, t in make.tensors_in(values) if t.is_floating_point()}
        before = make.map_tensors(values, lambda t: t.to(other) if len(own) == 1 and t.dtype in own else t.clone())
        plainly(call, pair, before, seed)
        return plainly(call, pair, values, seed)

    hold(first, call_side, f"after a call in {others[-1]} at {sizes_line(first)}")


def other_default_dtype(probe: Probe) -> None:
    """Call while torch's default dtype is bfloat16, as where a model is built in bfloat16. Tensors that a side creates
    without a dtype are then less precise. A pair whose reference depends on the default dtype is skipped."""

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return plainly(call, pair, values, seed)
        finally:
            torch.set_default_dtype(before)

    reference = probe.of_reference()
    try:
        if not reference.is_right(call_in(reference, reference.side, call_side)):
            return
    except Exception:  # the reference does not support it
        return
    hold(probe, call_side, "while torch's default dtype is bfloat16")


def uncounted_writes(probe: Probe) -> None:
    """Call after other values were written to the inputs without a change of torch's version counters, as writes
    through `.data` and by custom kernels do."""
    if probe.pair.changed:
        return
    before, after = probe.drawn(), on(probe, probe.other_case())
    if not after.answers_rightly():
        return  # a plain call is wrong on it: the equivalence proof reports it

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        held = make.clone(before)
        plainly(call, pair, held, seed)
        make.copy_values(held, values, counted=False)
        return plainly(call, pair, held, seed)

    hold(after, call_side, "where its inputs were written to past torch's counters of versions, as .data does")


def rewritten_inputs(probe: Probe) -> None:
    """Call again after other values were written to the inputs, as an optimizer does to weights. This is tried under
    inference mode, under autocast, and with parameters that need gradients. The outputs of the first call may not
    change."""
    if probe.pair.changed:
        return
    before, after = probe.drawn(), on(probe, probe.other_case())
    if sum(tensor.numel() for _, tensor in make.tensors_in(before)) > MOST_REWRITTEN:
        return  # a large draw would find nothing else
    if not after.answers_rightly():
        return  # a plain call is wrong on it: the equivalence proof reports it
    device, half = torch.device(probe.device).type, torch.bfloat16
    modes: dict[str, tuple[Callable[[], Any], float | None]] = {}
    if inference_mode.__name__ not in probe.pair.unsupported:
        modes["under torch.inference_mode()"] = torch.inference_mode, None
    if autocast.__name__ not in probe.pair.unsupported:
        modes["under autocast"] = functools.partial(torch.autocast, device, dtype=half), torch.finfo(half).eps
    if differentiable(probe):
        modes["and they are parameters that need gradients"] = torch.enable_grad, None
        modes["and they are parameters that need gradients, with grad mode off"] = torch.no_grad, None
    for words, (mode, eps) in modes.items():
        call_side = _rewriting(probe, before, mode, words)
        hold_anew(after, call_side, f"{REWRITTEN} {words}", eps=eps)


def _rewriting(probe: Probe, before: dict[str, Any], mode: Callable[[], Any], words: str) -> CallSide:
    """Return a function that calls a side in this mode on the values `before`, and then on the draw's values, which
    are written into the same tensors."""
    training, parameters = mode is torch.enable_grad, mode in (torch.enable_grad, torch.no_grad)

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        held = make.clone(values)
        make.copy_values(held, before)
        if parameters:
            held = {n: torch.nn.Parameter(v) if n in _parameters(pair) else v for n, v in held.items()}
        with torch.set_grad_enabled(training), mode():
            first = detached(execution.with_changed(pair, held, call(*held.values())))
        kept = execution.copies_of(first)
        make.copy_values(held, values)
        with torch.set_grad_enabled(training), mode():
            if training:
                second = gradients_of(*graph_of(call, pair, held, seed))
            else:
                second = execution.copies_of(execution.with_changed(pair, held, call(*held.values())))
        # This is raised, too, if the reference returns views of its inputs. Then nothing is compared.
        for name, leaf in first.items():
            if not same_leaf(leaf, kept[name]):
                raise probe.fault(f"changes {name} that it returned, {REWRITTEN} {words}")
        return second

    return call_side


def _parameters(pair: Pair) -> list[str]:
    """Return the differentiable inputs that are single tensors, and so can be parameters."""
    return [name for name in execution.differentiable(pair) if isinstance(pair.inputs[name], TensorSpec)]


def one_tensor(probe: Probe) -> None:
    """Call with one tensor as several inputs of the same kind, as the query and the keys of self-attention. Also call
    with one tensor as two items of a list."""
    found = _of_one_kind(probe.pair, probe.case)
    if probe.pair.is_stateful:
        return
    if found is not None:
        names, case = found
        _hold_shared(on(probe, case), names)
        some = list(itertools.combinations(names, 2)) if len(names) > 2 else []
        for both in random.Random(case.seed).sample(some, min(len(some), MOST_SHARED)):
            _hold_shared(on(probe, case), both)
    for name, spec in probe.pair.inputs.items():
        if isinstance(spec, ListSpec) and name not in probe.pair.changed:
            _hold_tied(probe, name)


def _hold_shared(probe: Probe, names: Sequence[str]) -> None:
    """Call with one tensor for all these inputs."""
    first, *others = names
    with_gradients = bool(differentiable(probe))

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        if any(values[name].shape != values[first].shape for name in others):
            raise ValueError("not of one shape")
        shared = values | dict.fromkeys(others, values[first])
        if with_gradients:
            return gradients_of(*graph_of(call, pair, shared, seed))
        return plainly(call, pair, shared, seed)

    hold_anew(probe, call_side, f"where {' and '.join(names)} are one tensor")


def _hold_tied(probe: Probe, name: str) -> None:
    """Call with one tensor as the first and the last item of a list, as with tied weights."""
    with_gradients = bool(differentiable(probe))

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        first, *_, last = items = list(values[name])
        if not isinstance(first, torch.Tensor) or first.shape != last.shape or first is last:
            raise ValueError("not of one shape")
        tied = values | {name: type(values[name])([*items[:-1], first])}
        if with_gradients:
            return gradients_of(*graph_of(call, pair, tied, seed))
        return plainly(call, pair, tied, seed)

    hold_anew(probe, call_side, f"where two tensors of {name} are one")


def uneven_lists(probe: Probe) -> None:
    """Call with lists whose tensors differ in size, as the parameters of a model do."""
    sizes, with_gradients = sizes_of_items(probe.pair), bool(differentiable(probe))

    def call_side(call: Callable[..., Any], pair: Pair, values: dict[str, Any], seed: int) -> Leaves:
        given = uneven(pair.inputs, values, sizes)
        return gradients_of(*graph_of(call, pair, given, seed)) if with_gradients else plainly(call, pair, given, seed)

    if sizes:
        hold_anew(probe, call_side, UNEVEN, refusable=True)


def _of_one_kind(pair: Pair, case: Case) -> tuple[list[str], Case] | None:
    """Return (inputs of one kind, the case with sizes at which they have the same shape), or None if no two inputs are
    of one kind or the pair does not allow such sizes."""
    kinds: dict[Any, list[str]] = {}
    for name, spec in pair.inputs.items():
        if isinstance(spec, TensorSpec) and spec.dims and name not in pair.changed:
            kinds.setdefault((spec.values, spec.dtype, len(spec.dims), spec.differentiable), []).append(name)
    several = [names for names in kinds.values() if len(names) > 1]
    if not several:
        return None
    names, sizes = several[case.seed % len(several)], dict(case.sizes)
    specs = [spec for name, spec in pair.inputs.items() if name in names and isinstance(spec, TensorSpec)]
    for dims in zip(*(spec.dims for spec in specs), strict=True):
        for symbol in (dim for dim in dims if dim in pair.symbols and isinstance(dim, str)):
            sizes[symbol] = sizes[dims[0]] if dims[0] in sizes else sizes[symbol]
    bounds = {symbol: pair.size_of(symbol) or Size(high=SMALL_HIGH) for symbol in pair.symbols}
    if not all(size.allows(sizes[symbol]) for symbol, size in bounds.items()) or not pair.allows(sizes):
        return None
    return names, replace(case, sizes=sizes)
