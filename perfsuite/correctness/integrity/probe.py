"""The argument of every integrity check: one pair on one draw, with the side under test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from perfsuite.correctness import equivalence, execution, forms, truths
from perfsuite.correctness.execution import Leaf, Leaves
from perfsuite.correctness.rule import NONE
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent
from perfsuite.records import Case

STEPS = (1, 2)
"""Steps of a stateful pair after which its state is compared."""


@dataclass(slots=True)
class Probe:
    """One pair on one draw, with the side under test."""

    pair: Pair
    side: Side
    name: str
    case: Case
    device: str
    home: Path | None
    known: dict[tuple[int, bool], truths.TruthFunction] = field(default_factory=dict)
    """(the case's seed, whether gradients are included) → truths, which the checks share."""
    inputs: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The case's seed → the inputs as drawn. A call gets a copy."""
    right: dict[int, Leaves] = field(default_factory=dict)
    """The case's seed → the last answer that was found right."""
    touched: tuple[str, torch.Tensor] | None = None
    """The first undeclared input that a call wrote to, by torch's version counter; its values may have been restored
    since."""
    number: int | None = None
    """The draw's number in a proof with several draws, each of which may make only some of the checks. With None, all
    are made."""

    def of_reference(self) -> Probe:
        """Return the same probe for the reference, with a record of right answers of its own."""
        return replace(self, side=as_side(self.pair.reference), name="reference", right={})

    def drawn(self, case: Case | None = None) -> dict[str, Any]:
        used = case or self.case
        if used.seed not in self.inputs:
            self.inputs[used.seed] = make.build(self.pair, used, self.device, home=self.home)
        drawn: dict[str, Any] = make.clone(self.inputs[used.seed])
        return drawn

    def step_inputs(self, case: Case, step: int) -> dict[str, Any]:
        """Return the inputs of a step of a stateful pair, from 1."""
        return make.build_step(self.pair, case, self.device, step)

    def other_case(self, number: int = 0) -> Case:
        """Return a case with other values at the same sizes. Each `number` gives different values."""
        seed = (self.case.seed ^ (0x5DEECE6 + 7919 * number)) % 2**31
        return Case(dtype=self.case.dtype, sizes=self.case.sizes, inputs=self.case.inputs, seed=seed)

    def call(
        self,
        values: dict[str, Any],
        case: Case | None = None,
        map_step: Callable[[dict[str, Any]], dict[str, Any]] = lambda v: v,
    ) -> Leaves:
        """Run the side on `values`, which it may change. `map_step` maps the inputs drawn for each step to those that
        the step gets."""
        used = case or self.case
        execution.poison(self.pair, values)
        versions = self._versions(values)
        with execution.quiet(self.side):
            call = execution.callable_of(self.side)
            if self.pair.is_stateful:
                states = execution.run_steps(
                    call, self.pair, values, STEPS, lambda i: map_step(self.step_inputs(used, i))
                )
                return execution.of_all_steps(states)
            produced = execution.run(call, self.pair, values, gradients=False, seed=used.seed)
        for path, tensor, version, shape, stride in versions:
            if tensor._version != version and (tensor.shape, tensor.stride()) == (shape, stride):
                self.touched = self.touched or (path, tensor)
        return produced

    def _versions(self, values: dict[str, Any]) -> list[tuple[str, torch.Tensor, int, torch.Size, tuple[int, ...]]]:
        """Return (path, tensor, version counter, shape, strides) of each undeclared input. The list is empty for a
        stateful pair."""
        return [
            (path, tensor, tensor._version, tensor.shape, tensor.stride())
            for path, tensor in make.unchanging(self.pair, values)
            if not self.pair.is_stateful and not tensor.is_inference()
        ]

    def undeclared_change(self, path: str, tensor: torch.Tensor) -> str:
        """Return the words for a side that changes this tensor of an undeclared input."""
        given: list[tuple[torch.Tensor, int, torch.Tensor]] = []

        def noted(values: dict[str, Any]) -> dict[str, Any]:
            tensors = [t for name, t in make.unchanging(self.pair, values) if name == path]
            given.extend((t, t._version, bytes_of(t.untyped_storage()).clone()) for t in tensors)
            return values

        self.of_reference().call(noted(self.drawn()), map_step=noted)
        by_reference = any(
            t._version != version or not torch.equal(bytes_of(t.untyped_storage()), was) for t, version, was in given
        )
        return make.undeclared_change(self.pair, path, tensor, by_reference=by_reference)

    def truth(self, case: Case | None = None, replicas: int = NONE, *, gradients: bool = False) -> truths.Truth:
        """Return the truth of the case. Raises Discard if the reference is not finite on it where the truth is."""
        case = case or self.case
        key = case.seed, gradients
        if key not in self.known:
            pair = replace(self.pair, steps=STEPS) if self.pair.is_stateful else self.pair
            self.known[key] = truths.by_replicas(
                pair, case, self.device, gradients=gradients, home=self.home, drawn=functools.partial(self.drawn, case)
            )
        return self.known[key](replicas)

    def is_right(self, produced: Leaves, case: Case | None = None) -> bool:
        """Return whether these outputs are right on the case."""
        try:
            self.judge(produced, case)
        except NotEquivalent:
            return False
        return True

    def is_right_on(self, *cases: Case) -> bool:
        """Return whether calls on these cases, one after another, are right."""
        return all(self.is_right(self.call(self.drawn(case), case), case) for case in cases)

    def answers_rightly(self) -> bool:
        """Return whether a call on the draw is right. False, too, if the truth raises Discard."""
        try:
            self.truth()
        except truths.Discard:
            return False
        return self.is_right(self.call(self.drawn()))

    def judge(self, produced: Leaves, case: Case | None = None) -> None:
        """Raise NotEquivalent if these outputs are wrong on the case."""
        seed = (case or self.case).seed
        if self._is_known(produced, self.right.get(seed)):
            return
        equivalence.hold(self.pair, functools.partial(self.truth, case), produced, name=self.name)
        self.right[seed] = execution.copies_of(produced)

    def _is_known(self, produced: Leaves, right: Leaves | None) -> bool:
        """Return whether the outputs are identical to a right answer and have the same form. Most outputs are, which
        saves the slow comparison with the truth.

        Always False if the sign of zero matters, because this test treats +0 and -0 as equal.
        """
        if right is None or self.pair.signed_zeros or produced.keys() != right.keys():
            return False
        return all(_same_form(leaf, right[n]) and same_leaf(leaf, right[n]) for n, leaf in produced.items())

    def drifted(self, error: NotEquivalent) -> NotEquivalent | None:
        """Return the fault of a side that was right at first and stays wrong now; None if that is not so. `error` says
        how it is wrong."""
        if self.case.seed not in self.right or any(self.is_right(self.call(self.drawn())) for _ in range(3)):
            return None
        return self.fault(f"drifts: right at first, and wrong ever after some calls: {error}")

    def fault(self, what: str) -> NotEquivalent:
        return NotEquivalent(f"{self.pair.name}: the {self.name} side {what}")


def same_leaf(a: Leaf, b: Leaf) -> bool:
    """Return whether two leaves have the same shape, dtype and values; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and forms.identical(a, b)
    return type(a) is type(b) and a == b


def _same_form(a: Leaf, b: Leaf) -> bool:
    """Return whether both are strided tensors of one type with the same device and strides, or neither is a tensor."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor)
    strided = a.layout == b.layout == torch.strided
    return type(a) is type(b) and a.device == b.device and strided and a.stride() == b.stride()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
