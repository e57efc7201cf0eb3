"""Find functions that other code has replaced, and restore them: functions and methods of torch and builtins, and the
objects to which a function's code refers."""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from perfsuite.system import tamper

MOST_HELD = 1000
"""Most items of a container that is compared item by item. A larger one is compared by identity."""

_EXTENDED: Mapping[str, Any] = {"torch.Tensor": torch.Tensor, "torch.nn.Module": torch.nn.Module}
"""Classes to which libraries add functions."""


class Functions(NamedTuple):
    """Snapshot of the functions and methods of torch and builtins that a side or a reference could call."""

    bound: tuple[Any, ...]
    """Objects in the order of `_owned`."""
    added: Mapping[str, Any]
    """Attributes that other code, such as a library, added to torch.Tensor or torch.nn.Module."""


def functions() -> Functions:
    """Return a snapshot of the functions as they are bound now. It takes about 0.1 ms."""
    bound = tuple(itertools.chain.from_iterable(map(vars(owner).get, names) for owner, names in _by_owner()))
    return Functions(bound, _added())


def _added() -> dict[str, Any]:
    """Return the attributes that were added to torch.Tensor or torch.nn.Module. They shadow inherited ones."""
    return {
        f"{path}.{name}": vars(owner)[name]
        for path, owner in _EXTENDED.items()
        for name in vars(owner).keys() - _attributes()[path]
    }


@functools.cache
def _by_owner() -> list[tuple[Any, list[str]]]:
    """Return (owner, names of its attributes) in the order of `_owned`."""
    owned = itertools.groupby(_owned().values(), key=lambda item: id(item[0]))
    return [(items[0][0], [attribute for _, attribute in items]) for _, group in owned if (items := list(group))]


@functools.cache
def _owned() -> Mapping[str, tuple[Any, str]]:
    owners: dict[str, Any] = {
        "torch": torch,
        "torch.functional": torch.functional,
        "torch.nn.functional": torch.nn.functional,
        "torch.nn.init": torch.nn.init,
        "torch.linalg": torch.linalg,
        "torch.fft": torch.fft,
        "torch.special": torch.special,
        "torch.autograd": torch.autograd,
        "torch.autograd.Function": torch.autograd.Function,
        "torch.cuda": torch.cuda,
        "torch.utils.checkpoint": torch.utils.checkpoint,
        "torch.Tensor": torch.Tensor,
        "builtins": builtins,
    }
    for package in (torch.nn, torch.optim):
        for name, found in vars(package).items():
            if isinstance(found, type):
                owners[f"{package.__name__}.{name}"] = found
                bases = [base for base in found.__mro__ if base.__module__.startswith(f"{package.__name__}.")]
                owners |= {f"{base.__module__}.{base.__qualname__}": base for base in bases if base is not found}
    return {
        f"{path}.{name}": (owner, name)
        for path, owner in owners.items()
        for name, value in vars(owner).items()
        if callable(value) or isinstance(value, (staticmethod, classmethod))
    }


def patched(before: Functions) -> dict[str, str]:
    """Return the functions that have been replaced since `before` by code that is not torch's own: name → words for a
    message."""
    now = functions()
    owned = _owned()
    found: dict[str, str] = {}
    for name, value in itertools.compress(
        zip(owned, now.bound, strict=True), map(operator.is_not, before.bound, now.bound)
    ):
        package = owned[name][0].__name__.partition(".")[0] if name.startswith("builtins") else "torch"
        if not _is_own(value, package):
            found[name] = f"replaces {name} by {tamper._described(value)}"
    for name, value in now.added.items():
        if value is not before.added.get(name) and callable(value) and not _is_own(value, "torch"):
            found[name] = f"replaces {name} by {tamper._described(value)}"
    return found


@functools.cache
def _attributes() -> Mapping[str, frozenset[str]]:
    """Return the names of the known functions of torch.Tensor and of torch.nn.Module."""
    return {
        path: frozenset(name for at, _, name in (key.rpartition(".") for key in _owned()) if at == path)
        for path in _EXTENDED
    }


def _is_own(value: Any, package: str) -> bool:
    """Return whether the object is the package's own code. That includes wrappers that torch puts around its
    functions."""
    while value is not None:
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        if isinstance(code, CodeType) and not tamper._lies_in(package, code.co_filename):
            return False
        if not isinstance(code, CodeType) and not tamper._is_genuine(value, package):
            return callable(value) and type(value).__module__.partition(".")[0] in ("builtins", package)
        value = getattr(value, "__wrapped__", None)
    return True


def unpatch(before: Functions, names: Collection[str]) -> None:
    """Restore these functions as they were bound in `before`."""
    bound = {**dict(zip(_owned(), before.bound, strict=True)), **before.added}
    for name in names:
        if name in _owned():
            owner, attribute = _owned()[name]
        else:
            path, _, attribute = name.rpartition(".")
            owner = _EXTENDED[path]
        if name in bound:
            setattr(owner, attribute, bound[name])
        else:
            delattr(owner, attribute)


def bindings(function: Any) -> dict[str, Any]:
    """Return the objects to which a Python function's code refers by global names, directly or through other functions:
    "module.name" → object.

    The attributes of modules that the code uses, and the defaults of functions, are included. Functions of installed
    packages and of the standard library are not followed. A list, dict or set is copied.
    """
    found: dict[str, Any] = {}
    waiting = [_python(function)]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        where = current.__globals__.get("__name__", "?")
        found[f"the code of {where}.{current.__qualname__}"] = current.__code__
        found[f"the defaults of {where}.{current.__qualname__}"] = (current.__defaults__, current.__kwdefaults__)
        names = dict.fromkeys(names_in(current.__code__))
        for name in names:
            if name not in current.__globals__:
                continue
            value = current.__globals__[name]
            found[f"{where}.{name}"] = _copied_container(value)
            waiting += [_python(v) for v in _functions_of(value)]
            if isinstance(value, ModuleType) and value.__name__.partition(".")[0] != "torch":  # see `functions`
                inner = {n: vars(value)[n] for n in names if n in vars(value)}
                found |= {f"{value.__name__}.{n}": _copied_container(v) for n, v in inner.items()}
                waiting += [_python(v) for each in inner.values() for v in _functions_of(each)]
    return found


def is_same_binding(before: Any, after: Any) -> bool:
    """Return whether a name refers to the same object, or to a container of the same objects in the same positions."""
    if before is after:
        return True
    if type(before) is not type(after) or not isinstance(before, (list, dict, set, tuple)):
        return False
    if isinstance(before, set):
        return len(before) == len(after) and {id(x) for x in before} == {id(x) for x in after}
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(is_same_binding(v, after[k]) for k, v in before.items())
    return len(before) == len(after) and all(map(is_same_binding, before, after))


def _copied_container(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) and len(value) <= MOST_HELD else value


def _python(call: Any) -> FunctionType | None:
    while isinstance(call, functools.partial):
        call = call.func
    call = inspect.unwrap(call) if callable(call) else call
    call = getattr(call, "__func__", call)
    if not isinstance(call, (FunctionType, type)) and callable(call):
        call = getattr(type(call).__call__, "__func__", type(call).__call__)
    return call if isinstance(call, FunctionType) and not _is_library(call) else None


def _is_library(call: FunctionType) -> bool:
    path = call.__code__.co_filename
    return "site-packages" in path or path.startswith("<frozen") or tamper._lies_in("os", path)


def _functions_of(value: Any) -> list[Any]:
    if isinstance(value, type):
        return [v for v in vars(value).values() if isinstance(v, FunctionType)]
    return [value]


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code uses, including those in functions defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
