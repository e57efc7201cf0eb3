"""Settings of Python and of the process that a call changes are named and restored."""

from __future__ import annotations

import atexit
import builtins
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
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch._inductor.config

from perfsuite.state import properties, python_state


def print_nothing(phase: str, info: dict[str, int]) -> None:
    """Do nothing in a callback of the garbage collection."""


CHANGES: dict[str, Callable[[], Any]] = {
    "environment variables": lambda: os.environ.pop("HOME", None),
    "signal handlers": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "filters of warnings": lambda: warnings.simplefilter("ignore"),
    "how warnings are shown": lambda: setattr(warnings, "showwarning", print),
    "timers that send signals": lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000.0),
    "the level of torch's logger": lambda: logging.getLogger("torch").setLevel(7),
    "what garbage collection calls": lambda: gc.callbacks.append(print_nothing),
    "torch's fast path of attention": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "the level below which nothing is logged": lambda: logging.disable(logging.INFO),
    "the level of the root logger": lambda: logging.root.setLevel(7),
    "the locale": lambda: locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8"),
    "Python's recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "Python's module search path": lambda: sys.path.insert(0, "/nowhere"),
    "Python's standard output": lambda: setattr(sys, "stdout", sys.__stderr__),
    "Python's standard error": lambda: setattr(sys, "stderr", sys.__stdout__),
    "what Python does with an error": lambda: setattr(sys, "excepthook", print),
    "thresholds of garbage collection": lambda: gc.set_threshold(1_000_000),
    "handlers of the root logger": lambda: logging.root.addHandler(logging.NullHandler()),
    "the tracing of Python's memory": lambda: tracemalloc.start(),
    "the stack size of Python's threads": lambda: threading.stack_size(1 << 20),
    "Python's builtins": lambda: setattr(builtins, "wave", 1),
    "the precision of decimal numbers": lambda: setattr(decimal.getcontext(), "prec", 5),
    "the timeout of new sockets": lambda: socket.setdefaulttimeout(7.0),
    "the mask of new files": lambda: os.umask(0o077),
    "numpy's handling of errors": lambda: np.seterr(all="raise"),
    "how torch prints tensors": lambda: torch.set_printoptions(precision=2),
    "how numpy prints arrays": lambda: np.set_printoptions(precision=2),
    "the configuration of torch.compile": lambda: setattr(torch._dynamo.config, "suppress_errors", True),
    "the configuration of Inductor": lambda: setattr(torch._inductor.config, "max_autotune", True),
    "torch's hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(print, print).__enter__(),
    "torch's profiler": lambda: torch.autograd.profiler.profile().__enter__(),
    "how tensors are shared with other processes": lambda: torch.multiprocessing.set_sharing_strategy("file_system"),
    "how torch converts the parameters of modules": lambda: torch.__future__.set_overwrite_module_params_on_conversion(
        True
    ),
    "the order of torch's einsum": lambda: setattr(torch.backends.opt_einsum, "strategy", "greedy"),
}


LASTING = {"the process's priority", "functions that are called at exit"}
"""Settings that a test cannot restore."""


def test_each_setting_is_changed_by_a_test() -> None:
    assert CHANGES.keys() == python_state.SETTINGS.keys() - LASTING


def test_a_change_that_cannot_be_restored_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    with python_state.kept() as changed:
        atexit.register(int)
        monkeypatch.setattr(os, "getpriority", lambda which, who: priority + 1)
        monkeypatch.setattr(os, "setpriority", refused)
    assert set(changed) == LASTING


def test_a_function_that_torch_registers_at_exit_is_not_reported() -> None:
    function = torch.utils.data.get_worker_info
    with python_state.kept() as changed:
        atexit.register(function)
    atexit.unregister(function)
    assert changed == []


@pytest.mark.parametrize("module", ["numpy", python_state.DYNAMO])
def test_importing_a_module_is_not_reported(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = sys.modules[module]
    monkeypatch.delitem(sys.modules, module)
    with python_state.kept() as changed:
        sys.modules[module] = imported
    assert changed == []


def refused(*given: Any) -> None:
    raise PermissionError


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_reported_and_undone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    read, _ = python_state.SETTINGS[name]
    before = read()
    with python_state.kept() as changed:
        CHANGES[name]()
    assert changed == [name]
    assert read() == before


@pytest.mark.parametrize("name", CHANGES)
def test_quick_skips_settings_that_are_slow_to_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    with python_state.kept():
        with python_state.kept(quick=True) as changed:
            CHANGES[name]()
        assert changed == ([] if name in python_state.SLOW else [name])


def test_environment_variables_that_compilers_set_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with python_state.kept() as changed:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    assert changed == []


def test_marks_describe_nested_inputs() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    found = dict(properties.of({"net": net, "xs": [torch.ones(1), 3]}))
    assert found == {
        "the training mode of net": True,
        "the number of hooks on net": 0,
        "the names of what is saved of net": [],
        "the training mode of net.0": True,
        "the number of hooks on net.0": 0,
        "the names of what is saved of net.0": ["bias", "weight"],
        "requires_grad of net.0.weight": True,
        "the tensor under net.0.weight": "its own",
        "requires_grad of xs[0]": False,
        "the number of hooks on xs[0]": 0,
    }
