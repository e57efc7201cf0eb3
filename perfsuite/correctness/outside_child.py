"""Source of a process that calls sides as in production: without a test runner, the harness, or traces of them.

`python -c` reads this source from a file descriptor, so no frame is in perfsuite's folder and no command line names it.
Each line on stdin is a request that names a pair, and each line of the replies has the result. The inputs and the
side's outputs are in two open files without a name, which disappear with the processes that use them.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

HIDDEN = ("perfsuite", "pytest", "_pytest", "pluggy", "hypothesis", "_hypothesis_globals", "xdist", "pytest_benchmark")
"""Packages that reveal that a test is running."""
WARM_UP, TIMED, TIMED_S = 3, 30, 2.0
"""Number of warm-up calls, most timed calls, and seconds after which no further call is made."""
hidden: dict[str, Any] = {}


def hide() -> None:
    """Remove the HIDDEN packages from sys.modules, and keep them in `hidden`."""
    for name in [name for name in sys.modules if name.partition(".")[0] in HIDDEN]:
        hidden[name] = sys.modules.pop(name)


def show() -> None:
    """Restore the hidden packages, for a test module that declares a pair."""
    sys.modules.update(hidden)
    hidden.clear()


class Missing(Exception):  # noqa: N818 - no fault of the side
    """The pair cannot be found in this process, or its answer cannot be sent from it."""


class Again(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder and loader that returns the same module to code that imports a hidden one. With a second copy of
    the module, each class would exist twice."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[Any, Any]] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Find only hidden modules."""
        return importlib.machinery.ModuleSpec(name, self) if name in hidden else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Return the hidden module itself."""
        module = hidden.pop(spec.name)
        self.found[spec.name] = module, module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        """Do nothing: the module was executed when it was first imported."""
        again, spec = self.found.pop(module.__spec__.name)
        again.__spec__ = spec


def import_outside(path: str) -> None:
    """Import the modules that the test module will import, each while the HIDDEN packages are hidden."""
    with open(path) as stream:
        body = ast.parse(stream.read()).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    for name in names:
        if name.partition(".")[0] not in HIDDEN:
            with contextlib.suppress(Exception):  # the import of the test module will raise it again
                importlib.import_module(name)
            hide()


def take_settings(wanted: dict[str, Any]) -> None:
    """Apply the settings of torch and Python of the requesting process."""
    show()
    from perfsuite.state import process_state

    process_state.take(wanted)
    hide()


def side_of(request: dict[str, Any]) -> tuple[Callable[..., Any], bool]:
    """Return (optimized side, whether it is a factory of steps)."""
    module = sys.modules.get(request["module"])
    if module is None:
        import_outside(request["path"])
    show()
    if module is None:
        spec = importlib.util.spec_from_file_location(request["module"], request["path"])
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[request["module"]] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[request["module"]]
            raise
    from perfsuite.correctness import execution
    from perfsuite.declare import discovery
    from perfsuite.declare.sides import as_side
    from perfsuite.system import triton_interpreter

    triton_interpreter.quicken()
    pair = discovery.find(module, request["pair"])
    if pair is None:
        raise Missing(f"{request['module']} has no pair {request['pair']} where it is imported again")
    side = as_side(pair.optimized)
    call = side.call if side.stateful else execution.callable_of(side)
    hide()
    return call, side.stateful


def seconds_of(call: Callable[[], Any], wait: Callable[[], None]) -> list[float]:
    """Return the wall-clock seconds of each timed call, after WARM_UP calls."""
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < WARM_UP + TIMED and (len(took) <= WARM_UP or time.perf_counter() - began < TIMED_S):
        wait()
        start = time.perf_counter()
        call()
        wait()
        took.append(time.perf_counter() - start)
    return took[WARM_UP:]


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors in a nested value, and the parameters of modules."""
    import dataclasses

    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from tensors_in(held)
    elif isinstance(value, dict):
        for held in value.values():
            yield from tensors_in(held)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def gradients_of(call: Callable[..., Any], inputs: list[Any], weights: list[Any]) -> list[Any]:
    """Return the gradients of the inputs that require one, given the incoming gradients `weights` of the outputs."""
    import torch

    with torch.enable_grad():
        returned = call(*inputs)
    real = [t for t in tensors_in(returned) if t.is_floating_point() or t.is_complex()]
    both = [(output, weight) for output, weight in zip(real, weights, strict=True) if output.requires_grad]
    if both:
        torch.autograd.backward([output for output, _ in both], [weight for _, weight in both])
    return [tensor.grad for tensor in tensors_in(inputs) if tensor.requires_grad]


def answer(request: dict[str, Any], inputs_file: BinaryIO, outputs_file: BinaryIO) -> list[float]:
    """Call the side on the inputs, and save its outputs, the changed inputs and the gradients. Return the seconds of
    further calls if the request asks for them."""
    sys.path[:] = request["sys_path"]
    take_settings(request["settings"])
    call, stateful = side_of(request)
    import torch

    if request.get("backend") and not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # torch's stubs leave it out
        torch.distributed.init_process_group(request["backend"], store=store, rank=0, world_size=1)
    if request.get("prepare"):
        torch.empty(1, device=request["device"])
        return []
    inputs_file.seek(0)
    inputs, step_inputs, weights = torch.load(inputs_file, weights_only=False, map_location=request["device"])

    def wait() -> None:
        if request["device"] != "cpu":
            torch.cuda.synchronize()

    with torch.set_grad_enabled(stateful):  # a step that trains has its own backward pass
        called, arguments = (call(*inputs), step_inputs) if stateful else (call, inputs)
        returned = called(*arguments)
        wait()
        if request.get("timed"):
            return seconds_of(lambda: called(*arguments), wait)
    gradients = []
    if weights:
        inputs_file.seek(0)  # read again, because the first call may have used up its inputs
        fresh, _, _ = torch.load(inputs_file, weights_only=False, map_location=request["device"])
        gradients = gradients_of(call, fresh, weights)
    outputs_file.seek(0)
    outputs_file.truncate()
    try:
        torch.save((returned, [*inputs, *(step_inputs if stateful else ())], gradients), outputs_file)
    except Exception as error:  # pickle raises many types
        raise Missing(f"an output cannot be given to another process: {error}") from None
    outputs_file.flush()
    return []


def main() -> None:
    """Answer requests until stdin ends."""
    sys.meta_path.insert(0, Again())
    reply_to, inputs_file, outputs_file = map(int, sys.argv[1:])
    del sys.argv[1:]
    sys.argv[0] = "train.py"  # as in a training script
    replies, files = (
        os.fdopen(reply_to, "w"),
        (os.fdopen(inputs_file, "rb", buffering=0), os.fdopen(outputs_file, "r+b")),
    )
    for line in sys.stdin:
        try:
            reply = {"error": "", "seconds": answer(json.loads(line), *files)}
        except Missing as error:
            reply = {"seconds": [], "error": "", "missing": str(error)}
        except BaseException as error:
            reply = {"seconds": [], "error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
