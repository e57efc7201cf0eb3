"""Reads and restores what a call can change for the rest of the program outside of torch: Python, numpy, the process.

Imports change these too, so they are compared around calls alone.
"""

from __future__ import annotations

import contextlib
import gc
import locale
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]
"""How it is read, and how it is put back."""

OF_COMPILERS = ("CUDA_", "INDUCTOR", "KMP_", "OMP_", "PYTORCH_", "TORCH", "TRITON", "XLA_")
"""Prefixes of environment variables that compilers and libraries set when they first run."""


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
    warnings.resetwarnings()  # which makes Python look at them anew
    warnings.filters[:] = before  # type: ignore[index]  # a list, whatever typeshed calls it


def _numpy_errors() -> Any:
    numpy = sys.modules.get("numpy")
    return dict(numpy.geterr()) if numpy is not None else None


def _set_numpy_errors(before: Any) -> None:
    if before is not None:
        sys.modules["numpy"].seterr(**before)


def _print_options() -> Mapping[str, Any]:
    return dict(vars(torch._tensor_str.PRINT_OPTS))


SETTINGS: Mapping[str, Setting] = {
    "environment variables": (_environment, _set_environment),
    "signal handlers": (_handlers, _set_handlers),
    "filters of warnings": (lambda: list(warnings.filters), _set_filters),
    "the level below which nothing is logged": (lambda: logging.root.manager.disable, logging.disable),
    "the level of the root logger": (lambda: logging.root.level, logging.root.setLevel),
    "the locale": (lambda: locale.setlocale(locale.LC_ALL), lambda before: locale.setlocale(locale.LC_ALL, before)),
    "Python's recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "Python's module search path": (lambda: list(sys.path), lambda before: sys.path.__setitem__(slice(None), before)),
    "Python's standard output": (lambda: sys.stdout, lambda before: setattr(sys, "stdout", before)),
    "Python's standard error": (lambda: sys.stderr, lambda before: setattr(sys, "stderr", before)),
    "what Python does with an error": (lambda: sys.excepthook, lambda before: setattr(sys, "excepthook", before)),
    "thresholds of garbage collection": (gc.get_threshold, lambda before: gc.set_threshold(*before)),
    "numpy's handling of errors": (_numpy_errors, _set_numpy_errors),
    "how torch prints tensors": (_print_options, lambda before: vars(torch._tensor_str.PRINT_OPTS).update(before)),
    "the order of torch's einsum": (
        lambda: torch.backends.opt_einsum.strategy,
        lambda before: setattr(torch.backends.opt_einsum, "strategy", before),
    ),
}


@contextmanager
def kept() -> Iterator[list[str]]:
    """Collects the names of what the block leaves changed, and puts it back."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, (read, write) in SETTINGS.items():
            if read() != before[name]:
                changed.append(name)
                with contextlib.suppress(ValueError):  # signal handlers are set in the main thread alone
                    write(before[name])
