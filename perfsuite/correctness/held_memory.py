"""Detect memory that calls, backward passes and steps never release."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any, TypeAlias

from torch.multiprocessing.reductions import StorageWeakRef

from perfsuite.correctness import dispatch_modes, execution
from perfsuite.correctness.integrity.probe import Probe
from perfsuite.draws import inputs as make

HELD_CALLS = 4
"""Number of calls at first. Memory that grows in each of the last two of them is not a cache that is filled once."""
CACHED_CALLS = 300
"""Number of calls after which a bounded cache is full."""
HELD_STEPS = 40
"""Number of steps of a stateful pair after which a bounded cache is full."""


class _Allocations(dispatch_modes.OutsideCompiled):
    """Dispatch mode that records the storage of every new tensor, but not of tensors that an operation writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result
        for _, tensor in make.tensors_in(list(result) if isinstance(result, (tuple, list)) else [result]):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # tensors of a trace have no memory
                self.noted.append(StorageWeakRef.from_weakref(tensor.untyped_storage()._weak_ref()))
        return result

    def alive(self, *, collected: bool) -> int:
        if collected:
            gc.collect()
        self.noted = [ref for ref in self.noted if not ref.expired()]
        return len({ref.cdata for ref in self.noted})


Prepare: TypeAlias = Callable[[int], Callable[[], object]]
"""Number of a call → the call, with inputs already built."""


def held_memory(probe: Probe) -> dict[str, str]:
    """Return which calls leak memory: calls, calls with a backward pass, or steps of a stateful pair."""
    if probe.side.is_compiled:
        return {}
    if probe.pair.is_stateful:
        ways: list[tuple[str, int, Callable[[Probe], Prepare]]] = [("step", HELD_STEPS, _steps)]
    else:
        ways = [("call", CACHED_CALLS, _calls)]
        if probe.pair.gradients and execution.differentiable(probe.pair):
            ways.append(("call and its backward pass", CACHED_CALLS, _training))
    for what, most, way in ways:
        # Garbage collection and many calls take long, so both are done only if memory seems to grow.
        for calls, collected in ((HELD_CALLS, False), (HELD_CALLS, True), (most, True)):
            counts = _alive(way(probe), calls, collected=collected)
            if not counts[0] < counts[1] < counts[2]:
                break
        else:
            return {
                f"held by {what}": f"keeps memory of every {what}: after {most} of them {counts[-1]} tensors live on"
            }
    return {}


def _calls(probe: Probe) -> Prepare:
    def prepare(number: int) -> Callable[[], object]:
        return functools.partial(probe.call, probe.drawn(probe.other_case(number)))

    return prepare


def _training(probe: Probe) -> Prepare:
    def prepare(number: int) -> Callable[[], object]:
        values = probe.drawn(probe.other_case(number))
        run = functools.partial(execution.run, execution.callable_of(probe.side), probe.pair, values)
        return functools.partial(run, gradients=True, seed=probe.case.seed)

    return prepare


def _steps(probe: Probe) -> Prepare:
    step_inputs = functools.partial(probe.step_inputs, probe.case)
    call, never = execution.callable_of(probe.side), (1 + max(HELD_STEPS, HELD_CALLS),)
    steps = execution.stepping(call, probe.pair, probe.drawn(), never, step_inputs)
    next(steps)  # builds the step
    return lambda number: functools.partial(next, steps)


def _alive(prepare: Prepare, calls: int, *, collected: bool) -> list[int]:
    """Return how many of the tensors made in the calls are still alive after each of the last three of `calls` calls.

    Returns zeros if the side does not support the dispatch mode.
    """
    counts, mode = [], _Allocations()
    for number in range(calls):
        call = prepare(number)
        try:
            with mode:
                call()
        except Exception:  # the mode is not supported, for instance by torch._foreach_add_ on views that need gradients
            return [0, 0, 0]
        del call
        if number >= calls - 3:
            counts.append(mode.alive(collected=collected))
    return counts
