"""Run one side on given inputs and collect its results: outputs, changed inputs and gradients."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeAlias

import torch

from perfsuite.correctness import incoming_gradients
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side
from perfsuite.declare.specs import ModuleSpec, TensorSpec, tensor_spec
from perfsuite.draws import inputs as make
from perfsuite.draws.memory_layouts import fill_poison
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.state import process_state, python_state

Leaf: TypeAlias = "torch.Tensor | float | int | bool | None"
Leaves: TypeAlias = dict[str, Leaf]

_compiled: weakref.WeakKeyDictionary[Callable[..., Any], dict[str, Callable[..., Any]]] = weakref.WeakKeyDictionary()


def callable_of(side: Side) -> Callable[..., Any]:
    """Return the callable of a side. A compiled side is compiled for static shapes unless it declares otherwise."""
    if side.compile is None:
        return side.call
    options = {"dynamic": False, **side.compile}
    if side.stateful:
        return _compiled_factory(side.call, options)
    known = _compiled.setdefault(side.call, {})
    key = repr(sorted(options.items(), key=str))
    if key not in known:
        known[key] = torch.compile(side.call, **options)
    return known[key]


def forget_compiled() -> None:
    """Drop every compiled function, so that the next workload compiles for its own shapes."""
    _compiled.clear()
    # Only if something was compiled: importing dynamo, or what its reset imports, takes seconds.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["stats"]["unique_graphs"]:
        dynamo.reset()


RECOMPILATIONS = 64


@contextmanager
def recompiling() -> Iterator[None]:
    """Raise torch's recompilation limit in the block, beyond which a side would run uncompiled."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return
    # Not config.patch, which affects only one thread.
    limit, dynamo.config.recompile_limit = dynamo.config.recompile_limit, RECOMPILATIONS
    try:
        yield
    finally:
        dynamo.config.recompile_limit = limit


def _compiled_factory(make_step: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    def build(*args: Any) -> Any:
        return torch.compile(make_step(*args), **options)

    return build


WATCHED_CALLS = 3
"""Number of first calls of a side around which all global state is watched. Changes that are made once are mostly made
then."""
_calls: weakref.WeakKeyDictionary[Callable[..., Any], int] = weakref.WeakKeyDictionary()


@contextmanager
def settings_kept(side: Side | None = None) -> Iterator[dict[str, str]]:
    """Collect the global state that the block leaves changed, name → words, and restore it.

    Around the first calls of a `side` this covers all settings, modes, hooks and functions of torch. Otherwise it
    covers the settings that most affect the results of other code.
    """
    with process_state.kept(quick=side is None or _is_known(side)) as changed:
        yield changed


@contextmanager
def restoring_global_state(pair: Pair) -> Iterator[None]:
    """Restore, after a whole proof, the global state that its sides leave changed. Raises NotEquivalent if they changed
    state of torch."""
    with python_state.kept(), process_state.kept() as changed:
        yield
    if changed:
        what = next(iter(changed.values()))
        raise NotEquivalent(
            f"{pair.name}: a side {what} for all that runs after it; put it back, or set it for both sides"
        )


FEW_THREADS = 4


@contextmanager
def few_threads(device: str) -> Iterator[None]:
    """Let CPU operators use few threads while sides are proven on a GPU. These operators are small, and waking more
    threads takes longer than it saves."""
    threads = torch.get_num_threads()
    if device == "cpu" or threads <= FEW_THREADS:
        yield
        return
    torch.set_num_threads(FEW_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _is_known(side: Side) -> bool:
    """Return whether the side was already called WATCHED_CALLS times, and count the present call."""
    try:
        made = _calls[side.call] = _calls.get(side.call, 0) + 1
    except TypeError:  # the callable does not support weak references
        return True
    return made > WATCHED_CALLS


@contextmanager
def quiet(side: Side) -> Iterator[None]:
    """Wrap every call of a side, and silence torch.compile's own warnings, which the user cannot fix.

    Raises PairError if the side raises an exception that has a meaning for the test runner (a skip, Hypothesis's
    assume). Otherwise a side could hide a draw that it answers wrongly.
    """
    with warnings.catch_warnings() if side.is_compiled else nullcontext():
        if side.is_compiled:
            warnings.simplefilter("ignore")
        try:
            yield
        except BaseException as error:
            # The __module__ of pytest's own exceptions is builtins, but that of their bases is not.
            kinds = {(c.__module__.split(".")[0], c.__name__) for c in type(error).__mro__}
            if {module for module, _ in kinds} & {"_pytest", "hypothesis", "unittest"}:
                raise PairError(
                    f"a side raises {type(error).__name__}, which would make the test runner pass over this draw; "
                    f"bound the inputs with values=, sizes= or where= instead"
                ) from None
            raise


def unavailable(side: Side, device: str) -> str | None:
    """Return why this machine cannot run the side; None if it can."""
    kind = torch.device(device).type
    if kind not in side.devices:
        return f"runs on {' or '.join(side.devices)} only, and this machine has no such device"
    return side.available() if side.available is not None else None


def differentiable(pair: Pair) -> tuple[str, ...]:
    """Return the inputs whose gradients are compared."""
    kept = set(pair.inputs) - (set(pair.mutates) - pair.keeping_parameters)
    return tuple(name for name, spec in pair.inputs.items() if name in kept and _is_differentiable(spec))


def _is_differentiable(spec: Any) -> bool:
    if isinstance(spec, ModuleSpec):
        return True
    leaf = tensor_spec(spec)
    kinds = ("float", "bfloat", "complex")
    return isinstance(leaf, TensorSpec) and leaf.differentiable and (leaf.dtype is None or leaf.dtype.startswith(kinds))


def flatten(value: Any, path: str = "output") -> Iterator[tuple[str, Leaf]]:
    """Yield (name, leaf) for every leaf of a nested return value.

    A subclass of dict, list, tuple, int or float counts as what the base class holds, and a dataclass as what its
    instance holds: methods of its own might compute the result only when it is read, after the time was taken.
    """
    if value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float):
        yield path, value
    elif isinstance(value, (int, float)):
        yield path, int.__int__(value) if isinstance(value, int) else float.__float__(value)
    elif isinstance(value, dict):
        for key, item in dict.items(value):
            yield from flatten(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        items = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        for i, item in enumerate(items):
            yield from flatten(item, f"{path}[{i}]")
    elif (held := held_fields(value)) is not None:
        for name, item in held.items():
            yield from flatten(item, f"{path}.{name}")
    else:
        raise PairError(
            f"{path} is a {type(value).__name__}; a side returns tensors, numbers, None, or tuples, lists, dicts or "
            f"dataclasses of them: let both sides leave it out, or return its parts in a dict"
        )


def held_fields(value: Any) -> dict[str, Any] | None:
    """Return the fields that an instance of a dataclass holds. Return None for anything else, and for a dataclass with
    a field that a property computes."""
    kind: type = type(value)
    if not dataclasses.is_dataclass(kind):
        return None

    def of_class(name: str) -> Any:
        return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)

    of_instance = of_class("__dict__")
    own = of_instance.__get__(value) if isinstance(of_instance, GetSetDescriptorType) else {}
    held: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(kind)):
        slot = of_class(name)
        if isinstance(slot, MemberDescriptorType):
            held[name] = slot.__get__(value)
        elif name in own and not hasattr(type(slot), "__set__"):
            held[name] = own[name]
        else:
            return None
    return held


