"""Call the optimized side where no test is running: it must answer there as it does in its proofs.

One child process a run does it, without pytest, Hypothesis, perfsuite or their variables (outside_child.py).
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

from perfsuite import equivalence, execution, incoming, process_state, rule, truths
from perfsuite import inputs as make
from perfsuite.errors import NotEquivalent
from perfsuite.execution import Leaves
from perfsuite.pair import Pair
from perfsuite.records import Case
from perfsuite.sides import as_side

TRACES = ("PYTEST", "HYPOTHESIS", "PERFSUITE", "XDIST")
"""Parts of the names of environment variables that say that a test is running."""
SHARE = 0.4
"""Share of the pair's time limit that one call may take, including the import of the pair's module. The proof's own
limit is reached later; its message would not name the call."""
SOURCE = Path(__file__).with_name("outside_child.py")


class Unsendable(Exception):  # noqa: N818 - no fault of the side
    """The inputs cannot be given to another process, or the pair cannot be found in it."""


class Hangs(NotEquivalent):
    """The side does not return there. Trying it on other draws takes long each time."""


def check(pair: Pair, case: Case, device: str, *, module: ModuleType, home: Path | None = None) -> None:
    """Raise NotEquivalent where the side returns a different answer in a process in which no test is running.

    Raises Unsendable where the draw cannot be tried there.
    """
    if execution.unavailable(as_side(pair.optimized), device):
        return
    once = replace(pair, steps=(1,)) if pair.is_stateful else pair
    # Inputs that a call changes in place are compared after one call alone.
    gradients = pair.gradients and not pair.is_stateful and not pair.changed and bool(execution.differentiable(pair))
    known = truths.by_replicas(once, case, device, gradients=gradients, home=home)
    try:
        known(rule.NONE)
    except truths.Discard:
        return
    here = truths.produce(once, as_side(pair.optimized), case, device, gradients=gradients, home=home)
    try:
        equivalence.hold(once, known, here, strict_strides=False)
    except NotEquivalent:
        return  # wrong here, too: equivalence says how
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
    """Begin to import the pair's module where no test is running, and return at once."""
    with contextlib.suppress(Unsendable):  # `check` says so
        _child().prepare({**_place(pair, module), **_on(pair, device)})


def seconds(pair: Pair, case: Case, device: str, *, module: ModuleType, home: Path | None = None) -> float:
    """Return the median seconds of a call of the optimized side, without gradients, in a process in which no test is
    running.

    Raises Unsendable where the inputs cannot be given to another process.
    """
    return statistics.median(_child().seconds(pair, case, device, module, home))


RUN = "import sys; exec(compile(open(int(sys.argv.pop(1)), 'rb').read(), '<string>', 'exec', optimize=2))"
"""Command that runs the source in a file descriptor: not even the command line, or a docstring, names the harness."""


def _readable(content: bytes) -> int:
    """Return a file descriptor from which the content is read."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        descriptor = os.dup(file.fileno())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class Child:
    """The child process, and unnamed files for the data sent to it and received from it."""

    def __init__(self) -> None:
        self.given = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        # Without a buffer, which would hold what the file held before.
        self.made = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        files = self.given.fileno(), self.made.fileno()
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
        """Have the process import the pair's module. Whatever goes wrong goes wrong again when the side is called."""
        if not self.preparing:
            with contextlib.suppress(BrokenPipeError):
                self._send({**request, "prepare": True})
                self.preparing = True

    def produce(
        self, pair: Pair, case: Case, device: str, module: ModuleType, home: Path | None, like: Leaves
    ) -> Leaves:
        """Call the side on the draw. Return its outputs, and the gradients too if `like` has the outputs that it gives
        here.

        Raises NotEquivalent where the side raises or ends the process, Hangs where it does not return.
        """
        values, request = self._give(pair, case, device, module, home, like)
        self._ask(pair, request)
        self.made.seek(0)
        returned, changed, gradients = torch.load(self.made, weights_only=False)
        leaves = execution.with_changed(pair, dict(zip(values, changed, strict=True)), returned)
        suffix = " after 1 step" if pair.is_stateful else ""
        made = {f"{n}{suffix}": t.detach() if isinstance(t, torch.Tensor) else t for n, t in leaves.items()}
        paths = execution.require_gradients(pair, values) if like else {}
        gradients = gradients or [None] * len(paths)  # no output has any
        return made | {f"gradient of {path}": g for path, g in zip(paths, gradients, strict=True)}

    def seconds(self, pair: Pair, case: Case, device: str, module: ModuleType, home: Path | None) -> list[float]:
        """Time calls on the draw, in seconds, after some to warm up. Raises NotEquivalent as `produce` does."""
        _, request = self._give(pair, case, device, module, home)
        found: list[float] = self._ask(pair, {**request, "timed": True})["seconds"]
        return found

    def _give(
        self, pair: Pair, case: Case, device: str, module: ModuleType, home: Path | None, like: Leaves | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the draw's inputs, and incoming gradients for outputs like these, where the child reads them. Return
        the inputs, and the request that names the pair."""
        values = make.clone(make.build(pair, case, device, home=home))
        execution.poison(pair, values)
        steps = make.build_step(pair, case, device, 1) if pair.is_stateful else {}
        weights = _incoming(pair, case, like) if like else []
        needing = {id(t) for t in execution.require_gradients(pair, values).values()} if like else set()
        for _, tensor in make.tensors_in(values, buffers=False):
            tensor.requires_grad_(id(tensor) in needing)
        self.given.seek(0)
        self.given.truncate()
        try:
            torch.save((list(values.values()), list(steps.values()), weights), self.given)
        except Exception as error:  # of pickle there are many
            raise Unsendable(f"an input cannot be given to another process: {error}") from None
        self.given.flush()
        return values, {**_place(pair, module), **_on(pair, device)}

    def _ask(self, pair: Pair, request: dict[str, Any]) -> dict[str, Any]:
        what = f"{pair.name}: where no test is running, the optimized side"
        seconds = SHARE * pair.time_limit
        try:
            # A late reply to the preparation would be taken for the reply to this request.
            prepared = not self.preparing or self._reply(seconds) is not None
            self.preparing = False
            if prepared:
                self._send(request)
            reply = self._reply(seconds) if prepared else None
        except BrokenPipeError:
            reply = ""
        except BaseException:  # the proof's own time limit, or Ctrl-C: the process is busy, and of no use to the next
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
        """Return the next line; empty where the process has ended, None where there is none in time."""
        ready, _, _ = select.select([self.replies], [], [], seconds)
        return self.replies.readline() if ready else None

    def close(self) -> None:
        """End the process and remove the folder."""
        self.process.kill()
        self.process.wait()
        self.replies.close()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.given.close()
        self.made.close()
        if self in _children:
            _children.remove(self)


def _incoming(pair: Pair, case: Case, like: Leaves) -> list[torch.Tensor]:
    """Return the gradients that come in to real outputs like these, as in a proof."""
    outputs = {name: leaf for name, leaf in like.items() if name.startswith("output")}
    return incoming.for_outputs(incoming.real_of(outputs), case.seed, pair.output_dtype)


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
    """Return the device, and the backend of the process group where the pair needs one."""
    return {"device": device, "backend": process_state.group_backend(device) if pair.ranks else ""}


def _place(pair: Pair, module: ModuleType) -> dict[str, str]:
    """Return where the pair is declared."""
    if not getattr(module, "__file__", None):
        raise Unsendable("the pair's module is no file")
    return {"module": module.__name__, "path": str(module.__file__), "pair": pair.name}
