"""Compute a digest of everything that one call of a side launches on a GPU, without times and addresses.

Two digests are equal if a call runs, in the same order, the same PyTorch operations on tensors of the same shapes and
dtypes with the same numbers, the same Triton kernels (by machine code) with the same arguments, the same device kernels
on the same grids, the same copies, waits and allocations, and follows the same path through the repository's Python
code. A call that cannot be observed completely has no digest: one with replayed graphs, compiled code, or third-party
operators and extensions.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from perfsuite.correctness import compilations
from perfsuite.correctness.dispatch_modes import PlainMode
from perfsuite.errors import in_one_line
from perfsuite.records import OPTIMIZED
from perfsuite.revisions.second_import import is_first_party
from perfsuite.state import process_state
from perfsuite.system import tamper
from perfsuite.timing import machine_code
from perfsuite.timing.bench import Bench
from perfsuite.timing.profiler_counts import LAUNCHES, SYNCS, detach_after_profiling
from perfsuite.timing.runner import Clock, Runner

NAMESPACES = frozenset({"aten", "prims", "prim", "profiler"})
"""Namespaces of operators whose launches depend only on their arguments."""
SEEN = frozenset({"torch", "triton", "numpy", "builtins", "cuda_utils"})
"""Compiled modules whose calls are recorded elsewhere or launch nothing, in addition to those of the standard
library."""
GRAPHS = frozenset({"cudaGraphLaunch", "cuGraphLaunch"})
WATCHED = LAUNCHES | SYNCS | {"cudaMemcpyAsync", "cudaMemsetAsync", "cudaStreamWaitEvent", "cuMemcpyAsync"}
KERNEL_FIELDS = ("grid", "block", "shared memory", "registers per thread", "bytes", "stream")


def launched(bench: Bench, top: Path) -> tuple[str, str]:
    """Return (digest of what the optimized side launches, ""), or ("", why there is none)."""
    if torch.device(bench.device).type != "cuda" or bench.workload.clock != "device":
        return "", "its host code is timed, too"
    clock, rng = bench.clock(), random.Random(0)
    runner = bench.runner(OPTIMIZED, bench.sides[OPTIMIZED])
    before = compilations.graphs()
    with bench.released(), bench.phases.time("launches"):
        bench.warm_up({OPTIMIZED: runner}, clock, rng)
        if compilations.graphs() > before:
            return "", "it runs compiled code, whose launches' arguments are not seen"
        return digest(runner, clock, top)


def digest(runner: Runner, clock: Clock, top: Path) -> tuple[str, str]:
    """Return (digest, "") of a call of this warmed-up side, or ("", why there is none)."""
    before = compilations.graphs()
    found = []
    try:
        for _ in range(2):
            seen = _Seen(top)
            with seen.python():
                _call(runner, clock)
            problem = seen.problem()
            if problem or compilations.graphs() > before:
                return "", problem or "it compiles while it runs"
            problem = seen.device(lambda: _call(runner, clock))
            if problem:
                return "", problem
            found.append(seen.digest())
    except Exception as error:  # a call that cannot be observed has no digest
        return "", f"its launches could not be watched: {in_one_line(error)}"
    return (found[0], "") if found[0] == found[1] else ("", "what it launches differs from call to call")


def _call(runner: Runner, clock: Clock) -> None:
    runner.reset()
    clock.synchronize()
    with torch.set_grad_enabled(runner.grad_mode):
        runner.call()
    clock.synchronize()


class _Seen:
    """Record of everything that was observed of a call."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.lines: list[Any] = []
        self.modules: set[str] = set()
        self.namespaces: set[str] = set()
        self._own: dict[str, bool] = {}

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.lines).encode()).hexdigest()[:32]

    def problem(self) -> str:
        """Return why the call cannot be observed completely; empty if it can."""
        foreign = sorted(self.namespaces - NAMESPACES)
        if foreign:
            return f"it calls operators of {foreign[0]}, whose launches depend on more than their arguments"
        modules = {m.partition(".")[0] for m in self.modules}
        foreign = sorted(m for m in modules - SEEN if m and m not in sys.stdlib_module_names and not m.startswith("_"))
        return f"it calls {foreign[0]}, whose arguments are not seen" if foreign else ""

    # --- Python, PyTorch, Triton ------------------------------------------------------------------------------------

    @contextmanager
    def python(self) -> Iterator[None]:
        """Record operations, Triton launches and the path through the repository's Python code."""
        before = sys.getprofile(), sys.gettrace()
        with _Operations(self), self._triton():
            sys.setprofile(self._profile)
            sys.settrace(self._trace)
            try:
                yield
            finally:
                sys.settrace(before[1])
                process_state.set_profile(before[0])

    def _is_own(self, file: str) -> bool:
        if file not in self._own:
            # perfsuite may be in the repository whose workloads it traces.
            self._own[file] = is_first_party(Path(file), self.top) and not tamper.is_harness(file)
        return self._own[file]

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            module = getattr(argument, "__module__", None)
            if isinstance(module, str):
                self.modules.add(module)
            if self._is_own(frame.f_code.co_filename):
                self.lines.append(("calls", getattr(argument, "__qualname__", repr(type(argument)))))
        elif event == "call":
            if self._is_own(frame.f_code.co_filename):
                self._note_extensions(frame)
            back = frame.f_back
            if back is not None and self._is_own(back.f_code.co_filename):
                self.lines.append(("calls", frame.f_code.co_qualname))

    def _note_extensions(self, frame: Any) -> None:
        """Record the compiled modules that the function refers to, because Python's profiler does not see calls of
        Cython code."""
        for name in frame.f_code.co_names:
            value = frame.f_globals.get(name)
            module = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", "") or "")
            file = getattr(module, "__file__", None) or ""
            if module is not None and file and not file.endswith((".py", ".pyc")):
                self.modules.add(module.__name__)

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line if self._is_own(frame.f_code.co_filename) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.append("line")  # not the line number, which a comment above would change
        return self._line

    @contextmanager
    def _triton(self) -> Iterator[None]:
        """Record every launch of a Triton kernel."""
        if "triton" not in sys.modules:
            yield
            return
        from triton.runtime.jit import JITFunction

        original = JITFunction.run

        def run(kernel: Any, *arguments: Any, **options: Any) -> Any:
            binary = original(kernel, *arguments, **options)
            grid = options.get("grid")
            forms = [_form(a) for a in arguments]
            others = {k: _form(v) for k, v in sorted(options.items()) if k != "grid"}
            code = binary.asm.get("cubin", b"") if binary is not None else b""
            machine = machine_code.digest(code)
            shape = "computed" if callable(grid) else [int(n) for n in grid] if grid is not None else None
            self.lines.append(("triton", kernel.fn.__name__, machine, shape, forms, others))
            return binary

        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = original

    # --- the device -------------------------------------------------------------------------------------------------

    def device(self, call: Callable[[], None]) -> str:
        """Record the kernels, copies, waits and allocations of the call. Return why that is not possible; empty if it
        is."""
        keys = ("allocation.all.allocated", "allocated_bytes.all.allocated")
        held = torch.cuda.memory_stats()
        detach_after_profiling()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
        after = torch.cuda.memory_stats()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        timed = sorted((e for e in events if "ts" in e and "name" in e), key=lambda e: float(e["ts"]))
        runtime = [e["name"] for e in timed if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["name"] in WATCHED]
        kernels = [e for e in timed if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        if not runtime:
            return "the profiler saw no CUDA call"
        if GRAPHS & set(runtime):
            return "it replays a CUDA graph, whose arguments are not seen"
        self.lines.append(("runtime", runtime))
        for event in kernels:
            arguments = event.get("args", {})
            self.lines.append(("device", event["name"], [arguments.get(field) for field in KERNEL_FIELDS]))
        self.lines.append(("allocated", [after.get(k, 0) - held.get(k, 0) for k in keys]))
        return ""


class _Operations(PlainMode):
    """Dispatch mode that records every PyTorch operation with the forms of its tensors and its numbers."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.namespaces.add(func.namespace)
        self.seen.lines.append(("op", str(func), [_form(a) for a in args], _form(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _form(value: Any) -> Any:
    """Return a value without its address: for a tensor its dtype, device, shape, strides and alignment."""
    if isinstance(value, torch.Tensor):
        place = value.data_ptr() % 16 if value.device.type == "cuda" else 0
        return [str(value.dtype), str(value.device), list(value.shape), list(value.stride()), place]
    if isinstance(value, (list, tuple)):
        return [_form(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _form(v) for k, v in value.items()}
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, torch.layout)):
        return repr(value)
    return type(value).__name__
