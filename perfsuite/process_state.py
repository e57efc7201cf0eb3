"""Read and restore what a call can change for the whole process: settings, modes, hooks, patched functions.

Nothing here is a list of known cases. Settings are all that torch can be asked for without an argument, patches are
all that torch lets a subclass override, and hooks are all that lie in torch's module of global hooks.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import inspect
import itertools
import operator
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules import module as module_hooks

from perfsuite import guard

State = Mapping[str, Any]
"""Name, in words → value, which is compared with ==; objects are compared by identity."""

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
"""Names that are not settings: paths, names, counts and messages, and functions that initialise something when
called."""
FLAGS = (
    "allow_tf32",
    "fp32_precision",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
"""Attributes of torch.backends that answer only when asked by name."""
AUTOCAST = ("cpu", "cuda")
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
GROUP = "torch.distributed's default process group"
UNDECIDED = object()
"""Value of a setting that is not decided yet: no later value counts as a change."""
MOST_HELD = 1000
"""Most items of a container that is compared by its items; a larger one is compared by identity."""
_EXTENDED: Mapping[str, Any] = {"torch.Tensor": torch.Tensor, "torch.nn.Module": torch.nn.Module}
"""Classes to which libraries add functions."""
TINY, HALF = 2.0**-1022, 0.5
"""Their product is subnormal."""


def set_profile(function: Any) -> None:
    """Set the profiler as `sys.setprofile` does. Also accepts what `sys.getprofile` returns for a profiler in C, which
    is not a function."""
    if function is None or callable(function):
        sys.setprofile(function)
    elif enable := getattr(function, "enable", None):  # of cProfile
        enable()


_WRITERS: dict[str, Callable[[Any], Any]] = {
    "torch's grad mode": torch.set_grad_enabled,
    # A device that is set is a function mode, also where it is the processor.
    "torch's default device": lambda device: torch.set_default_device(None if device.type == "cpu" else device),
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
"""Keys of torch's dispatcher whose kernels a call of an operator runs."""
_SETTERS = {
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
    "_get_overrideable_sdp_enabled": "_set_sdp_use_overrideable",
}
"""Getter of torch → its setter, where the setter's name does not follow from the getter's."""


# --- settings, modes and hooks --------------------------------------------------------------------------------------


def settings(names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the settings, modes and hooks that hold for every call in this thread: these names, or all. All take 0.1
    ms."""
    found: dict[str, Any] = {}
    readers = _readers()
    for name in readers if names is None else names:
        try:
            found[name] = readers[name]()
        except (RuntimeError, AttributeError):  # torch refuses the old name of a setting once the new one was used
            found[name] = None
    return found


@functools.cache
def _readers() -> Mapping[str, Callable[[], Any]]:
    readers: dict[str, Callable[[], Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is deprecated is left out
        for owner, prefixes in ASKED:
            for name in dir(owner):
                if name.startswith(prefixes) and name not in SKIPPED and _answers(getattr(owner, name)):
                    readers.setdefault(_words(name), getattr(owner, name))
    for device in AUTOCAST:
        readers[f"autocast on {device}"] = functools.partial(torch.is_autocast_enabled, device)
        readers[f"autocast's dtype on {device}"] = functools.partial(torch.get_autocast_dtype, device)
    for path, owner in _backends():
        for name in FLAGS:
            if name != "fp32_precision":
                readers[f"{path}.{name}"] = functools.partial(getattr, owner, name, None)
            elif not hasattr(owner, "allow_tf32"):
                readers[f"{path}.{name}"] = functools.partial(_chosen_precision, owner)
    for kind, module in (("modules", module_hooks), ("optimizers", sys.modules["torch.optim.optimizer"])):
        for name, held in vars(module).items():
            if name.startswith("_global_") and isinstance(held, dict):
                readers[f"hooks of all {kind} ({name})"] = functools.partial(_copied, held)
    readers |= {
        "torch's flushing of subnormal numbers": lambda: TINY * HALF == 0.0,  # the processor's: it holds for Python too
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


def _begin_group(before: Any) -> None:
    """Restore a default process group of this process alone. A group of several processes cannot be put back."""
    if before is not UNDECIDED and before.size() == 1:
        if dist.is_initialized():
            dist.destroy_process_group()
        begin_group("cuda" if torch.cuda.is_available() else "cpu")


def begin_group(device: str) -> None:
    """Initialise the default process group with this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs leave it out
    dist.init_process_group(group_backend(device), store=store, rank=0, world_size=1)


def group_backend(device: str) -> str:
    """Return the backends of a process group: NCCL for tensors on GPUs, gloo for others."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def _default_group() -> Any:
    return dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else UNDECIDED


def _replaced_operators() -> tuple[str, ...]:
    """Return the kernels of torch's own operators that were registered from Python, for devices and for gradients."""
    return _of_compute(frozenset(getattr(torch.library, "_impls", ())))


@functools.lru_cache(maxsize=1)
def _of_compute(kernels: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in kernels if name.startswith("aten/") and name.rpartition("/")[2] in COMPUTE))


def _answers(call: Any) -> bool:
    """Return whether the call gives a plain value without an argument."""
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
    """Return the chosen precision. Once it was set by its old name, the new name no longer says that nothing was
    chosen."""
    chosen = getattr(owner, "fp32_precision", None)
    return "ieee" if chosen == "none" else chosen