def only_tensors(leaves: Leaves) -> list[torch.Tensor]:
    """Return the leaves that are tensors."""
    return [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)]


def copies_of(leaves: Leaves) -> Leaves:
    """Return the leaves with copies of their tensors."""
    return {n: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for n, leaf in leaves.items()}


def poison(pair: Pair, inputs: Mapping[str, Any]) -> None:
    """Fill those of the inputs that are only written to with poison values, so that an unwritten element is
    detected."""
    for name in pair.written.intersection(inputs):
        for _, tensor in make.tensors_in(inputs[name]):
            fill_poison(tensor)


def require_gradients(pair: Pair, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Set `requires_grad` of the differentiable inputs, and of the parameters of modules. Return path → tensor."""
    marked: dict[str, torch.Tensor] = {}
    for name in differentiable(pair):
        for path, tensor in make.tensors_in(inputs[name], name, buffers=False):
            if tensor.is_floating_point() or tensor.is_complex():
                marked[path] = tensor.requires_grad_()
    return marked


def run(
    call: Callable[..., Any],
    pair: Pair,
    inputs: dict[str, Any],
    *,
    gradients: bool,
    seed: int,
    kind: str = incoming_gradients.PLAIN,
) -> Leaves:
    """Call the side. Return its outputs, then the inputs that it changed in place, then the gradients, by name.

    A mutating side changes `inputs`. `kind` is the kind of the incoming gradients.
    """
    marked = require_gradients(pair, inputs) if gradients else {}
    for device in {t.device for t in marked.values() if t.is_cuda}:
        _ready_for_backward(device)
    with torch.set_grad_enabled(gradients):
        returned = call(*inputs.values())
    leaves = with_changed(pair, inputs, returned)
    if gradients:
        outputs, weights = incoming_gradients.drawn(leaves, seed, pair.output_dtype, kind=kind)
        if outputs:
            torch.autograd.backward(outputs, weights)
        for path, tensor in marked.items():
            leaves[f"gradient of {path}"] = tensor.grad
    return {name: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in leaves.items()}


INPUT = "its input "
"""Beginning of the name of an input in the result of `shared_memory`."""


def shared_memory(pair: Pair, leaves: Leaves, inputs: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return the pairs (output, other output or "its input NAME") that share an element in memory.

    Outputs in the memory of inputs that are declared to change are left out.
    """
    outputs = [(n, t) for n, t in leaves.items() if n.startswith("output") and isinstance(t, torch.Tensor)]
    given = [
        (f"{INPUT}{name}", tensor)
        for name, value in inputs.items()
        for _, tensor in make.unchanging(pair, {name: value})
    ]
    changed = [tensor for name, value in inputs.items() for _, tensor in make.changing(pair, name, value)]
    storages: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*outputs, *given):
        if tensor.numel() and tensor.layout is torch.strided and not tensor.is_meta:
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for tensor in changed:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return {
        (name, other)
        for held in storages.values()
        for i, (name, tensor) in enumerate(held)
        for other, beside in held[i + 1 :]
        if name.startswith("output") and _overlap(tensor, beside)
    }


