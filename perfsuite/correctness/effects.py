"""Compare the side effects of a call of the optimized side with those of a call of the reference.

Each kind of effect is a function (probe of a side) → {name: words}. An effect that the optimized side has and the
reference does not have is a fault. Effects of the very first call are detected around the first calls in the proofs
(`execution.settings_kept`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from perfsuite.correctness import execution, held_memory, incoming_gradients, proofs
from perfsuite.correctness.integrity.probe import Probe, bytes_of, same_leaf
from perfsuite.declare import modules
from perfsuite.declare.pair import Pair
from perfsuite.declare.pair_fields import GRAD_OUTPUT
from perfsuite.declare.sides import as_side
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case
from perfsuite.state import patches, process_state, properties, python_state

Effects: TypeAlias = dict[str, str]
"""Name of an effect → the words that follow "the optimized side" in a message about it."""
Kind: TypeAlias = Callable[[Probe], Effects]

BUSY_S, BUSY_SHARE, WINDOWS = 0.04, 0.2, 3
"""A thread is busy if it uses CPU time for BUSY_SHARE of each of WINDOWS consecutive windows of BUSY_S seconds. The
share is far below 1, because a busy thread may have to wait for a core."""
IDLE_S = 0.02
"""Seconds for which the threads of a pool may spin after a call, waiting for more work."""
THREADS_EVERY = 5
"""Other threads are watched on one of this many draws, since it takes time and depends little on the draw."""
STILL = "still "
"""Prefix of the names of generators that a call does not advance."""
SWITCH_INTERVAL_S = 1e-4
"""Python's thread switch interval in seconds while threads are watched."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds of a clock tick, the unit of CPU times in /proc."""


def check(
    pair: Pair,
    case: Case,
    device: str,
    *,
    home: Path | None = None,
    imported: Mapping[str, str] = {},
    number: int | None = None,
) -> None:
    """Raise NotEquivalent if the optimized side has a side effect that the reference does not have.

    imported  setting that the import of the pair's module left changed → words about it
    number    the draw's number in a proof with several draws. All checks run on the first draw. Each of the checks
              IN_TURN runs on only some of the later draws, and other threads are watched on one draw in THREADS_EVERY
    """
    for words in imported.values():
        raise NotEquivalent(f"{pair.name}: the import of its module {words} for all that runs after it; put it back")

    # Building a module draws random numbers, so inputs are built before any side is watched.
    inputs: dict[int, dict[str, Any]] = {}
    optimized, reference = (
        Probe(
            pair=pair, side=as_side(side), name=name, case=case, device=device, home=home, number=number, inputs=inputs
        )
        for name, side in (("optimized", pair.optimized), ("reference", pair.reference))
    )
    try:
        reference.call(reference.drawn())
    except Exception:  # the reference does not support the draw
        return
    with execution.recompiling():
        for kind in KINDS:
            if not proofs.has_turn(kind, IN_TURN, number or None):
                continue
            with process_state.kept(quick=True):
                found = kind(optimized)
            if not found:
                continue
            try:
                left = kind(reference)
            except Exception:  # the reference does not support the way in which this kind calls it
                continue
            allowed = _allowed(kind, found, left)
            for name, words in found.items():
                if name not in allowed:
                    raise optimized.fault(f"{words}, which the reference does not")


def _allowed(kind: Callable[[Probe], Effects], found: Effects, left: Effects) -> Collection[str]:
    """Return which of the effects `found` the optimized side may have if the reference has those in `left`."""
    if kind is threads:
        # Threads of the optimized side still run, so `left` contains them. The reference leaves threads of its own only
        # if there are others.
        return found if left.keys() - found.keys() else ()
    if kind is named_generators:
        # If the reference does not advance a generator, as dropout with p = 0, the optimized side may advance it.
        still = tuple(f"{name.removeprefix(STILL)} " for name in left if name.startswith(STILL))
        return {*left, *(name for name in found if name.startswith(still))}
    return left


# --- changes that affect later code ---------------------------------------------------------------------------------


def settings(probe: Probe) -> Effects:
    """Return the changes of torch's settings, modes, hooks and functions, and of Python's settings for the process,
    such as garbage collection, trace functions and the working directory."""
    with process_state.kept() as changed:
        _call_and_differentiate(probe)
    return {name: f"{words} for all that runs after it" for name, words in changed.items()}


def process(probe: Probe) -> Effects:
    """Return the changes of environment variables, signal handlers, warning filters and the like (`python_state`) by a
    call that is not the first."""
    quick = bool(probe.number)
    with python_state.kept(quick=quick):
        _call_and_differentiate(probe)  # modules imported by the first call may change them too
    with python_state.kept(quick=quick) as changed:
        _call_and_differentiate(probe)
    return {name: f"changes {name} for all that runs after it" for name in changed}