def _attention_order() -> Any:
    """Return attention's backends in the order that torch prefers; None where torch has no way to ask.

    torch decides on the order when attention first runs on a GPU. Until CUDA is initialised nothing is decided.
    Afterwards a tiny attention makes torch decide before anything is compared.
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
    """Return the settings that differ: name → words that say how."""
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
    """Set what differs from these settings, which another process sent."""
    now = settings(wanted)
    restore(wanted, [name for name in wanted if now[name] != wanted[name]])


def restore(before: State, names: Collection[str]) -> None:
    """Put these settings back as far as torch lets them be set."""
    for name in names:
        write = _writer(name)
        if write is not None:
            with contextlib.suppress(RuntimeError, TypeError):
                write(before[name])


def _writer(name: str) -> Callable[[Any], Any] | None:
    if name in _WRITERS:
        return _WRITERS[name]
    if name.startswith("torch.backends"):
        path, _, flag = name.rpartition(".")
        owner = dict(_backends()).get(path)
        return functools.partial(setattr, owner, flag) if owner is not None else None
    if name.startswith("hooks of all modules"):
        held = vars(module_hooks)[name.partition("(")[2].rstrip(")")]
        return functools.partial(_refill, held)
    read = _readers().get(name)
    getter = getattr(read, "__name__", "")
    setter = _SETTERS.get(getter, getter.replace("get_", "set_", 1).replace("is_", "set_", 1))
    for owner in (torch, torch._C):
        if setter != getter and callable(getattr(owner, setter, None)):
            found: Callable[[Any], Any] = getattr(owner, setter)
            return found
    return None


def _pop(length: Callable[[], int], pop: Callable[[], Any], count: int) -> None:
    while length() > count:
        pop()


def _refill(held: dict[Any, Any], items: tuple[tuple[Any, Any], ...]) -> None:
    held.clear()
    held.update(items)


# --- patches --------------------------------------------------------------------------------------------------------


class Functions(NamedTuple):
    """torch's functions and methods that a side or a reference could call, as they are bound at some time."""

    bound: tuple[Any, ...]
    """In the order of `_owned`."""
    added: Mapping[str, Any]
    """Names that other code added to torch.Tensor or torch.nn.Module, such as a plain test or transformers."""


def functions() -> Functions:
    """Return the functions as they are bound now; about 0.1 ms."""
    bound = tuple(itertools.chain.from_iterable(map(vars(owner).get, names) for owner, names in _by_owner()))
    return Functions(bound, _added())


def _added() -> dict[str, Any]:
    """Return what was added to a tensor or to all modules: it shadows what they inherit."""
    return {
        f"{path}.{name}": vars(owner)[name]
        for path, owner in _EXTENDED.items()
        for name in vars(owner).keys() - _attributes()[path]
    }


@functools.cache
def _by_owner() -> list[tuple[Any, list[str]]]:
    """Return the owners with their attributes, in the order of `_owned`."""
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
    """Return the functions that were since replaced by code that is not torch's own: name → words for a message."""
    now = functions()
    owned = _owned()
    found: dict[str, str] = {}
    for name, value in itertools.compress(
        zip(owned, now.bound, strict=True), map(operator.is_not, before.bound, now.bound)
    ):
        package = owned[name][0].__name__.partition(".")[0] if name.startswith("builtins") else "torch"
        if not _is_own(value, package):
            found[name] = f"replaces {name} by {guard._described(value)}"
    for name, value in now.added.items():
        if value is not before.added.get(name) and callable(value) and not _is_own(value, "torch"):
            found[name] = f"replaces {name} by {guard._described(value)}"
    return found


@functools.cache
def _attributes() -> Mapping[str, frozenset[str]]:
    """Return the known functions of a tensor and of all modules, without their paths."""
    return {
        path: frozenset(name for at, _, name in (key.rpartition(".") for key in _owned()) if at == path)
        for path in _EXTENDED
    }


def _is_own(value: Any, package: str) -> bool:
    """Return whether the object is the package's own code, as are the wrappers that torch itself puts around its
    functions."""
    while value is not None:
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        if isinstance(code, CodeType) and not guard._lies_in(package, code.co_filename):
            return False
        if not isinstance(code, CodeType) and not guard._is_genuine(value, package):
            return callable(value) and type(value).__module__.partition(".")[0] in ("builtins", package)
        value = getattr(value, "__wrapped__", None)
    return True


def unpatch(before: Functions, names: Collection[str]) -> None:
    """Bind these functions as they were."""
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
    """Return the objects that a Python function's code refers to by global names, and those that these refer to in
    turn: "module.name" → object.

    Attributes of modules that the code names are included, and the defaults of functions. Functions of torch's and of
    the standard library are not followed. A list, dict or set is copied.
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
    """Return whether a name refers to the same object, or to a container that holds the same objects in the same
    places."""
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
    return "site-packages" in path or path.startswith("<frozen") or guard._lies_in("os", path)


def _functions_of(value: Any) -> list[Any]:
    if isinstance(value, type):
        return [v for v in vars(value).values() if isinstance(v, FunctionType)]
    return [value]


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code uses, those of the functions defined in it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


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
"""Settings that are read around every call: those that most affect what other code computes."""


@contextmanager
def kept(*, quick: bool = False) -> Iterator[dict[str, str]]:
    """Collect what the block leaves changed, name → words, and restore it: all settings, modes, hooks and functions.

    With `quick` the settings of QUICK alone, in a few µs.
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
    """Return the states of all generators that no argument names: torch's, each GPU's, numpy's and Python's."""
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
    """Let each of these generators draw one more number for the block. A side that sets one to a constant, as by
    torch.manual_seed, then changes its state, even if an earlier call has set it already."""
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
    """Return Python's threads that live, by number."""
    return {thread.ident: thread for thread in threading.enumerate() if thread.ident is not None}
