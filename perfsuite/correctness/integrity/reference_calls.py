"""Detect an optimized side that calls the reference."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch

from perfsuite.correctness.integrity.probe import Probe
from perfsuite.declare import modules
from perfsuite.declare.sides import as_side
from perfsuite.state import process_state

PROFILES = ("Python's profile function", "the profile function of new threads")
"""Names of the profile functions among the settings of `process_state`."""


def calls_reference(probe: Probe) -> None:
    """Check that the optimized side does not run the reference, and does not leave other profile functions."""
    reference = as_side(probe.pair.reference).call
    if probe.side.call is reference:
        return  # the pair declares openly that both sides are one function, which may be compiled
    function = _function(reference)
    if function is None or _function(probe.side.call) is function:
        return  # a module of the same class is declared openly, too
    seen, replaced = _call(probe, function, _structure(reference, function))
    if seen:
        raise probe.fault(
            f"calls the reference itself ({seen[0]}); what both sides share on purpose is a function that the "
            f"reference calls, and not the reference"
        )
    # This shows only while a profile function is set: a side that sets none leaves what other checks see as unchanged.
    if replaced and not set(replaced) <= set(_call(probe.of_reference(), function, "")[1]):
        raise probe.fault(
            f"replaces {replaced[0]}, which the reference does not: a profiler, or this check, sees nothing more; put "
            f"it back"
        )


def _function(call: Any) -> FunctionType | None:
    """Return the Python function that runs when `call` is called; None if that is no Python function."""
    call = inspect.unwrap(modules.unwrapped(call))
    if isinstance(call, torch.nn.Module):
        call = call.forward
    if not inspect.isroutine(call):
        call = type(call).__call__
    call = getattr(call, "__func__", call)
    return call if isinstance(call, FunctionType) else None


def _structure(reference: Any, function: FunctionType) -> str:
    """Return the reference's layers as text if its class belongs to torch, such as nn.Sequential, and otherwise "".

    Both sides may use such a class, so that only modules with the reference's layers count as the reference.
    """
    module = getattr(reference, "module", modules.unwrapped(reference))
    of_torch = function.__module__.partition(".")[0] == "torch"
    return _layers(module) if of_torch and isinstance(module, torch.nn.Module) else ""


def _layers(module: Any) -> str:
    """Return `repr` of a module without the name of its class, which a subclass changes."""
    return repr(module).partition("(")[2]


def _call(probe: Probe, function: FunctionType, structure: str) -> tuple[list[str], list[str]]:
    """Call the side of the probe. Return (places from which it calls the function, names of the profile functions that
    it replaces)."""
    with _watched(function, structure) as (seen, replaced):
        probe.call(probe.drawn())
    return seen, replaced


@contextmanager
def _watched(function: FunctionType, structure: str) -> Iterator[tuple[list[str], list[str]]]:
    """Collect the places from which the function is called, in this thread and in threads started inside the block, and
    the names of the profile functions that the block replaces.

    structure  layers of the only modules whose calls count; "": all calls count
    """
    seen: list[str] = []
    replaced: list[str] = []
    code = function.__code__
    held = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a closure variable without a value yet
            held[name] = cell.cell_contents

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code is not code or frame.f_globals is not function.__globals__:
            return
        if structure and _layers(frame.f_locals.get(code.co_varnames[0])) != structure:
            return
        # Functions made by one factory share their code. Their closures differ.
        if any(frame.f_locals.get(name) is not value for name, value in held.items()):
            return
        back = frame.f_back
        seen.append(f"{code.co_name}, from line {back.f_lineno} of {back.f_code.co_name}" if back else code.co_name)

    before = process_state.settings(PROFILES)
    sys.setprofile(watch)
    threading.setprofile(watch)
    try:
        yield seen, replaced
    finally:
        replaced += [name for name, now in process_state.settings(PROFILES).items() if now is not watch]
        process_state.restore(before, PROFILES)
