"""Define the sides of a pair: callables with the conditions under which they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfsuite.declare import modules
from perfsuite.errors import PairError


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A callable with its devices, its availability, and whether it is compiled or stateful.

    `available` returns None, or the reason (with the remedy) why this machine cannot run it.
    """

    call: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    available: Callable[[], str | None] | None = None
    compile: Mapping[str, Any] | None = None
    stateful: bool = False
    settle: int = 1
    """Number of calls of a new step until its speed is stable."""

    @property
    def is_compiled(self) -> bool:
        """True if the side was declared by `compiled(…)`, or its callable was returned by torch.compile."""
        return self.compile is not None or modules.is_compiled(self.call)


def module_of(side: Side) -> Any:
    """Return the loaded module that defines the side; None if there is none."""
    return sys.modules.get(getattr(side.call, "__module__", None) or "")


def side(
    call: Callable[..., Any],
    *,
    devices: Sequence[str] = ("cpu", "cuda"),
    available: Callable[[], str | None] | None = None,
) -> Side:
    """Declare a rival or variant that runs only on some devices, or only if `available()` returns None."""
    return Side(call=call, devices=tuple(devices), available=available)


def compiled(call: Callable[..., Any] | Side, **options: Any) -> Side:
    """Declare `torch.compile(call, **options)`, which is compiled when it is first needed."""
    if isinstance(call, Side):
        return replace(call, compile=dict(options))
    return Side(call=call, compile=dict(options))


def stateful(make: Callable[..., Callable[..., Any]] | Side, *, settle: int = 1) -> Side:
    """Declare a side that is a factory: `make(*inputs)` builds a step, and `step(*step_inputs)` is run and timed.

    `settle` is the number of calls that a new step needs to warm up, compile or capture. Every new step is called this
    number of times before it is timed. Raises PairError if it is less than 1.
    """
    if not isinstance(settle, int) or isinstance(settle, bool) or settle < 1:
        raise PairError(f"stateful(settle={settle!r}): name a number of calls, 1 or more")
    return replace(make if isinstance(make, Side) else Side(call=make), stateful=True, settle=settle)


def as_side(call: Callable[..., Any] | Side) -> Side:
    """Return the callable as a `Side`, with the defaults of one."""
    return call if isinstance(call, Side) else Side(call=call)