def generators(probe: Probe) -> Effects:
    """Return the changes of random number generators that are not among the inputs."""
    with process_state.advanced_generators():
        before = process_state.generators()
        _call_and_differentiate(probe)
        after = process_state.generators()
    return {name: f"advances or sets {name}" for name in after if after[name] != before.get(name, after[name])}


def named_generators(probe: Probe) -> Effects:
    """Return the state of each generator among the inputs after the call, or after the steps. A generator that is left
    as it was has its own name, because the next call would draw the same numbers."""
    values = probe.drawn()
    before = {n: v.get_state() for n, v in values.items() if isinstance(v, torch.Generator)}
    if not before:
        return {}
    probe.call(values)
    found = {}
    for name, state in before.items():
        after = values[name].get_state()
        if torch.equal(after, state):
            found[f"{STILL}{name}"] = f"leaves {name} as it was, so that the next call draws the same numbers again"
        else:
            end = f"{name} in state {hash(after.numpy().tobytes())}"
            found[end] = (
                f"leaves {name} in another state, by more or fewer numbers drawn from it; what comes next differs"
            )
    return found


def bindings(probe: Probe) -> Effects:
    """Return the objects that the call replaced and that the reference's code looks up by name, such as helpers and
    constants, including items of lists and dicts."""
    reference = as_side(probe.pair.reference).call
    before = patches.bindings(reference)
    _call_and_differentiate(probe)
    after = patches.bindings(reference)
    return {
        name: f"replaces {name}, which the reference uses"
        for name, value in before.items()
        if not patches.is_same_binding(value, after.get(name))
    }


