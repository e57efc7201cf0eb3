"""Compile a pair's Triton kernels ahead of time for sm_90, on any machine: a kernel that does not compile is red.

A process without TRITON_INTERPRET calls the pair's sides on CPU tensors at the workloads' sizes, with a driver that
represents an sm_90 device. Each launch compiles its kernel, specialised exactly as on the device, and runs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.declare.workload import Workload
from perfsuite.errors import PairError, PerfsuiteError
from perfsuite.records import InputCase
from perfsuite.session.fork_server import Command, Forks, finish
from perfsuite.session.worker_pool import pytest_arguments
from perfsuite.system.garbage import uncollected
from perfsuite.system.host import usable_cores

KERNELS = "kernels[sm_90]"
"""Name of the pytest item that compiles the kernels."""
CAPABILITY = 90
WARP_SIZE = 32
AHEAD = "PERFSUITE_AHEAD"
"""Environment variable of the compiling process: the path to which it writes its results."""
MAX_SHARED_BYTES = 227 * 1024
"""Largest shared memory of one block on sm_90, in bytes."""
SPARE_CORES = 4
"""Fewest usable cores at which a pair's kernels are compiled while the pair is proven."""
LARGE = 1 << 16
"""Number of elements at or above which a tensor's values are not computed."""


def kernels_of(pair: Pair) -> dict[str, Any]:
    """Return the Triton kernels that the pair's sides can reach, by qualified name; empty if triton is not
    imported."""
    from perfsuite.correctness import reachable_kernels

    return reachable_kernels.kernels(as_side(s).call for s in (pair.optimized, *pair.variants.values()))


@functools.cache
def _forks() -> Forks:
    return Forks("perfsuite.session.aot_compile:prepare", _compiling(os.environ))