OVERLAP_ELEMENTS = 1 << 16
"""Most elements of a tensor whose elements are compared one by one. Of larger tensors, only the first and last
addresses are compared."""


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if max(a.numel(), b.numel()) <= OVERLAP_ELEMENTS and a.element_size() == b.element_size():
        return bool(torch.isin(_places(a), _places(b)).any())
    (a_first, a_last), (b_first, b_last) = _ends(a), _ends(b)
    return a_first <= b_last and b_first <= a_last


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Return the index of each element in its storage."""
    places = torch.tensor(int(tensor.storage_offset()))
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + stride * torch.arange(size)
    return places.flatten()


def _ends(tensor: torch.Tensor) -> tuple[int, int]:
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


@functools.cache
def _ready_for_backward(device: torch.device) -> None:
    """Run a first matrix product in the backward thread of a GPU, which may warn, so that no side causes that
    warning."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        x = torch.ones(1, 1, device=device, requires_grad=True)
        torch.autograd.backward((x @ x).sum())


def with_changed(pair: Pair, inputs: Mapping[str, Any], returned: Any) -> Leaves:
    """Return the leaves that the side returned, then the inputs changed in place. An input that is itself returned
    counts once."""
    names = sorted(pair.mutates, key=lambda name: (name in pair.written, name))
    changed = {path: tensor for name in names for path, tensor in make.changing(pair, name, inputs[name])}
    leaves: Leaves = {}
    try:
        returned_leaves = list(flatten(returned))
    except PairError as error:
        raise PairError(f"{pair.name}: {error}") from None
    for name, leaf in returned_leaves:
        same = next((path for path, tensor in changed.items() if tensor is leaf), None)
        leaves[f"{name} is {same}" if same else name] = True if same else leaf
    return leaves | {f"{path} (in place)": tensor for path, tensor in changed.items()}


def run_steps(
    make_step: Callable[..., Any],
    pair: Pair,
    inputs: dict[str, Any],
    steps: Sequence[int],
    step_inputs: Callable[[int], dict[str, Any]],
) -> dict[int, Leaves]:
    """Build the step function and run it. Return the state after each of `steps`.

    `step_inputs(i)` returns the inputs of step i, counted from 1.
    """
    *_, states = stepping(make_step, pair, inputs, steps, step_inputs)
    return states


def after(steps: int) -> str:
    """Return the end of the name of a leaf of `of_all_steps`."""
    return f" after {steps} step{'s' * (steps > 1)}"


def steps_of(name: str) -> int | None:
    """Return the number of steps in the name of a leaf of `of_all_steps`; None if there is none."""
    found = re.search(r" after (\d+) steps?$", name)
    return int(found[1]) if found else None


def of_all_steps(states: Mapping[int, Leaves]) -> Leaves:
    """Merge the states after several steps into one dict. The names contain the number of steps."""
    return {name: leaf for state in states.values() for name, leaf in state.items()}


def stepping(
    make_step: Callable[..., Any],
    pair: Pair,
    inputs: dict[str, Any],
    steps: Sequence[int],
    step_inputs: Callable[[int], dict[str, Any]],
) -> Iterator[dict[int, Leaves]]:
    """Run the steps as `run_steps` does, and yield the states so far after building the step and after each step."""
    step = make_step(*inputs.values())
    states: dict[int, Leaves] = {}
    yield states
    for i in range(1, max(steps) + 1):
        of_step = step_inputs(i)
        poison(pair, of_step)
        returned = step(*of_step.values())
        if i in steps:
            leaves = with_changed(pair, {**inputs, **of_step}, returned)
            states[i] = {
                f"{name}{after(i)}": leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                for name, leaf in leaves.items()
            }
        yield states
