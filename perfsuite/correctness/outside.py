"""Call the optimized side in a process where no test is running: it must return the same answer as in its proofs.

Each run has one such child process, without pytest, Hypothesis, perfsuite or their variables (outside_child.py).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch

from perfsuite.correctness import equivalence, execution, incoming_gradients, rule, side_calls, truths
from perfsuite.correctness.execution import Leaves
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import as_side
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case
from perfsuite.state import process_state

TRACES = ("PYTEST", "HYPOTHESIS", "PERFSUITE", "XDIST")
"""Parts of the names of environment variables that reveal that a test is running."""
SHARE = 0.4
"""Share of the pair's time limit for one call, including the import of the pair's module. It is reached before the
proof's own limit, whose message would not name the call."""
SOURCE = Path(__file__).with_name("outside_child.py")


class Unsendable(Exception):  # noqa: N818 - no fault of the side
    """The inputs cannot be sent to another process, or the pair cannot be found in it."""


class Hangs(NotEquivalent):
    """The side does not return in that process. Each further draw would take long too."""


def check(pair: Pair, case: Case, device: str, *, module: ModuleType, home: Path | None = None) -> None:
    """Raise NotEquivalent if the side returns a different answer in a process in which no test is running.

    Raises Unsendable if the draw cannot be tried there.
    """
    if execution.unavailable(as_side(pair.optimized), device):
        return
    once = replace(pair, steps=(1,)) if pair.is_stateful else pair
    # Inputs that a call changes in place are compared after a single call, without gradients.
    gradients = pair.gradients and not pair.is_stateful and not pair.changed and bool(execution.differentiable(pair))
    known = truths.by_replicas(once, case, device, gradients=gradients, home=home)
    try:
        known(rule.NONE)
    except truths.Discard:
        return
    here = side_calls.produce(once, as_side(pair.optimized), case, device, gradients=gradients, home=home)
    try:
        equivalence.hold(once, known, here, strict_strides=False)
    except NotEquivalent:
        return  # wrong here too, which the proof of equivalence reports
    produced = _child().produce(once, case, device, module, home, like=here if gradients else {})
    try:
        equivalence.hold(once, known, produced, strict_strides=False)
    except NotEquivalent as error:
        raise NotEquivalent(
            f"{pair.name}: the optimized side returns a different answer where no test is running (without pytest, "
            f"Hypothesis and perfsuite in the process): {error}",
            case,
        ) from None


def prepare(pair: Pair, device: str, *, module: ModuleType) -> None:
    """Start to import the pair's module in the child process, and return at once."""
    with contextlib.suppress(Unsendable):  # `check` reports it
        _child().prepare({**_place(pair, module), **_on(pair, device)})


def seconds(pair: Pair, case: Case, device: str, *, module: ModuleType, home: Path | None = None) -> float:
    """Return the median seconds of a call of the optimized side, without gradients, in a process in which no test is
    running.

    Raises Unsendable if the inputs cannot be sent to another process.
    """
    return statistics.median(_child().seconds(pair, case, device, module, home))


RUN = "import sys; exec(compile(open(int(sys.argv.pop(1)), 'rb').read(), '<string>', 'exec', optimize=2))"
"""Command that runs the source in a file descriptor. Neither the command line nor a docstring names the harness."""


