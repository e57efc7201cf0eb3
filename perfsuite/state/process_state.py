"""Read and restore the global state that a call can change: settings, modes, hooks and patched functions.

Most settings are found, not listed: every getter of torch without arguments, and every dict of global hooks in torch's
modules. `patches` handles the functions.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules import module as module_hooks

from perfsuite.state.patches import functions, patched, unpatch

State = Mapping[str, Any]
"""Description of a setting → value. Plain values are compared with ==, other objects by identity."""

ASKED = ((torch, ("get_", "is_", "are_")), (torch._C, ("_get_", "_is_", "_are_", "_len_")))
SKIPPED = (
    "get_file_path",
    "get_num_interop_threads",
    "get_rng_state",
    "_get_sdp_priority_order",
    "is_vulkan_available",
    "_get_caught_jit_exception_class_name",
    "_get_caught_jit_exception_original_msg",
    "_get_DTensor_sharding_propagator_cache_stats",
    "_get_thread_name",
)
"""Getters that do not return settings, but paths, names, counts or messages, or that initialise something."""
FLAGS = (
    "allow_tf32",
    "fp32_precision",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
"""Settings that are attributes of torch.backends and of its submodules."""
AUTOCAST = ("cpu", "cuda")
HOOKED = (("modules", module_hooks), ("optimizers", sys.modules["torch.optim.optimizer"]))
"""Kinds of objects that have global hooks, each with the module of torch that holds the hooks."""
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
GROUP = "torch.distributed's default process group"
UNDECIDED = object()
"""Value of a setting that is not decided yet. No later value counts as a change."""
TINY, HALF = 2.0**-1022, 0.5
"""Numbers whose product is subnormal."""


def set_profile(function: Any) -> None:
    """Set the profile function as `sys.setprofile` does. Also accept the object that `sys.getprofile` returns for a
    profiler in C, which is not callable."""
    if function is None or callable(function):
        sys.setprofile(function)
    elif enable := getattr(function, "enable", None):  # cProfile
        enable()


_WRITERS: dict[str, Callable[[Any], Any]] = {
    "torch's grad mode": torch.set_grad_enabled,
    # Setting a default device pushes a function mode, even if the device is the CPU.
    "torch's default device": lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    "torch's any autocast enabled": lambda on: None if on else _end_autocast(),
    "torch's anomaly detection": torch.autograd.set_detect_anomaly,
    "torch's deterministic algorithms": torch.use_deterministic_algorithms,
    "torch's flushing of subnormal numbers": torch.set_flush_denormal,
    "Python's garbage collection": lambda on: gc.enable() if on else gc.disable(),
    "Python's trace function": sys.settrace,
    "Python's profile function": set_profile,
    "the trace function of new threads": threading.settrace,
    "the profile function of new threads": threading.setprofile,
    "Python's switch interval": sys.setswitchinterval,
    "the working directory": os.chdir,
    "the processor's cores of this process": lambda cores: os.sched_setaffinity(0, cores),
    **{f"autocast on {device}": functools.partial(torch.set_autocast_enabled, device) for device in AUTOCAST},
    **{f"autocast's dtype on {device}": functools.partial(torch.set_autocast_dtype, device) for device in AUTOCAST},
    GROUP: lambda before: _begin_group(before),
    "torch's sdp priority order": lambda order: torch._C._set_sdp_priority_order(list(order)),
    "torch's number of function modes": lambda count: _pop(
        torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack, count
    ),
    "torch's number of dispatch modes": lambda count: _pop(
        torch._C._len_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack, count
    ),
}
_NAMES = {
    "is_grad_enabled": "grad mode",
    "is_anomaly_enabled": "anomaly detection",
    "are_deterministic_algorithms_enabled": "deterministic algorithms",
    "_len_torch_dispatch_stack": "number of dispatch modes",
    "_len_torch_function_stack": "number of function modes",
}
COMPUTE = ("CPU", "CUDA", "Autograd", "AutogradCPU", "AutogradCUDA")
"""Dispatch keys of torch whose kernels a call of an operator may run."""
_SETTERS = {
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
    "_get_overrideable_sdp_enabled": "_set_sdp_use_overrideable",
}
"""Getter of torch → its setter, if the setter's name cannot be derived from the getter's."""


# --- settings, modes and hooks --------------------------------------------------------------------------------------


def settings(names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the settings, modes and hooks that affect every call in this thread: those with these names, or all.
    Reading all takes 0.1 ms."""
    found: dict[str, Any] = {}
    readers = _readers()
    for name in readers if names is None else names:
        try:
            found[name] = readers[name]()
        # torch refuses the old name of a setting after the new one was used. The working directory may be removed.
        except (RuntimeError, AttributeError, OSError):
            found[name] = None
    return found


