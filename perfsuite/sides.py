"""Sides: the callables of a pair, each with what it needs to run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfsuite import modules
from perfsuite.errors import PairError


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A callable with what it needs: where it runs, whether it is available, whether it is compiled.

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
        """Whether `compiled(…)` declares the side, or torch.compile made the callable."""
        return self.compile is not None or modules.is_compiled(self.call)


def module_of(side: Side) -> Any:
    """Return the loaded module that defines the side; None for what no loaded module defines."""
    return sys.modules.get(getattr(side.call, "__module__", None) or "")


def side(
    call: Callable[..., Any],
    *,
    devices: Sequence[str] = ("cpu", "cuda"),
    available: Callable[[], str | None] | None = None,
) -> Side:
    """Declare a rival or variant that runs only on some devices, or only where `available()` returns None."""
    return Side(call=call, devices=tuple(devices), available=available)


def compiled(call: Callable[..., Any] | Side, **options: Any) -> Side:
    """Declare `torch.compile(call, **options)`, compiled when it is first needed; `options` are torch.compile's."""
    if isinstance(call, Side):
        return replace(call, compile=dict(options))
    return Side(call=call, compile=dict(options))


def stateful(make: Callable[..., Callable[..., Any]] | Side, *, settle: int = 1) -> Side:
    """Declare a side that is a factory: `make(*inputs)` builds a step, and `step(*step_inputs)` is run and timed.

    For a step that warms up, compiles or captures, `settle` is the number of calls that this takes: every new step is
    called this often before it is timed. Raises PairError for fewer than one.
    """
    if not isinstance(settle, int) or isinstance(settle, bool) or settle < 1:
        raise PairError(f"stateful(settle={settle!r}): name a number of calls, 1 or more")
    return replace(make if isinstance(make, Side) else Side(call=make), stateful=True, settle=settle)


def as_side(call: Callable[..., Any] | Side) -> Side:
    """Return the callable as a `Side`, with the defaults of one."""
    return call if isinstance(call, Side) else Side(call=call)
