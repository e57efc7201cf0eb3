"""Faults that equal outputs do not show: looked for in every pair, on a handful of draws.

Each check is a function of a `Probe`, registered in CHECKS, that raises NotEquivalent naming the fault.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perfsuite import equivalence, execution
from perfsuite import inputs as make
from perfsuite.equivalence import NotEquivalent
from perfsuite.execution import Leaves
from perfsuite.pair import Pair, Side, as_side
from perfsuite.records import Case

REPEATS = 3
LATER_CALLS = 3
"""A side may hand out a few buffers in turn."""


@dataclass(slots=True)
class Probe:
    """One pair on one draw, with the side under suspicion."""

    pair: Pair
    side: Side
    name: str
    case: Case
    device: str
    home: Path | None

    def drawn(self, case: Case | None = None) -> dict[str, Any]:
        values: dict[str, Any] = make.clone(make.build(self.pair, case or self.case, self.device, home=self.home))
        return values

    def other_case(self) -> Case:
        """Other values at the same sizes."""
        return Case(
            dtype=self.case.dtype, sizes=self.case.sizes, inputs=self.case.inputs, seed=(self.case.seed ^ 0x5DEECE6)
        )

    def call(
        self,
        values: dict[str, Any],
        case: Case | None = None,
        given: Callable[[dict[str, Any]], dict[str, Any]] = lambda v: v,
    ) -> Leaves:
        """Run the side on `values`, which it may change; `given` is shown the inputs of every step."""
        used = case or self.case
        execution.poison(self.pair, values)
        with execution.quiet(self.side):
            call = execution.callable_of(self.side)
            if self.pair.is_stateful:
                states = execution.run_steps(
                    call, self.pair, values, (1, 2), lambda i: given(make.build_step(self.pair, used, self.device, i))
                )
                return {n: leaf for state in states.values() for n, leaf in state.items()}
            return execution.run(call, self.pair, values, gradients=False, seed=used.seed)

    def truth(self, case: Case | None = None) -> equivalence.Truth:
        pair = self.pair
        if pair.is_stateful:
            pair = replace(pair, steps=(1, 2))
        return equivalence.establish(pair, case or self.case, self.device, gradients=False, home=self.home)

    def fault(self, what: str) -> NotEquivalent:
        return NotEquivalent(f"{self.pair.name}: the {self.name} side {what}")


def undeclared_mutation(probe: Probe) -> None:
    """An input that is not in `mutates` or `writes` must come back untouched, bit for bit, storage and all."""
    declared = {*probe.pair.mutates, *probe.pair.writes}
    before: list[tuple[str, torch.Tensor, torch.Tensor, torch.Size, tuple[int, ...]]] = []

    def remember(values: dict[str, Any]) -> dict[str, Any]:
        before.extend(
            (path, tensor, _bytes(tensor.untyped_storage()).clone(), tensor.shape, tensor.stride())
            for name, value in values.items()
            if name not in declared
            for path, tensor in make.tensors_in(value, name)
        )
        return values

    probe.call(remember(probe.drawn()), given=lambda values: remember(make.clone(values)))
    for path, tensor, storage, shape, stride in before:
        if tensor.shape != shape or tensor.stride() != stride:
            raise probe.fault(f"reshapes its input {path} in place")
        if not torch.equal(_bytes(tensor.untyped_storage()), storage):
            raise probe.fault(f"changes its input {path} in place, which the pair does not declare; add it to mutates=")


def aliased_input(probe: Probe) -> None:
    """An output must not share memory with an input, unless the input is declared changed or the reference does too."""
    values = probe.drawn()
    allowed = _shared_with_inputs(probe, as_side(probe.pair.reference), probe.drawn())
    found = _shared_with_inputs(probe, probe.side, values)
    for output, name in sorted(found - allowed):
        raise probe.fault(f"returns {output} in the memory of its input {name}; writing to one changes the other")


def private_buffer(probe: Probe) -> None:
    """An output must survive the calls after it, with other inputs: no static buffer is handed out."""
    if probe.pair.is_stateful:
        return  # its state is a buffer, and declared
    other = probe.other_case()
    first = {n: leaf for n, leaf in probe.call(probe.drawn()).items() if isinstance(leaf, torch.Tensor)}
    kept = {n: leaf.clone() for n, leaf in first.items()}
    for _ in range(LATER_CALLS):
        later = probe.call(probe.drawn(other), other)
        for name, tensor in first.items():
            if not equivalence.identical(tensor, kept[name]):
                raise probe.fault(
                    f"overwrites {name} of an earlier call: it hands out a private static buffer; return a copy"
                )
            following = later.get(name)
            if (
                isinstance(following, torch.Tensor)
                and tensor.numel()
                and following.numel()
                and tensor.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
            ):
                raise probe.fault(
                    f"returns {name} of two calls in the same memory: it hands out a private static buffer; "
                    f"return a copy"
                )


def unwritten_output(probe: Probe) -> None:
    """Fresh memory reads as NaN: an element that the side never writes is then seen."""
    try:
        truth = probe.truth()
    except equivalence.Discard:
        return
    with poisoned_memory():
        poisoned = probe.call(probe.drawn())
    try:
        equivalence.judge(probe.pair, truth, poisoned, name=probe.name)
    except NotEquivalent as error:
        plain = probe.call(probe.drawn())
        if all(_same_leaf(poisoned.get(name), leaf) for name, leaf in plain.items()):
            raise  # wrong, but not because of the memory
        raise probe.fault(
            f"leaves output unwritten, or reads memory it never wrote: with fresh memory filled with NaN, {error}"
        ) from None


def nondeterminism(probe: Probe) -> None:
    """Repeated on the same inputs, every result must stay within the budget of the truth, and of the first."""
    try:
        truth = probe.truth()
    except equivalence.Discard:
        return
    for i in range(REPEATS):
        produced = probe.call(probe.drawn())
        try:
            equivalence.judge(probe.pair, truth, produced, name=probe.name)
        except NotEquivalent as error:
            raise probe.fault(
                f"is not deterministic within its budget: repeat {i + 1} of {REPEATS} on the same inputs: {error}"
            ) from None


def call_order(probe: Probe) -> None:
    """Interleaved with other inputs, the same inputs must give the same answer."""
    other = probe.other_case()
    try:
        truths = {id(c): probe.truth(c) for c in (probe.case, other)}
    except equivalence.Discard:
        return
    for i, case in enumerate((probe.case, other, probe.case, other)):
        produced = probe.call(probe.drawn(case), case)
        try:
            equivalence.judge(probe.pair, truths[id(case)], produced, name=probe.name)
        except NotEquivalent as error:
            raise probe.fault(
                f"depends on the order of its calls: call {i + 1}, alternating between two inputs: {error}"
            ) from None


def lazy_output(probe: Probe) -> None:
    """Every output must be a plain tensor that already holds its values."""
    values = probe.drawn()
    execution.poison(probe.pair, values)
    call = execution.callable_of(probe.side)
    with execution.quiet(probe.side):
        if probe.pair.is_stateful:
            step = call(*values.values())
            returned = step(*make.build_step(probe.pair, probe.case, probe.device, 1).values())
        else:
            with torch.no_grad():
                returned = call(*values.values())
    for name, leaf in execution.flatten(returned):
        if not isinstance(leaf, torch.Tensor):
            continue
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise probe.fault(
                f"returns {name} as a {type(leaf).__name__}, a tensor subclass that may compute when read"
            )
        own = [k for k in vars(leaf) if callable(vars(leaf)[k])]
        if own:
            raise probe.fault(f"returns {name} with its method {own[0]} overridden: it may compute when read")
        if leaf.is_meta or leaf.layout is not torch.strided:
            raise probe.fault(f"returns {name} as a {leaf.layout} tensor on {leaf.device}: it holds no values yet")


CHECKS: tuple[Callable[[Probe], None], ...] = (
    lazy_output,
    undeclared_mutation,
    aliased_input,
    private_buffer,
    unwritten_output,
    nondeterminism,
    call_order,
)


def check(pair: Pair, case: Case, device: str, *, home: Path | None = None) -> None:
    """Every check on the optimized side for one draw; NotEquivalent names the fault."""
    probe = Probe(pair=pair, side=as_side(pair.optimized), name="optimized", case=case, device=device, home=home)
    for fault in CHECKS:
        fault(probe)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every tensor made without values (torch.empty and its kin) holds NaN, or the largest whole number."""
    was = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = fill
            torch.use_deterministic_algorithms(was, warn_only=warn)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _same_leaf(a: execution.Leaf, b: execution.Leaf) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and equivalence.identical(a, b)
    return type(a) is type(b) and a == b


def _shared_with_inputs(probe: Probe, side: Side, values: dict[str, Any]) -> set[tuple[str, str]]:
    """(output, input) that lie in the same storage, outputs that are declared changes left out."""
    if probe.pair.is_stateful:
        return set()
    written = {*probe.pair.mutates, *probe.pair.writes}
    owners = {
        tensor.untyped_storage().data_ptr(): name
        for name, value in values.items()
        for _, tensor in make.tensors_in(value, name)
        if tensor.numel()
    }
    execution.poison(probe.pair, values)
    with execution.quiet(side), torch.no_grad():
        returned = execution.callable_of(side)(*values.values())
    return {
        (output, owners[leaf.untyped_storage().data_ptr()])
        for output, leaf in execution.flatten(returned)
        if isinstance(leaf, torch.Tensor)
        and leaf.numel()
        and owners.get(leaf.untyped_storage().data_ptr()) not in (None, *written)
    }