def prepare() -> None:
    """Import what most compiling processes need, in the server that forks them. Import nothing of the project."""
    modules = (
        "perfsuite.session.pytest_items",
        "perfsuite.session.modes",
        "pytest",
        "torch._dynamo",
        "torch.distributed.fsdp",
    )
    with uncollected():
        for name in (*modules, "triton.language"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()  # reads all of Triton, which takes half a second
    gc.collect()
    gc.freeze()  # otherwise the garbage collector of each fork traverses all of torch again


def _compiling(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, "TRITON_INTERPRET": "0"}


class Compiling:
    """Compilation of an item's pair in a separate process. It starts when this object is created."""

    def __init__(self, item: pytest.Item) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._log = Path(self._folder.name) / "compiled.json", Path(self._folder.name) / "log.txt"
        self._command = Command(
            module="pytest",
            # Otherwise pytest warns that it cannot rewrite the modules that the server has imported.
            arguments=[*pytest_arguments(item.config), "--assert=plain", item.nodeid],
            cwd=item.config.rootpath,
            environment={**_compiling(os.environ), AHEAD: str(self._out)},
            log=self._log,
        )
        self._fork = _forks().start(self._command) if hasattr(os, "fork") else None

    def kernels(self, seconds: float) -> dict[str, Any]:
        """Wait until the process has ended and return a record of each compiled kernel, by name.

        Raises PerfsuiteError with the compiler's message if a kernel does not compile, or if it takes longer than
        `seconds`. Skips the item if its pair cannot be called without a GPU.
        """
        with self._folder:
            try:
                code = _forks().run(self._command, seconds) if self._fork is None else finish(self._fork, seconds)
            except subprocess.TimeoutExpired:
                raise PerfsuiteError(f"its kernels did not compile for sm_90 within {seconds:g} s") from None
            if not self._out.exists():
                text = self._log.read_text(errors="replace") if self._log.exists() else ""
                tail = [line for line in text.splitlines() if line.strip()][-4:]
                raise PerfsuiteError(f"compiling for sm_90 ended with exit code {code}: {' | '.join(tail)[:600]}")
            result = json.loads(self._out.read_text())
        if result["error"]:
            raise PerfsuiteError(result["error"])
        if result["left out"]:
            pytest.skip(result["left out"])
        kernels: dict[str, Any] = result["kernels"]
        return kernels


def beside_proofs(config: pytest.Config) -> bool:
    """Return whether kernels may be compiled while their pair is proven.

    That needs SPARE_CORES usable cores, and a process that is neither a compiling process nor a worker of pytest-xdist.
    """
    return AHEAD not in os.environ and not hasattr(config, "workerinput") and usable_cores() >= SPARE_CORES


def compile_pair(pair: Pair, out: Path, project: Path, others: Iterable[Pair] = ()) -> None:
    """Compile everything that the pair launches, in the compiling process, and write the results to `out`.

    Each kernel of the `project` that the sides can reach has to be launched, by this pair or by one of the `others` in
    its file. Kernels of installed packages need not be.
    """
    expected = {name for name, kernel in kernels_of(pair).items() if _lies_in(project, kernel)}
    compiled: dict[str, dict[str, Any]] = {}
    own: dict[str, dict[str, Any]] = {}
    error = left_out = ""
    recorder = recording(compiled)
    try:
        with recorder:
            _launch_all(pair, recorder)
            own = dict(compiled)
            for other in others:
                if not kernels_of(other).keys().isdisjoint(expected - compiled.keys()):
                    _launch_all(other, recorder)
        if missing := expected - compiled.keys():
            raise PairError(
                f"kernel {min(missing)} is launched by no workload and no variant in this file; add one that does"
            )
    except Exception as problem:
        lines = [line for line in str(problem).splitlines() if line.strip()] or [""]
        text = (
            str(problem) if isinstance(problem, PerfsuiteError) else f"{type(problem).__name__}: {' '.join(lines[-3:])}"
        )
        if recorder.fails or isinstance(problem, PerfsuiteError) or "cpu" in as_side(pair.optimized).devices:
            error = f"does not compile for sm_90: {text[:600]}"
        else:
            left_out = f"the optimized side, which runs on a GPU only, raises without one: {text[:200]}"
    out.write_text(json.dumps({"error": error, "left out": left_out, "kernels": own}))


def _lies_in(project: Path, kernel: Any) -> bool:
    file = Path(inspect.getsourcefile(kernel.fn) or "")
    return project in file.parents and "site-packages" not in file.parts


def _launch_all(pair: Pair, recorder: recording) -> None:
    """Call every path that launches Triton kernels, forward and backward, at every workload's sizes."""
    sides = [s for n, s in pair.variants.items() if as_side(s).available is None or not _reason(as_side(s))]
    kernels = [as_side(s) for s in sides if "cpu" in as_side(s).devices] or [as_side(pair.optimized)]
    # A workload for the CPU only never launches kernels on a GPU.
    workloads = [w for w in pair.workloads if w.device != "cpu"] or pair.workloads
    small = [w for w in pair.workloads if w not in workloads]
    if small and len(kernels) > 1:
        # A variant without a kernel may take minutes on the CPU at the sizes of a GPU's workload.
        kernels = [s for s in kernels if recorder.launches(functools.partial(_call, pair, s, small[0]))]
    for workload in workloads:
        for side in kernels:
            _call(pair, side, workload)


def _call(pair: Pair, side: Side, workload: Workload) -> None:
    """Call a side on a workload's inputs, forward and backward."""
    import torch

    from perfsuite.correctness import execution
    from perfsuite.draws import inputs as make
    from perfsuite.draws.cases import workload_case
    from perfsuite.draws.tensor_values import BLANK

    # Only sizes and dtypes matter to the compiler.
    plain = {name: InputCase(regime=BLANK) for name in {**pair.inputs, **pair.step_inputs}}
    case = replace(workload_case(workload, pair.dtypes[0], seed=0), inputs=plain)
    with _without_drawing():
        values = make.build(replace(pair, adjust=None), case, "cpu")
    call = execution.callable_of(side)
    with _without_work():
        if pair.is_stateful:
            call(*values.values())(*make.build_step(pair, case, "cpu", 1).values())
        else:
            gradients = workload.direction != "forward"
            with torch.set_grad_enabled(gradients):
                execution.run(call, pair, values, gradients=gradients, seed=0)


def _without_drawing() -> Any:
    """Return a context manager in which large weights are initialised to zero instead of random values."""
    import torch

    from perfsuite.correctness.dispatch_modes import PlainMode

    drawing = {torch.ops.aten.normal_, torch.ops.aten.uniform_}

    class Mode(PlainMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in drawing and args[0].numel() >= LARGE:
                return args[0].zero_()
            return func(*args, **(kwargs or {}))

    return Mode()


def _without_work() -> Any:
    """Return a context manager in which matrix products and operations on large tensors return zeros.

    Only sizes and dtypes matter to the compiler. Integers are computed, since sizes may depend on them.
    """
    import torch
    from torch.utils import _pytree as pytree

    from perfsuite.correctness.dispatch_modes import PlainMode

    aten = torch.ops.aten
    products = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm}
    filled = {aten.rand, aten.randn, aten.zeros}

    def tensors(value: Any) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    def is_large(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.numel() >= LARGE
        return isinstance(value, (list, tuple)) and any(map(is_large, value))

    class Mode(PlainMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func.overloadpacket in filled and math.prod(args[0]) >= LARGE:
                shape = torch.empty(args[0], dtype=kwargs.get("dtype"), device="meta")
                return _zeros_like(shape) if shape.is_floating_point() else func(*args, **kwargs)
            if func.is_view or not (is_large((*args, *kwargs.values())) or func.overloadpacket in products):
                return func(*args, **kwargs)
            if func._schema.is_mutable:
                changed = kwargs.get("out", args[0])
                alone = isinstance(changed, torch.Tensor) and len(func._schema.returns) == 1
                if not alone or not changed.is_floating_point():
                    return func(*args, **kwargs)
                return changed if changed.numel() >= LARGE else changed.zero_()
            try:
                given = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, {**kwargs}))
                shapes = func(*given[0], **given[1])
            except (NotImplementedError, RuntimeError):  # the size of the result depends on values
                return func(*args, **kwargs)
            if not all(t.is_floating_point() for t in tensors(shapes)):
                return func(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, _zeros_like, shapes)

    return Mode()


def _zeros_like(shape: Any) -> Any:
    """Return zeros of this shape and these strides, in memory that is only allocated when it is touched."""
    import numpy
    import torch

    steps = zip(shape.shape, shape.stride(), strict=True)
    extent = 1 + sum((n - 1) * step for n, step in steps) if shape.numel() else 0
    memory = torch.from_numpy(numpy.zeros(extent * shape.element_size(), dtype=numpy.uint8))
    return memory.view(shape.dtype).as_strided(shape.shape, shape.stride())


def _reason(side: Any) -> str | None:
    return side.available() if side.available is not None else None


class recording:  # noqa: N801 - a context manager
    """Context manager in which launching a Triton kernel compiles it for sm_90 and records it. Nothing runs."""

    def __init__(self, compiled: dict[str, dict[str, Any]]) -> None:
        self.compiled = compiled
        self.fails = False
        """Whether a kernel could not be compiled."""
        self._noted: list[str] | None = None

    def launches(self, call: Callable[[], None]) -> bool:
        """Return whether the call launches a kernel, without compiling the kernel."""
        noted: list[str] = []
        self._noted = noted
        try:
            call()
        finally:
            self._noted = None
        return bool(noted)

    def __enter__(self) -> recording:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        target = GPUTarget("cuda", CAPABILITY, WARP_SIZE)
        self._run = JITFunction.run
        compiled, run = self.compiled, self._run

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if self._noted is not None:
                self._noted.append(kernel.fn.__name__)
                return None
            try:
                binary = run(kernel, *args, grid=grid, warmup=True, **kwargs)
            except Exception:
                self.fails = True
                raise
            name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
            shared = binary.metadata.shared
            if shared > MAX_SHARED_BYTES:
                raise PairError(
                    f"kernel {name} needs {shared} bytes of shared memory a block; sm_90 has {MAX_SHARED_BYTES}"
                )
            record = compiled.setdefault(name, {"variants": 0, "shared_bytes": 0, "ptx_lines": 0})
            record["variants"] += 1
            record["shared_bytes"] = max(record["shared_bytes"], shared)
            record["ptx_lines"] = max(record["ptx_lines"], binary.asm["ptx"].count("\n"))
            return binary

        driver.set_active(_Sm90(target))
        JITFunction.run = compile_only
        return self

    def __exit__(self, *exc: object) -> None:
        from triton.runtime.jit import JITFunction

        # The driver stays: this process compiles and ends, and there may be no other driver to go back to.
        JITFunction.run = self._run


class _Sm90:
    """Stand-in for the driver of an sm_90 device, with the methods that the compiler calls."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")