def _readable(content: bytes) -> int:
    """Return a file descriptor from which the content can be read."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        descriptor = os.dup(file.fileno())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class Child:
    """The child process, and unnamed files for the data sent to it and received from it."""

    def __init__(self) -> None:
        self.inputs_file = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        # Without a buffer, which could contain old contents of the file.
        self.outputs_file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        files = self.inputs_file.fileno(), self.outputs_file.fileno()
        reader, writer = os.pipe()
        source = _readable(SOURCE.read_bytes())
        environment = {n: v for n, v in os.environ.items() if not any(trace in n.upper() for trace in TRACES)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, *map(str, (source, writer, *files))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=(source, writer, *files),
            text=True,
        )
        os.close(source)
        os.close(writer)
        self.replies: IO[str] = os.fdopen(reader)
        self.preparing = False
        """Whether the reply to a request to prepare has not been read."""

    def prepare(self, request: dict[str, Any]) -> None:
        """Let the process import the pair's module. Errors are ignored, because they occur again when the side is
        called."""
        if not self.preparing:
            with contextlib.suppress(BrokenPipeError):
                self._send({**request, "prepare": True})
                self.preparing = True

    def produce(
        self, pair: Pair, case: Case, device: str, module: ModuleType, home: Path | None, like: Leaves
    ) -> Leaves:
        """Call the side on the draw and return its outputs. If `like` has the side's outputs in this process, return
        the gradients too.

        Raises NotEquivalent if the side raises or ends the process, and Hangs if it does not return.
        """
        values, request = self._give(pair, case, device, module, home, like)
        self._ask(pair, request)
        self.outputs_file.seek(0)
        returned, changed, gradients = torch.load(self.outputs_file, weights_only=False)
        leaves = execution.with_changed(pair, dict(zip(values, changed, strict=True)), returned)
        suffix = execution.after(1) if pair.is_stateful else ""
        made = {f"{n}{suffix}": t.detach() if isinstance(t, torch.Tensor) else t for n, t in leaves.items()}
        if not like:
            return made
        needing = [id(tensor) for _, tensor in make.tensors_in(values, buffers=False) if tensor.requires_grad]
        found = dict(zip(needing, gradients or [None] * len(needing), strict=True))  # none if no output has a gradient
        marked = execution.require_gradients(pair, values)
        return made | {f"gradient of {path}": found[id(tensor)] for path, tensor in marked.items()}

    def seconds(self, pair: Pair, case: Case, device: str, module: ModuleType, home: Path | None) -> list[float]:
        """Return the seconds of each timed call on the draw, after a warm-up. Raises NotEquivalent as `produce`
        does."""
        _, request = self._give(pair, case, device, module, home)
        found: list[float] = self._ask(pair, {**request, "timed": True})["seconds"]
        return found

    def _give(
        self, pair: Pair, case: Case, device: str, module: ModuleType, home: Path | None, like: Leaves | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the draw's inputs, and incoming gradients for outputs like these, to the file that the child reads.
        Return (inputs and those of the step, request that names the pair)."""
        values = make.clone(make.build(pair, case, device, home=home))
        execution.poison(pair, values)
        steps = make.build_step(pair, case, device, 1) if pair.is_stateful else {}
        execution.poison(pair, steps)
        weights = _incoming(pair, case, like) if like else []
        if like:
            execution.require_gradients(pair, values)
        self.inputs_file.seek(0)
        self.inputs_file.truncate()
        try:
            torch.save((list(values.values()), list(steps.values()), weights), self.inputs_file)
        except Exception as error:  # pickle raises many types
            raise Unsendable(f"an input cannot be given to another process: {error}") from None
        self.inputs_file.flush()
        return {**values, **steps}, {**_place(pair, module), **_on(pair, device)}

    def _ask(self, pair: Pair, request: dict[str, Any]) -> dict[str, Any]:
        what = f"{pair.name}: where no test is running, the optimized side"
        seconds = SHARE * pair.time_limit
        try:
            # Otherwise a late reply to the preparation would be mistaken for the reply to this request.
            prepared = not self.preparing or self._reply(seconds) is not None
            self.preparing = False
            if prepared:
                self._send(request)
            reply = self._reply(seconds) if prepared else None
        except BrokenPipeError:
            reply = ""
        except BaseException:  # time limit of the proof, or Ctrl-C: the busy process is of no use to the next proof
            self.close()
            raise
        if reply is None:
            self.close()
            raise Hangs(
                f"{what} hangs: stopped after {seconds:g} s; if it compiles or tunes for so long, raise the pair's "
                f"time_limit of {pair.time_limit:g} s"
            )
        if not reply:
            self.close()
            raise NotEquivalent(f"{what} ends the process with exit code {self.process.returncode}")
        answered: dict[str, Any] = json.loads(reply)
        if "missing" in answered:
            raise Unsendable(str(answered["missing"]))
        if answered["error"]:
            self.close()
            raise NotEquivalent(f"{what} raises {answered['error']}")
        return answered

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        here = {"sys_path": sys.path, "settings": process_state.sendable_settings()}
        print(json.dumps({**request, **here}), file=self.process.stdin, flush=True)

    def _reply(self, seconds: float) -> str | None:
        """Return the next line; empty if the process has ended, None after `seconds`."""
        ready, _, _ = select.select([self.replies], [], [], seconds)
        return self.replies.readline() if ready else None

    def close(self) -> None:
        """End the process and close its files."""
        self.process.kill()
        self.process.wait()
        self.replies.close()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.inputs_file.close()
        self.outputs_file.close()
        if self in _children:
            _children.remove(self)


def _incoming(pair: Pair, case: Case, like: Leaves) -> list[torch.Tensor]:
    """Return incoming gradients for the real and complex outputs among these, as in a proof, in the outputs' order."""
    outputs = {name: leaf for name, leaf in like.items() if name.startswith("output")}
    real = incoming_gradients.real_of(outputs)
    weights = dict(zip(real, incoming_gradients.for_outputs(real, case.seed, pair.output_dtype), strict=True))
    return [weights[name] for name in outputs if name in weights]


_children: list[Child] = []


def _child() -> Child:
    """Return this run's child process, started when it is first needed."""
    if not _children:
        _children.append(Child())
    return _children[0]


@atexit.register
def _close() -> None:
    for child in list(_children):
        child.close()


def _on(pair: Pair, device: str) -> dict[str, str]:
    """Return the device, and the backend of the process group if the pair needs one."""
    return {"device": device, "backend": process_state.group_backend(device) if pair.ranks else ""}


def _place(pair: Pair, module: ModuleType) -> dict[str, str]:
    """Return the module, file and name of the pair's declaration."""
    if not getattr(module, "__file__", None):
        raise Unsendable("the pair's module is no file")
    return {"module": module.__name__, "path": str(module.__file__), "pair": pair.name}
