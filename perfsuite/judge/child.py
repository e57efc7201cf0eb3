"""Source of the processes that run the modules. They receive the inputs, but no expected value, clock or rule.

`python -c` gets this source, with that of the sandbox as an argument. The process that it starts imports torch and, on
request, forks a process for each module; it runs no module itself. A forked process reads one request from each line
and answers it with a line of reply. A reply says that the request is done, which proves nothing: the judging process
checks the outputs, which are in memory that both processes share.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.util
import io
import json
import mmap
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

MOST_CHARACTERS, MOST_OUTPUTS = 1000, 100
"""Most characters of an exception's message, and most outputs whose forms are named, in a reply."""


class Memory:
    """Memory that is shared with the judging process, which makes it grow."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.held: Any = b""

    def bytes(self, end: int) -> Any:
        """Return the whole memory, mapped at least up to byte `end`."""
        if len(self.held) < end:
            self.held = mmap.mmap(self.file, os.fstat(self.file).st_size)
        return self.held


class Handle(ctypes.Structure):
    """A CUDA IPC handle, which identifies GPU memory that another process has allocated."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class Served:
    """The module of this process, and the requests that it answers."""

    def __init__(self, memory: Memory, device: str) -> None:
        import torch

        self.torch: Any = torch
        self.memory, self.device = memory, device
        self.model: Any = None
        self.last: list[Any] = []
        self.shared: dict[str, Any] = {}

    def tensor(self, at: dict[str, Any]) -> Any:
        """Return the tensor at a place in the shared memory, which is on the host or on the GPU."""
        torch = self.torch
        dtype = getattr(torch, at["dtype"])
        size = at["count"] * torch.empty(0, dtype=dtype).element_size()
        begin, end = at["offset"], at["offset"] + size
        if "handle" in at:
            whole = self.device_bytes(at["handle"], at["bytes"])[begin:end]
        elif size:
            whole = torch.frombuffer(self.memory.bytes(end), dtype=torch.uint8, count=size, offset=begin)
        else:
            whole = torch.empty(0, dtype=torch.uint8)
        held = whole.view(dtype)
        return held.as_strided(at["shape"], at["stride"]) if size else held.view(at["shape"])

    def device_bytes(self, handle: str, size: int) -> Any:
        """Return the bytes of the shared GPU memory with this IPC handle, which is opened once."""
        torch = self.torch
        if handle not in self.shared:
            torch.cuda.synchronize()  # gives this thread a context
            address, opened = ctypes.c_uint64(), Handle.from_buffer_copy(base64.b64decode(handle))
            code = ctypes.CDLL("libcuda.so.1").cuIpcOpenMemHandle_v2(ctypes.byref(address), opened, 1)
            if code:
                raise RuntimeError(f"cuIpcOpenMemHandle returns {code}")
            interface = {"shape": (size,), "typestr": "|u1", "data": (address.value, False), "version": 3}
            at = type("Bytes", (), {"__cuda_array_interface__": interface})()
            self.shared[handle] = torch.as_tensor(at, device=self.device)
        return self.shared[handle]

    def value(self, of: Any) -> Any:
        """Return an argument, which may be nested lists, tuples and dicts."""
        if "tensor" in of:
            return self.tensor(of["tensor"])
        if "list" in of:
            return [self.value(v) for v in of["list"]]
        if "tuple" in of:
            return tuple(self.value(v) for v in of["tuple"])
        if "dict" in of:
            return {self.value(key): self.value(v) for key, v in of["dict"]}
        return self.read(of["pickled"])

    def read(self, at: list[int]) -> Any:
        """Return the object that the judging process has pickled at `at`, (begin, end) in bytes."""
        begin, end = at
        return self.torch.load(io.BytesIO(self.memory.bytes(end)[begin:end]), weights_only=False)

    def build(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import the file and build the module. Return whether the tensors of its state dict have the reference's names
        and shapes, and the names of other tensors that it keeps.

        If they have, the reference's values are loaded. Convolutions may use TF32, as they do by PyTorch's default,
        only if the request allows it.
        """
        torch = self.torch
        torch.backends.cudnn.allow_tf32 = request["tf32"]
        spec = importlib.util.spec_from_file_location(request["module"], request["path"])
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[request["module"]] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        arguments = self.read(request["init"])
        seed_generators(request["seed"])
        self.model = getattr(module, request["name"])(*arguments)
        if hasattr(self.model, "to"):
            self.model = self.model.to(self.device)
        given = {name: self.value(v).to(self.device) for name, v in request["state"].items()}
        own = tensors_of_state(self.model) if hasattr(self.model, "state_dict") else {}
        is_lazy = torch.nn.parameter.is_lazy  # it gets its shape from the reference's value
        same = own.keys() == given.keys() and all(is_lazy(t) or t.shape == given[n].shape for n, t in own.items())
        if same and own:
            self.model.load_state_dict(given, strict=False)  # extra state that is no tensor stays its own
        if request.get("compile"):
            self.model = torch.compile(self.model)
        return {"same_parameters": same, "kept": kept_beside(torch, self.model, own)[:MOST_OUTPUTS]}

    def prepare(self, request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Read the request and return a function that runs it, to be called once the judging process sends "go"."""
        torch = self.torch
        outputs = [[self.tensor(at) for at in call] for call in request["outputs"]]
        if request["do"] == "copy":
            return lambda: self.copies(outputs)
        inputs = [[self.value(of) for of in call] for call in request["inputs"]]
        inputs = inputs * len(outputs) if request["again"] else inputs
        self.wait()

        def run() -> dict[str, Any]:
            with torch.no_grad():
                for given, places in zip(inputs, outputs, strict=True):
                    named = dict(leaves_of(self.model(*given)))
                    as_asked = sorted(named) == sorted(request["paths"])
                    leaves = [named[path] for path in request["paths"]] if as_asked else [*named.values()]
                    self.last = leaves
                    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                        return {"forms": [str(type(leaf).__name__) for leaf in leaves[:MOST_OUTPUTS]]}
                    forms = [[list(leaf.shape), str(leaf.dtype).removeprefix("torch.")] for leaf in leaves]
                    if forms != request["forms"]:
                        return {"forms": forms[:MOST_OUTPUTS]}
                    if not as_asked:
                        return {"paths": [*named]}
                    for place, leaf in zip(places, leaves, strict=True):
                        place.copy_(leaf)
            self.wait()
            return {}

        return run

    def copies(self, outputs: list[list[Any]]) -> dict[str, Any]:
        """Copy the outputs of the last call, as often as calls would copy theirs."""
        for places in outputs:
            for place, leaf in zip(places, self.last, strict=True):
                place.copy_(leaf)
        self.wait()
        return {}

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def trace(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the PyTorch operations that a call runs."""
        inputs = [self.value(of) for of in request["inputs"]]
        inputs = [v.to(self.device) if isinstance(v, self.torch.Tensor) else v for v in inputs]
        return {"operations": operations(self.torch, lambda: self.model(*inputs))}


def operations(torch: Any, call: Callable[[], Any]) -> list[list[Any]]:
    """Return the PyTorch operations that the call runs, except views: [name, shapes of its tensor arguments] each."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Noting(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            shapes = [list(a.shape) for a in flat([*args, *(kwargs or {}).values()]) if isinstance(a, torch.Tensor)]
            if not func.is_view:
                found.append([func.overloadpacket.__name__, shapes])
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Noting():  # type: ignore[no-untyped-call]  # torch has not typed it
        call()
    return found


def seed_generators(seed: int) -> None:
    """Seed the generators from which a module may draw its weights: PyTorch's, NumPy's and Python's own."""
    import numpy
    import torch

    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def tensors_of_state(model: Any) -> dict[str, Any]:
    """Return the tensors of the module's state dict, by name. Its extra state may consist of other objects."""
    import torch

    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def kept_beside(torch: Any, model: Any, state: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that the module and its parts keep, except those of its state dict."""
    parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    held = [(at, {**part._buffers, **vars(part)}) for at, part in parts]
    names = [f"{at}.{n}".lstrip(".") for at, every in held for n, v in every.items() if isinstance(v, torch.Tensor)]
    return [name for name in names if name not in state]


def flat(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists, tuples and dicts."""
    for _, leaf in leaves_of(value):
        yield leaf


def leaves_of(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for each leaf of nested lists, tuples and dicts. The path is the indices and keys to it."""
    if isinstance(value, (list, tuple)):
        for number, held in enumerate(value):
            yield from leaves_of(held, f"{at}[{number}]")
    elif isinstance(value, dict):
        for key, held in value.items():
            yield from leaves_of(held, f"{at}[{key!r}]")
    else:
        yield at, value


def described(error: BaseException) -> str:
    """Return the name of the exception's class and the first line of its message, which may be missing or long."""
    try:
        lines = str(error).strip().splitlines()
    except BaseException:
        lines = []
    first = lines[0][:MOST_CHARACTERS] if lines else ""
    return f"{type(error).__name__}{': ' if first else ''}{first}"


def serve(own: dict[str, Any], requests: int, replies_to: int, memory: int) -> None:
    """Enter the sandbox, then answer requests until their pipe is closed."""
    os.chdir(own["scratch"])
    os.environ.update(own["environment"])
    tempfile.tempdir = None
    sandbox: dict[str, Any] = {"__name__": "sandbox"}
    exec(own["sandbox"], sandbox)
    lacking = sandbox["confine"](own["scratch"], hidden=own["hidden"], shown=own["shown"], cpu_s=own["cpu_s"])
    asked, replies = os.fdopen(requests), os.fdopen(replies_to, "w")

    def reply(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=replies, flush=True)

    reply({"lacking": lacking})
    served = Served(Memory(memory), own["device"])
    for line in asked:
        request = json.loads(line)
        try:
            if request["do"] in ("call", "copy"):
                run = served.prepare(request)
                reply({})
                asked.readline()
                found = run()
            else:
                found = getattr(served, request["do"])(request)
        except BaseException as error:
            found = {"error": described(error)}
        reply(found)


def fork(own: dict[str, Any], files: list[int], beside: socket.socket) -> int:
    """Fork a process that answers requests, and return its process id."""
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        return pid
    try:
        beside.close()
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        serve(own, *files)
    except BrokenPipeError:
        pass
    finally:
        os._exit(0)


END_LIMIT_S = 5.0
"""Longest time, in seconds, for which the processes of a session are killed again while they keep forking."""


def end(pid: int) -> int:
    """Kill a process and all processes of its session. Return its exit code, or minus the signal that ended it."""
    slow_stops.pop(pid, None)
    ended, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        _, status = os.waitpid(pid, 0)
    until = time.monotonic() + END_LIMIT_S
    with contextlib.suppress(ProcessLookupError):  # raised once none is left
        while time.monotonic() < until:
            os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-pid, os.WNOHANG)[0]:
                    pass
            time.sleep(1e-4)
    return os.waitstatus_to_exitcode(status)


STOP_LIMIT_S = 5.0
"""A process that still runs this many seconds after SIGSTOP is reported."""
STANDING = "TZX"
"""Letters of the process states that do not run: stopped or ended."""
SLOW_STOP_S, MOST_SLOW_STOPS = 0.2, 5
"""A process is also reported if more than MOST_SLOW_STOPS of its stops take longer than SLOW_STOP_S seconds: then
processes that it has forked continue it."""
slow_stops: dict[int, int] = {}


def stop(pid: int) -> int:
    """Stop a process and all processes of its session. Return 0 once all are stopped, 1 if the process has ended,
    2 if one keeps running or too many stops were slow."""
    began = time.monotonic()
    found = stop_within(pid, began + STOP_LIMIT_S)
    slow_stops[pid] = slow_stops.get(pid, 0) + (time.monotonic() - began > SLOW_STOP_S and len([*session_of(pid)]) > 1)
    return 2 if slow_stops[pid] > MOST_SLOW_STOPS else found


def stop_within(pid: int, until: float) -> int:
    """Stop the processes as `stop` does, trying until this time of the monotonic clock."""
    pause, stopped = 0.0, False
    while time.monotonic() < until:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGSTOP)
        # Not waitpid, which would discard the exit status.
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is not None and found.si_code != os.CLD_STOPPED:
            return 1
        if found is not None:
            # Meanwhile a process that it has forked may have continued it.
            stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None or stopped
        # Twice: a process that was already checked may have been continued by one that was not.
        if stopped and all(state_of(member)[0] in STANDING for _ in range(2) for member in session_of(pid)):
            return 0
        time.sleep(pause)
        pause = min(0.01, pause + 2e-5)
    return 2


def session_of(pid: int) -> Iterator[int]:
    """Yield a process and its descendants, including those that this process has adopted since their parents ended."""
    left = [pid, *(child for child in children_of(os.getpid()) if child != pid and state_of(child)[1] == pid)]
    while left:
        yield left[-1]
        left += children_of(left.pop())


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of the process; none if it has ended or the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def state_of(pid: int) -> tuple[str, int]:
    """Return the letter of the process's state, and the id of its process group."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, _, group = file.read().rpartition(")")[2].split()[:3]
    except OSError:  # it has ended
        return "X", 0
    return state, int(group)


def adopt() -> None:
    """Become the parent of all descendants whose own parent has ended."""
    child_subreaper = 36
    ctypes.CDLL(None).prctl(child_subreaper, 1, 0, 0, 0)


def main() -> None:
    """Fork and end processes until the socket is closed."""
    beside, sandbox = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    del sys.argv[1:]
    import torch  # noqa: F401 - for all that are forked

    adopt()
    forked: set[int] = set()
    while True:
        line, files, _, _ = socket.recv_fds(beside, 1 << 20, 3)
        if not line:
            break
        request = json.loads(line)
        if "end" in request:
            found = end(request["end"])
            forked.discard(request["end"])
        elif "stop" in request:
            found = stop(request["stop"])
        else:
            found = fork({**request, "sandbox": sandbox}, files, beside)
            forked.add(found)
        try:
            beside.send(str(found).encode())
        except OSError:
            break
    for pid in forked:  # the judging process has ended unexpectedly
        end(pid)


if __name__ == "__main__":
    main()
