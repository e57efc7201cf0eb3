"""Find the Triton kernels that a function can reach, by the names that its code uses."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from perfsuite.declare import modules
from perfsuite.state.patches import names_in

KERNELS = ("JITFunction", "GluonJITFunction", "InterpretedFunction")
"""Names of Triton's kernel classes: compiled, written in Gluon, and interpreted."""
WRAPPERS = (functools.partial, MethodType, property, staticmethod, classmethod, dict, list, tuple, set)
"""Types of wrappers and containers that are searched, whichever module made them."""
MOST_ITEMS = 1000
"""Most items of a container that is searched. Longer ones contain data."""


def kernels(calls: Iterable[Any]) -> dict[str, Any]:
    """Return qualified name → kernel, for all kernels that these callables can reach in their own projects.

    A function reaches the globals, module attributes and closures that its code names, its defaults, and everything
    that these reach. A class and an instance reach what their methods reach. Device functions are left out.
    """
    if "triton" not in sys.modules:
        return {}
    found: dict[str, Any] = {}
    waiting = deque(map(modules.unwrapped, calls))
    projects = {_project(part) for call in waiting for part in _with_submodules(call)} - {"", "torch"}
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept alive, so that its id stays unique
        if type(value).__name__ in KERNELS:
            found[f"{value.fn.__module__}.{value.fn.__name__}"] = value
        elif _is(value, WRAPPERS) or _project(value) in projects:
            waiting.extend(_parts(value))
        elif modules.is_module_type(type(value)):  # torch's own, such as Sequential, may contain the project's
            waiting.extend(vars(value)["_modules"].values())
    called = set().union(*map(_calls, found.values()))
    return {name: kernel for name, kernel in found.items() if kernel.fn.__name__ not in called}


def _parts(value: Any) -> Iterator[Any]:
    match value:
        case FunctionType():
            yield from _named(value)
            yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
            yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            yield getattr(value, "__wrapped__", None)
        case MethodType():
            yield from (value.__func__, value.__self__)
        case functools.partial():
            yield from (value.func, *value.args, *value.keywords.values())
        case property():
            yield value.fget
        case staticmethod() | classmethod():
            yield value.__func__
        case type():
            yield from (*vars(value).values(), *value.__bases__)
        case dict():
            yield from _few(value.values(), len(value))
        case list() | tuple() | set():
            yield from _few(value, len(value))
        case ModuleType():
            pass  # `_named` yields those of its attributes that code names
        case _:
            yield type(value)
            yield from getattr(value, "__dict__", {}).values()


def _few(values: Iterable[Any], count: int) -> Iterable[Any]:
    return values if count <= MOST_ITEMS else ()


def _named(function: FunctionType) -> Iterator[Any]:
    """Yield the objects that the function's code names: globals, and attributes of modules.

    A module that the function itself imports is left out, since it may not be imported yet.
    """
    names = set(names_in(function.__code__))
    named: list[ModuleType] = []
    for name in names:
        value: Any = function.__globals__.get(name)
        if _is(value, ModuleType):
            named.append(value)
        elif value is not None:
            yield value
            if _is(value, type):
                yield from (vars(value)[n] for n in names if n in vars(value))
    seen: set[str] = set()
    while named:
        module = named.pop()
        if module.__name__ in seen:
            continue
        seen.add(module.__name__)
        for name in names:
            value = vars(module).get(name)
            if _is(value, ModuleType):
                named.append(value)
            elif value is not None:
                yield value


def _is(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return the same as isinstance, but do not read `__class__`, because one of torch's objects then warns that it is
    deprecated."""
    return issubclass(type(value), kinds)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _with_submodules(call: Any) -> Iterable[Any]:
    return call.modules() if modules.is_module(call) else (call,)


def _project(value: Any) -> str:
    """Return the top-level package that defines the object or its class; empty for builtins, or if it is unknown."""
    if _is(value, MethodType):
        value = value.__func__
    owner = value if _is(value, (FunctionType, type)) else type(value)
    module = getattr(owner, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) and module != "builtins" else ""


def _calls(kernel: Any) -> set[str]:
    """Return the names that the kernel calls or passes as arguments. These are device functions, which are compiled
    into their callers and never launched."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    parts = [part for call in calls for part in (call.func, *call.args)]
    return {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)}