def threads(probe: Probe) -> Effects:
    """Return the threads that continue to compute after a call."""
    if (probe.number or 0) % THREADS_EVERY:
        return {}
    _call_and_differentiate(probe)
    with _short_switch_interval():
        before = _ticks()
        time.sleep(IDLE_S)
        busy = {n for n, ticks in _ticks().items() if ticks > before.get(n, 0)} - {threading.get_native_id()}
        for _ in range(WINDOWS):
            if not busy:
                return {}
            first = _ticks()
            time.sleep(BUSY_S)
            last = _ticks()
            busy = {n for n in busy if (last.get(n, 0) - first.get(n, 0)) * TICK_S >= BUSY_SHARE * BUSY_S}
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
    return {f"thread {n}": f"leaves a thread computing ({names.get(n, 'not one of Python')})" for n in busy}


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Shorten Python's thread switch interval in the block. A busy thread holds the GIL for a whole interval whenever a
    file is read here, so with the default interval, watching would take longer than the thread lives."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _ticks() -> dict[int, int]:
    """Return the CPU time of each thread of this process in clock ticks, by thread id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the thread has ended
            continue
        found[int(task.name)] = int(fields[11]) + int(fields[12])
    return found


def _call_and_differentiate(probe: Probe) -> None:
    probe.call(probe.drawn())
    if _is_differentiated(probe):
        values = probe.drawn()
        with execution.quiet(probe.side):
            execution.run(execution.callable_of(probe.side), probe.pair, values, gradients=True, seed=probe.case.seed)


def _is_differentiated(probe: Probe) -> bool:
    pair = probe.pair
    return pair.gradients and not pair.is_stateful and bool(execution.differentiable(pair))


# --- changes of the arguments ---------------------------------------------------------------------------------------


def arguments_of_call(probe: Probe) -> Effects:
    """Return the changes that a call makes to `requires_grad` of the inputs, and to the modes and hooks of modules. Of
    steps, hooks are left out: they may belong to the state."""
    if probe.pair.is_stateful:
        return _arguments_of_steps(probe)
    found: Effects = {}
    for grad_mode, differentiated in ((False, False), (True, False), (True, True)):
        values = probe.drawn()
        if differentiated and _is_differentiated(probe):
            execution.require_gradients(probe.pair, values)
        arguments = dict(values)
        if isinstance(probe.side.call, modules.Sharing):
            arguments["its module"] = probe.side.call.sharing(values[modules.INPUT])
        before = dict(properties.of(arguments))
        with execution.quiet(probe.side), torch.set_grad_enabled(grad_mode):
            execution.callable_of(probe.side)(*values.values())
        found |= _changes(before, dict(properties.of(arguments)))
    return found


def _arguments_of_steps(probe: Probe) -> Effects:
    found: Effects = {}
    for grad_mode in (False, True):
        values = probe.drawn()
        if "needing_gradients" not in probe.pair.unsupported:
            for name, value in values.items():
                for _, tensor in () if isinstance(value, torch.nn.Module) else make.changing(probe.pair, name, value):
                    tensor.requires_grad_(tensor.is_floating_point())
        flags = (properties.REQUIRES_GRAD, properties.TRAINING)
        before = {n: was for n, was in properties.of(values) if n.startswith(flags)}
        try:
            with execution.quiet(probe.side), torch.set_grad_enabled(grad_mode):
                step = execution.callable_of(probe.side)(*values.values())
                step(*probe.step_inputs(probe.case, 1).values())
        except Exception:  # `contexts` reports a side that does not support this grad mode
            continue
        found |= _changes(before, dict(properties.of(values)))
    return found


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Effects:
    return {n: f"changes {n} from {was} to {after.get(n)}" for n, was in before.items() if after.get(n) != was}


def grads(probe: Probe) -> Effects:
    """Return the changes that a call or a step makes to `.grad` of its inputs: a `.grad` that was None is set, or one
    that was set is changed or cleared. The latter is tried only for inputs that may not change, because a step that
    trains its parameters may clear their `.grad`."""
    found: Effects = {}
    for held in (False, True):
        values = probe.drawn()
        step_inputs = probe.step_inputs(probe.case, 1) if probe.pair.is_stateful else {}
        every = {**values, **step_inputs}
        if held:
            for _, tensor in make.unchanging(probe.pair, every):
                if tensor.requires_grad:
                    tensor.grad = torch.ones_like(tensor)
        tensors = {path: t for name in every for path, t in make.tensors_in(every[name], name, buffers=False)}
        before = {path: tensor.grad for path, tensor in tensors.items()}
        try:
            with execution.quiet(probe.side), torch.enable_grad():
                returned = execution.callable_of(probe.side)(*values.values())
                if probe.pair.is_stateful:
                    returned(*step_inputs.values())
        except Exception:  # `contexts` reports a side that does not support this grad mode
            continue
        for path, was in before.items():
            now = tensors[path].grad
            if was is None and now is not None:
                found[f"set {path}"] = f"leaves the .grad of {path} set"
            elif was is not None and (now is not was or not bool((was == 1).all())):
                found[f"changed {path}"] = f"changes the .grad of {path}"
    return found


def arguments_of_backward(probe: Probe) -> Effects:
    """Return the changes that a backward pass makes to incoming gradients, to inputs and to the inputs' `.grad`."""
    if not _is_differentiated(probe):
        return {}
    values = probe.drawn()
    execution.poison(probe.pair, values)
    leaves = execution.require_gradients(probe.pair, values)
    kept = {}
    for path, leaf in leaves.items():
        leaf.grad = kept[path] = torch.ones_like(leaf)
    inputs = {
        path: (tensor, bytes_of(tensor.untyped_storage()).clone())
        for path, tensor in make.unchanging(probe.pair, values)
    }
    with execution.quiet(probe.side), torch.enable_grad():
        returned = execution.callable_of(probe.side)(*values.values())
        outputs, weights = incoming_gradients.drawn(dict(execution.flatten(returned)), probe.case.seed)
        before = [weight.clone() for weight in weights]
        if outputs and leaves:
            torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
    found = {}
    for number, (weight, was) in enumerate(zip(weights, before, strict=True)):
        if GRAD_OUTPUT not in probe.pair.consumes and not same_leaf(weight, was):
            found[f"incoming {number}"] = (
                "writes into the gradient that comes in to its backward pass: whoever uses it afterwards computes with "
                f'other values; if that is meant, declare consumes={{"{GRAD_OUTPUT}"}}'
            )
    for path, (tensor, was) in inputs.items():
        if not torch.equal(bytes_of(tensor.untyped_storage()), was):
            found[f"input {path}"] = (
                f"changes its input {path} in its backward pass (if that is meant, declare consumes={{{path!r}}})"
            )
    for path, leaf in leaves.items():
        if leaf.grad is not kept[path] or not bool((leaf.grad == 1).all()):
            found[f"grad {path}"] = f"changes the .grad of {path}, also where it is only asked for gradients"
    return found


def shared_memory(probe: Probe) -> Effects:
    """Return the outputs that share memory with each other or with an input. The drawn inputs are tried, and then the
    same inputs filled with one value."""
    if probe.pair.is_stateful:
        return {}
    found = {}
    for change in (lambda t: t, _constant):
        values = make.map_tensors(probe.drawn(), change)
        try:
            leaves = probe.call(values)
        except Exception:  # the side does not support inputs that are changed in this way
            continue
        for output, other in execution.shared_memory(probe.pair, leaves, values):
            found[f"{output} {other}"] = f"returns {output} in the memory of {other}; writing to one changes the other"
    return found


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with all elements set to the value of the first, which satisfies the bounds of the values."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    return torch.full_like(tensor, float(tensor.detach()[(0,) * tensor.dim()]))


KINDS: tuple[Kind, ...] = (
    process,
    settings,
    generators,
    named_generators,
    bindings,
    arguments_of_call,
    grads,
    arguments_of_backward,
    shared_memory,
    held_memory.held_memory,
    threads,
)
IN_TURN = (process, settings, generators, named_generators, bindings, grads, held_memory.held_memory)
"""Kinds whose result depends little on the draw, so each runs on only some of the later draws."""