@functools.cache
def _readers() -> Mapping[str, Callable[[], Any]]:
    readers: dict[str, Callable[[], Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # leaves out deprecated getters
        for owner, prefixes in ASKED:
            for name in dir(owner):
                if name.startswith(prefixes) and name not in SKIPPED and _answers(getattr(owner, name)):
                    readers.setdefault(_words(name), getattr(owner, name))
    readers |= _readers_of_settings()
    readers |= {
        "torch's flushing of subnormal numbers": lambda: TINY * HALF == 0.0,  # a CPU flag, which affects Python too
        "torch's sdp priority order": _attention_order,
        "hooks on saved tensors": getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: None),
        "Python's garbage collection": gc.isenabled,
        "Python's trace function": sys.gettrace,
        "Python's profile function": sys.getprofile,
        "the trace function of new threads": threading.gettrace,
        "the profile function of new threads": threading.getprofile,
        "Python's switch interval": sys.getswitchinterval,
        "the working directory": os.getcwd,
        "the processor's cores of this process": lambda: tuple(sorted(os.sched_getaffinity(0))),
        "the Python kernels of torch's operators": _replaced_operators,
        "the handler of SIGALRM": lambda: signal.getsignal(signal.SIGALRM),
        GROUP: _default_group,
    }
    return readers


def _readers_of_settings() -> dict[str, Callable[[], Any]]:
    """Return name → reader of autocast, of the flags of torch's backends, and of hooks that apply to all modules."""
    readers: dict[str, Callable[[], Any]] = {}
    for device in AUTOCAST:
        readers[f"autocast on {device}"] = functools.partial(torch.is_autocast_enabled, device)
        readers[f"autocast's dtype on {device}"] = functools.partial(torch.get_autocast_dtype, device)
    for path, owner in _backends():
        for name in FLAGS:
            if name != "fp32_precision":
                readers[f"{path}.{name}"] = functools.partial(getattr, owner, name, None)
            elif not hasattr(owner, "allow_tf32"):
                readers[f"{path}.{name}"] = functools.partial(_chosen_precision, owner)
    for kind, module in HOOKED:
        for name, held in vars(module).items():
            if name.startswith("_global_") and isinstance(held, dict):
                readers[f"hooks of all {kind} ({name})"] = functools.partial(_copied, held)
    return readers


def _begin_group(before: Any) -> None:
    """Restore a default process group that contains only this process. A group of several processes cannot be
    restored."""
    if before is not UNDECIDED and before.size() == 1:
        if dist.is_initialized():
            dist.destroy_process_group()
        begin_group("cuda" if torch.cuda.is_available() else "cpu")


def begin_group(device: str) -> None:
    """Initialise the default process group with only this process."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs leave it out
    dist.init_process_group(group_backend(device), store=store, rank=0, world_size=1)


def group_backend(device: str) -> str:
    """Return the backends of a process group: NCCL for tensors on GPUs, gloo for others."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def _default_group() -> Any:
    return dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else UNDECIDED


def _replaced_operators() -> tuple[str, ...]:
    """Return the kernels of torch's own operators that Python code has registered, for devices and for gradients."""
    return _of_compute(frozenset(getattr(torch.library, "_impls", ())))


@functools.lru_cache(maxsize=1)
def _of_compute(kernels: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in kernels if name.startswith("aten/") and name.rpartition("/")[2] in COMPUTE))


