"""Run one side of a workload repeatedly on its own copy of the inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep
from typing import Any

import torch

from perfsuite.correctness import compilations, execution, incoming_gradients
from perfsuite.declare.pair import Pair
from perfsuite.declare.pair_fields import GRAD_OUTPUT
from perfsuite.declare.sides import Side
from perfsuite.draws import inputs as make
from perfsuite.errors import PairError
from perfsuite.records import Case
from perfsuite.timing.clocks import CpuClock, CudaClock

WARMUP_CALLS = 3
LONG_S = 1.0
"""If every warm-up call takes more than this many seconds, one call is reused for several measurements."""
RELEASE_S = 1e-3
"""Seconds to wait before the allocated memory is read. The thread that runs a backward pass releases the gradients only
after `grad` has returned, and on a busy host that may be late. The memory held before a call would then include them,
and the call's peak would be too small."""

Clock = CpuClock | CudaClock


@dataclass(frozen=True, slots=True)
class Call:
    """Cost of one call."""

    seconds: float
    """Seconds on the wall clock."""
    peak_bytes: int | None
    stopped: bool = False
    """Whether the call was stopped after a time limit."""


@dataclass(slots=True)
class Runner:
    """A side bound to inputs. `call` is timed. `reset` must be called before every call, and is not timed."""

    name: str
    side: Side
    pair: Pair
    case: Case
    direction: str
    device: str
    step_master: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    call: Callable[[], object] = lambda: None
    reset: Callable[[], None] = lambda: None
    returned: Any = None
    gradients: Any = None
    marked: dict[str, torch.Tensor] = field(default_factory=dict)
    padding: Any = None
    arguments: tuple[Any, ...] = ()
    step_inputs: dict[str, Any] = field(default_factory=dict)
    """Inputs of a stateful pair's step, which are the arguments."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Input → number of tensors in its list or dict before the first call."""
    restored: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(Input that a call changes, value that is restored before the next call)."""
    incoming: list[torch.Tensor] | None = None
    """Incoming gradients of the outputs."""
    states: list[tuple[torch.Generator, torch.Tensor]] = field(default_factory=list)
    consumed: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(Incoming gradient that a backward pass changes, value that is restored)."""
    called_once: bool = False
    """Whether the incoming gradients are drawn within the call, because another call would be needed to find the
    outputs."""
    pending: list[torch.Tensor] = field(default_factory=list)
    """Outputs whose backward pass is timed next."""
    allocate_s: float = 0.0
    """Seconds of the last `allocate`."""
    last: Call | None = None
    """Last warm-up call, with the highest peak memory of the calls after the side had settled."""
    long: Call | None = None
    """The same as `last` if every warm-up call took more than LONG_S. It replaces other measurements of one call."""

    @property
    def grad_mode(self) -> bool:
        return self.direction != "forward"

    def allocate(self, master: Mapping[str, Any], rng: random.Random) -> None:
        """Make new copies of the inputs, at other addresses than before."""
        began = perf_counter()
        self._bind(master, rng)
        self.allocate_s = perf_counter() - began

    def _bind(self, master: Mapping[str, Any], rng: random.Random) -> None:
        before = self.inputs
        self.returned = self.gradients = None
        self.padding = torch.empty(512 * rng.randint(1, 4096), dtype=torch.uint8, device=self.device)
        self.inputs = make.clone(dict(master))
        del before
        self.numbers = _numbers({**self.inputs, **self.step_master})
        function = execution.callable_of(self.side)
        if self.pair.is_stateful:
            step = self._refilling(function(*self.inputs.values()), self.step_master)
            self.step_inputs = make.clone(dict(self.step_master))
            self.arguments = tuple(self.step_inputs.values())
            self._restore_from(self.step_inputs, self.step_master)
            self.call = self._keeping(step, self.arguments)
            self.reset = self._restore if self.restored else lambda: None
            return
        function = self._refilling(function, self.inputs)
        self.arguments = tuple(self.inputs.values())
        self._restore_from(self.inputs, master)
        if self.direction == "forward":
            self.call, self.reset = self._keeping(function, self.arguments), self._restore
            return
        self._mark(function)
        if self.direction == "both":
            self.call, self.reset = self._both(function), self._restore
        else:
            self.call, self.reset = self._backward, self._before_backward(function)

    def _refilling(self, function: Callable[..., Any], inputs: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the function; if it consumes lists or dicts, each call gets new ones with the same tensors, because a
        call may empty them."""
        if not any(isinstance(inputs.get(name), (list, dict)) for name in self.pair.consumes):
            return function
        return lambda *arguments: function(*make.regrouped(arguments))

    def _keeping(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], object]:
        def forward() -> object:
            self.returned = function(*arguments)
            return self.returned

        return forward

    def _mark(self, function: Callable[..., Any]) -> None:
        """Require gradients of the inputs, and draw the incoming gradients of the outputs."""
        self.marked = execution.require_gradients(self.pair, self.inputs)
        if (self.long is not None and self.incoming is not None) or (self.called_once and self.direction == "both"):
            return
        sample = dict(execution.flatten(function(*self.arguments)))
        outputs, drawn = incoming_gradients.drawn(sample, self.case.seed, self.pair.output_dtype)
        names = [name for name, output in incoming_gradients.real_of(sample).items() if output.requires_grad]
        by_name = dict(zip(names, drawn, strict=True))
        self.incoming = [by_name[name] for name in sample if name in by_name]  # in the order of `_outputs`
        if not outputs or not self.marked:
            raise PairError(
                f"{self.pair.name}: direction={self.direction!r}, but no output depends on an input's gradient"
            )
        if GRAD_OUTPUT in self.pair.consumes:
            self.consumed = [(weight, weight.clone()) for weight in self.incoming]

    def _outputs(self, function: Callable[..., Any]) -> list[torch.Tensor]:
        self.returned = function(*self.arguments)
        return [o for _, o in execution.flatten(self.returned) if isinstance(o, torch.Tensor) and o.requires_grad]

    def _both(self, function: Callable[..., Any]) -> Callable[[], object]:
        leaves, weights = list(self.marked.values()), self.incoming

        def both() -> object:
            self.gradients = torch.autograd.grad(self._outputs(function), leaves, weights, allow_unused=True)
            return self.gradients

        def once() -> object:
            self.returned = function(*self.arguments)
            outputs, drawn = incoming_gradients.drawn(
                dict(execution.flatten(self.returned)), self.case.seed, self.pair.output_dtype
            )
            self.gradients = torch.autograd.grad(outputs, leaves, drawn, allow_unused=True)
            return self.gradients

        return once if self.called_once else both

    def _before_backward(self, function: Callable[..., Any]) -> Callable[[], None]:
        def before() -> None:
            self._restore()
            self.pending = self._outputs(function)

        return before

    def _backward(self) -> object:
        leaves = list(self.marked.values())
        self.gradients = torch.autograd.grad(self.pending, leaves, self.incoming, allow_unused=True)
        return self.gradients

    def _restore(self) -> None:
        self.returned = self.gradients = None
        for tensor, original in (*self.restored, *self.consumed):
            tensor.detach().copy_(original)
        for generator, state in self.states:
            generator.set_state(state)

    def _restore_from(self, inputs: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Let `_restore` write these values to those of the inputs that a call changes. The inputs of a stateful pair's
        step are restored, and those from which the step was made are not: they are its state."""
        self.restored = [
            (tensor, original)
            for name in sorted(self.pair.changed.intersection(inputs))
            for (_, tensor), (_, original) in zip(
                make.changing(self.pair, name, inputs[name]),
                make.changing(self.pair, name, values[name]),
                strict=True,
            )
        ]
        given = zip(make.generators_in(dict(inputs)), make.generators_in(dict(values)), strict=True)
        self.states = [(generator, other.get_state()) for generator, other in given]

    def refill(self, values: Mapping[str, Any]) -> None:
        """Write other values into the same memory, so that the next call differs from the last one only in values."""
        self.returned = self.gradients = None
        self._check_lists()
        if self.pair.is_stateful:
            self._restore_from(self.step_inputs, values)
            make.copy_values(self.step_inputs, dict(values))
            return
        self._restore_from(self.inputs, values)
        make.copy_values(self.inputs, dict(values))

    def leaves(self) -> execution.Leaves:
        """Return the results of the last call: outputs, inputs changed in place, gradients."""
        self._check_lists()
        leaves = execution.with_changed(self.pair, {**self.inputs, **self.step_inputs}, self.returned)
        if self.gradients is not None:
            leaves |= {f"gradient of {p}": g for p, g in zip(self.marked, self.gradients, strict=True)}
        return {n: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for n, leaf in leaves.items()}

    def _check_lists(self) -> None:
        """Raise PairError if a call has emptied a list or a dict, or added to it: later calls got another one then."""
        now = _numbers({**self.inputs, **self.step_inputs})
        for name, number in self.numbers.items():
            if now[name] != number:
                raise PairError(
                    f"{self.pair.name}: a call of the {self.name} side leaves {now[name]} of {number} tensors in its "
                    f"input {name}, so that the next call gets another one; declare consumes={{{name!r}}}"
                )

    def release(self) -> None:
        """Release the step and all tensors now. `call` refers back to this object, so otherwise the garbage collector
        would release them, and ending a data loader there takes five seconds per worker."""
        self.call, self.reset = lambda: None, lambda: None
        self.inputs, self.step_inputs, self.numbers, self.arguments, self.marked = {}, {}, {}, (), {}
        self.restored, self.states, self.consumed, self.incoming, self.pending = [], [], [], None, []
        self.returned = self.gradients = self.padding = None

    def once(self, clock: Clock) -> Call:
        """Reset, call once, and synchronise. Return the cost of the call."""
        on_cuda = isinstance(clock, CudaClock)
        self.reset()
        clock.synchronize()
        clock.peers.meet()
        held = 0
        if on_cuda:
            sleep(RELEASE_S)
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        called = perf_counter()
        self.call()
        clock.synchronize()
        (took,) = clock.peers.slowest([perf_counter() - called])
        return Call(took, torch.cuda.max_memory_allocated() - held if on_cuda else None)

    def warm_up(self, clock: Clock, after_first: Callable[[Runner], None] = lambda runner: None) -> None:
        """Call the side until its speed is stable. `after_first` is called with the runner after the first call."""
        before = compilations.graphs()
        with execution.quiet(self.side), torch.set_grad_enabled(self.grad_mode):
            calls: list[Call] = []
            while len(calls) < max(WARMUP_CALLS, self.side.settle):
                calls.append(self.once(clock))
                if len(calls) == 1:
                    self._check_lists()
                    after_first(self)
                # At least one call more than settle it, because the first call on new inputs may tune or capture.
                if len(calls) > self.side.settle and sum(c.seconds for c in calls) > LONG_S:
                    break
            self.reset()
        settled = calls[max(1, self.side.settle) :] or calls[-1:]
        self.last = replace(
            calls[-1], peak_bytes=max((c.peak_bytes for c in settled if c.peak_bytes is not None), default=None)
        )
        # The least of all calls, because a single one may have been delayed.
        is_long = min(c.seconds for c in calls) > LONG_S and not self.pair.is_stateful
        if is_long and clock.peers.all(compilations.graphs() == before):
            self.long = self.last


def _numbers(inputs: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of tensors in each input that is a list or a dict."""
    lists = {name: value for name, value in inputs.items() if isinstance(value, (list, dict))}
    return {name: sum(1 for _ in make.tensors_in(value)) for name, value in lists.items()}
