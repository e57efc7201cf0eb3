"""Read and restore global state outside of torch that a call can change: of Python, NumPy and the process.

Imports change this state too, so it is compared only around calls.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import decimal
import gc
import locale
import logging
import os
import signal
import socket
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest import mock

import torch

Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]
"""Functions that read a setting and restore it."""

ABSENT = object()
"""Value of a setting whose module is not imported. Importing the module later does not count as a change."""
DYNAMO, INDUCTOR = "torch._dynamo.config", "torch._inductor.config"
OF_COMPILERS = ("CUDA_", "INDUCTOR", "KMP_", "OMP_", "PYTORCH_", "TORCH", "TRITON", "XLA_")
"""Prefixes of environment variables that compilers and libraries set when they first run."""

REGISTER = atexit.register
of_torch: list[Callable[..., Any]] = []
"""Functions of torch that were registered with atexit inside `kept`. A DataLoader registers one for each persistent
worker."""


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_COMPILERS)}


def _set_environment(before: Mapping[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _handlers() -> Mapping[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_handlers(before: Mapping[int, Any]) -> None:
    for number, handler in _handlers().items():
        if handler is not before.get(number) and before.get(number) is not None:
            signal.signal(number, before[number])


def _set_filters(before: Any) -> None:
    warnings.resetwarnings()  # makes Python read the filters again
    warnings.filters[:] = before  # type: ignore[index]  # a list, whatever typeshed calls it


def _of_numpy(read: str) -> Any:
    numpy = sys.modules.get("numpy")
    return dict(getattr(numpy, read)()) if numpy is not None else ABSENT


def _set_numpy_errors(before: Mapping[str, Any]) -> None:
    sys.modules["numpy"].seterr(**before)


def _set_numpy_printing(before: Mapping[str, Any]) -> None:
    sys.modules["numpy"].set_printoptions(**before)


def _configuration(module: str) -> Any:
    return sys.modules[module].get_config_copy() if module in sys.modules else ABSENT


def _set_configuration(module: str, before: Mapping[str, Any]) -> None:
    now = _configuration(module)
    for option, value in before.items():
        if now[option] != value:
            setattr(sys.modules[module], option, value)


def _saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _pop_saved_tensors_hooks(before: Any) -> None:
    while _saved_tensors_hooks() not in (None, before):
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    if str(getattr(function, "__module__", "")).startswith("torch."):
        of_torch.append(function)
    return REGISTER(function, *args, **kwargs)


def _mask_of_files() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _conversions() -> tuple[bool, bool]:
    future = torch.__future__
    return future.get_overwrite_module_params_on_conversion(), future.get_swap_module_params_on_conversion()


def _set_conversions(before: tuple[bool, bool]) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(before[0])
    torch.__future__.set_swap_module_params_on_conversion(before[1])


def _set_decimals(before: tuple[int, str]) -> None:
    decimal.getcontext().prec, decimal.getcontext().rounding = before


def _trace_memory(before: bool) -> None:
    (tracemalloc.start if before else tracemalloc.stop)()


def _remove_builtins(before: frozenset[str]) -> None:
    for name in vars(builtins).keys() - before:
        delattr(builtins, name)


def _print_options() -> Mapping[str, Any]:
    return dict(vars(torch._tensor_str.PRINT_OPTS))


def _timers() -> tuple[bool, ...]:
    return tuple(any(signal.getitimer(kind)) for kind in TIMERS)


def _stop_timers(before: tuple[bool, ...]) -> None:
    for kind, ran in zip(TIMERS, before, strict=True):
        if not ran:
            signal.setitimer(kind, 0)


TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

SETTINGS: Mapping[str, Setting] = {
    "environment variables": (_environment, _set_environment),
    "signal handlers": (_handlers, _set_handlers),
    "filters of warnings": (lambda: list(warnings.filters), _set_filters),
    "how warnings are shown": (
        lambda: warnings.showwarning,
        lambda before: setattr(warnings, "showwarning", before),
    ),
    "timers that send signals": (_timers, _stop_timers),
    "the level of torch's logger": (
        lambda: logging.getLogger("torch").level,
        lambda before: logging.getLogger("torch").setLevel(before),
    ),
    "what garbage collection calls": (
        lambda: list(gc.callbacks),
        lambda before: gc.callbacks.__setitem__(slice(None), before),
    ),
    "torch's fast path of attention": (
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    "the level below which nothing is logged": (lambda: logging.root.manager.disable, logging.disable),
    "handlers of the root logger": (
        lambda: list(logging.root.handlers),
        lambda before: logging.root.handlers.__setitem__(slice(None), before),
    ),
    "the level of the root logger": (lambda: logging.root.level, logging.root.setLevel),
    "the locale": (lambda: locale.setlocale(locale.LC_ALL), lambda before: locale.setlocale(locale.LC_ALL, before)),
    "Python's recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "Python's module search path": (lambda: list(sys.path), lambda before: sys.path.__setitem__(slice(None), before)),
    "Python's standard output": (lambda: sys.stdout, lambda before: setattr(sys, "stdout", before)),
    "Python's standard error": (lambda: sys.stderr, lambda before: setattr(sys, "stderr", before)),
    "what Python does with an error": (lambda: sys.excepthook, lambda before: setattr(sys, "excepthook", before)),
    "thresholds of garbage collection": (gc.get_threshold, lambda before: gc.set_threshold(*before)),
    "the tracing of Python's memory": (tracemalloc.is_tracing, _trace_memory),
    "the stack size of Python's threads": (threading.stack_size, threading.stack_size),
    "Python's builtins": (lambda: frozenset(vars(builtins)), _remove_builtins),
    "the precision of decimal numbers": (
        lambda: (decimal.getcontext().prec, decimal.getcontext().rounding),
        _set_decimals,
    ),
    "the timeout of new sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "the mask of new files": (_mask_of_files, os.umask),
    "the process's priority": (
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda before: os.setpriority(os.PRIO_PROCESS, 0, before),
    ),
    "functions that are called at exit": (lambda: atexit._ncallbacks() - len(of_torch), lambda before: None),
    "numpy's handling of errors": (lambda: _of_numpy("geterr"), _set_numpy_errors),
    "how numpy prints arrays": (lambda: _of_numpy("get_printoptions"), _set_numpy_printing),
    "how torch prints tensors": (_print_options, lambda before: vars(torch._tensor_str.PRINT_OPTS).update(before)),
    "the configuration of torch.compile": (
        lambda: _configuration(DYNAMO),
        lambda before: _set_configuration(DYNAMO, before),
    ),
    "the configuration of Inductor": (
        lambda: _configuration(INDUCTOR),
        lambda before: _set_configuration(INDUCTOR, before),
    ),
    "torch's hooks on saved tensors": (_saved_tensors_hooks, _pop_saved_tensors_hooks),
    "torch's profiler": (
        torch._C._autograd._profiler_enabled,
        lambda before: None if before else torch._C._autograd._disable_profiler(),
    ),
    "how tensors are shared with other processes": (
        torch.multiprocessing.get_sharing_strategy,
        torch.multiprocessing.set_sharing_strategy,
    ),
    "how torch converts the parameters of modules": (_conversions, _set_conversions),
    "the order of torch's einsum": (
        lambda: torch.backends.opt_einsum.strategy,
        lambda before: setattr(torch.backends.opt_einsum, "strategy", before),
    ),
}


SLOW = ("the configuration of torch.compile", "the configuration of Inductor")
"""Settings that take milliseconds to read."""


@contextmanager
def kept(*, quick: bool = False) -> Iterator[list[str]]:
    """Collect the names of the settings that the block leaves changed, and restore them. If `quick`, leave out those in
    SLOW."""
    before = {name: read() for name, (read, _) in SETTINGS.items() if not (quick and name in SLOW)}
    changed: list[str] = []
    try:
        with mock.patch.object(atexit, "register", _register):
            yield changed
    finally:
        for name, (read, write) in SETTINGS.items():
            if before.get(name, ABSENT) is not ABSENT and read() != before[name]:
                changed.append(name)
                # Signal handlers can only be set in the main thread, and a lowered priority cannot be raised again.
                with contextlib.suppress(ValueError, OSError):
                    write(before[name])