def _answers(call: Any) -> bool:
    """Return whether the call returns a plain value without arguments."""
    if not callable(call) or isinstance(call, type):
        return False
    try:
        return _is_plain(call())
    except Exception:
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) or type(value).__module__.startswith("torch._C")


def _words(name: str) -> str:
    if name in _NAMES:
        return f"torch's {_NAMES[name]}"
    plain = name.removeprefix("_")
    for prefix in ("get_", "is_", "are_"):
        plain = plain.removeprefix(prefix)
    return f"torch's {plain.replace('_', ' ')}"


def _backends() -> Iterator[tuple[str, Any]]:
    backends: Any = torch.backends
    yield "torch.backends", backends
    for path in ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv"):
        owner = functools.reduce(lambda at, name: getattr(at, name, None), path.split("."), backends)
        if owner is not None:
            yield f"torch.backends.{path}", owner


def _chosen_precision(owner: Any) -> Any:
    """Return the chosen precision, with "none" as "ieee". After it was set by its old name, the new name no longer
    returns "none" if nothing is chosen."""
    chosen = getattr(owner, "fp32_precision", None)
    return "ieee" if chosen == "none" else chosen


def _attention_order() -> Any:
    """Return the backends of attention in torch's order of preference; None if torch has no getter for it.

    torch chooses the order when attention first runs on a GPU. Before CUDA is initialised, the order is UNDECIDED.
    Afterwards, a tiny attention call makes torch choose before anything is compared.
    """
    ask = getattr(torch._C, "_get_sdp_priority_order", None)
    if ask is None:
        return None
    if torch.cuda.is_available():
        if not torch.cuda.is_initialized():
            return UNDECIDED
        _decide_attention_order()
    return tuple(ask())


@functools.cache
def _decide_attention_order() -> None:
    x = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device="cuda")
    torch._fused_sdp_choice(x, x, x)


def _copied(held: dict[Any, Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple(held.items())


def differences(before: State, after: State) -> dict[str, str]:
    """Return the settings that differ: name → description of the change."""
    return {
        name: f"sets {name} to {_shown(after[name])} (before: {_shown(value)})"
        for name, value in before.items()
        if name in after and not _same(value, after[name])
    }


def _same(a: Any, b: Any) -> bool:
    if a is b or a is UNDECIDED:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and _is_plain(a) and bool(a == b)


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return f"{len(value)} hooks" if len(value) > 1 else f"{getattr(value[0][1], '__qualname__', value[0][1])}"
    if isinstance(value, (FunctionType, type)):
        return value.__qualname__
    if dist.is_available() and isinstance(value, dist.ProcessGroup):
        return f"one of {value.size()}"
    return "none" if value is UNDECIDED or value == () else str(value)


def sendable_settings() -> State:
    """Return the settings that can be sent to another process, which has not read this one's conftest files."""
    return {n: v for n, v in settings().items() if isinstance(v, (bool, int, float, str))}


def take(wanted: State) -> None:
    """Apply these settings, which another process sent, where they differ."""
    now = settings(wanted)
    restore(wanted, [name for name in wanted if now[name] != wanted[name]])


def restore(before: State, names: Collection[str]) -> None:
    """Restore these settings, as far as torch allows it."""
    for name in names:
        write = _writer(name)
        if write is not None:
            with contextlib.suppress(RuntimeError, TypeError, OSError, ValueError):
                write(before[name])


def _writer(name: str) -> Callable[[Any], Any] | None:
    if name in _WRITERS:
        return _WRITERS[name]
    if name.startswith("torch.backends"):
        path, _, flag = name.rpartition(".")
        owner = dict(_backends()).get(path)
        return functools.partial(setattr, owner, flag) if owner is not None else None
    for kind, module in HOOKED:
        if name.startswith(f"hooks of all {kind}"):
            return functools.partial(_refill, vars(module)[name.partition("(")[2].rstrip(")")])
    read = _readers().get(name)
    getter = getattr(read, "__name__", "")
    setter = _SETTERS.get(getter, getter.replace("get_", "set_", 1).replace("is_", "set_", 1))
    for owner in (torch, torch._C):
        if setter != getter and callable(getattr(owner, setter, None)):
            found: Callable[[Any], Any] = getattr(owner, setter)
            return found
    return None


def _end_autocast() -> None:
    for device in AUTOCAST:
        torch.set_autocast_enabled(device, False)


def _pop(length: Callable[[], int], pop: Callable[[], Any], count: int) -> None:
    while length() > count:
        pop()


def _refill(held: dict[Any, Any], items: tuple[tuple[Any, Any], ...]) -> None:
    held.clear()
    held.update(items)


# --- around calls ---------------------------------------------------------------------------------------------------

QUICK = (
    GROUP,
    "torch's float32 matmul precision",
    "torch's default dtype",
    "torch's default device",
    "torch's grad mode",
    "torch's num threads",
    "torch's deterministic algorithms",
    "torch's anomaly detection",
    "torch's flushing of subnormal numbers",
    "torch's number of function modes",
    "torch's number of dispatch modes",
    "torch.backends.cudnn.allow_tf32",
    "torch's cudnn benchmark",
    "torch's cudnn deterministic",
    "Python's garbage collection",
    "Python's trace function",
    "Python's profile function",
)
"""Settings that are read around every call: those that most affect the results of other code."""


@contextmanager
def kept(*, quick: bool = False) -> Iterator[dict[str, str]]:
    """Collect the global state that the block leaves changed, name → words, and restore it: all settings, modes, hooks
    and functions.

    With `quick`, only the settings in QUICK, in a few µs.
    """
    changed: dict[str, str] = {}
    before, bound = settings(QUICK if quick else None), None if quick else functions()
    try:
        yield changed
    finally:
        changed |= differences(before, settings(before))
        restore(before, changed)
        if bound is not None and (replaced := patched(bound)):
            unpatch(bound, replaced)
            changed |= replaced


# --- random states and threads --------------------------------------------------------------------------------------


def generators() -> dict[str, Any]:
    """Return the states of all global random generators: torch's, each GPU's, NumPy's and Python's."""
    states: dict[str, Any] = {
        "torch's random state": _bytes(torch.get_rng_state()),
        "Python's random state": str(hash(random.getstate())),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            states[f"the random state of cuda:{number}"] = _bytes(torch.cuda.get_rng_state(number))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy's random state"] = str(hash((kind, keys.tobytes(), *rest)))
    return states


@contextmanager
def advanced_generators() -> Iterator[None]:
    """Advance each global random generator by one number for the block. A side that sets one to a constant state, as
    torch.manual_seed does, then changes its state, even if an earlier call has already set it."""
    numpy, cuda = sys.modules.get("numpy"), torch.cuda.is_available() and torch.cuda.is_initialized()
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_gpus = torch.cuda.get_rng_state_all() if cuda else []
    of_numpy = numpy.random.get_state() if numpy is not None else None
    torch.rand(())
    random.random()
    for number in range(len(of_gpus)):
        torch.rand((), device=f"cuda:{number}")
    if numpy is not None:
        numpy.random.random()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _bytes(state: torch.Tensor) -> str:
    return str(hash(state.numpy().tobytes()))


def threads() -> dict[int, threading.Thread]:
    """Return the running Python threads, by thread identifier."""
    return {thread.ident: thread for thread in threading.enumerate() if thread.ident is not None}
