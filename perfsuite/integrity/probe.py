"""One pair on one draw, with the side under suspicion: what every check of integrity is given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from perfsuite import equivalence, execution, forms, truths
from perfsuite import inputs as make
from perfsuite.errors import NotEquivalent
from perfsuite.execution import Leaf, Leaves
from perfsuite.pair import Pair, Side, as_side
from perfsuite.records import Case
from perfsuite.rule import NONE

STEPS = (1, 2)
"""The steps of a stateful pair after which its state is looked at."""


@dataclass(slots=True)
class Probe:
    """One pair on one draw, with the side under suspicion."""

    pair: Pair
    side: Side
    name: str
    case: Case
    device: str
    home: Path | None
    known: dict[tuple[int, int, bool], truths.Truth] = field(default_factory=dict)
    """Truths by the case's seed, the number of replicas, and whether they have gradients: the checks share them."""
    inputs: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By the case's seed, as they are drawn; a call gets a copy."""
    right: dict[int, Leaves] = field(default_factory=dict)
    """By the case's seed, the answer to it that was found right last."""
    touched: str | None = None
    """An undeclared input that a call has written to, as torch counts it, whatever it holds now."""
    number: int | None = None
    """The draw's number in a proof with several, each of which may try a part of the ways; None: all are tried."""

    def of_reference(self) -> Probe:
        """The same for the reference. Its right answers are not noted as the side's."""
        return replace(self, side=as_side(self.pair.reference), name="reference", right={})

    def drawn(self, case: Case | None = None) -> dict[str, Any]:
        used = case or self.case
        if used.seed not in self.inputs:
            self.inputs[used.seed] = make.build(self.pair, used, self.device, home=self.home)
        drawn: dict[str, Any] = make.clone(self.inputs[used.seed])
        return drawn

    def step_inputs(self, case: Case, step: int) -> dict[str, Any]:
        """The inputs of a step of a stateful pair, from 1."""
        return make.build_step(self.pair, case, self.device, step)

    def other_case(self, number: int = 0) -> Case:
        """Other values at the same sizes; another number, yet others."""
        seed = (self.case.seed ^ (0x5DEECE6 + 7919 * number)) % 2**31
        return Case(dtype=self.case.dtype, sizes=self.case.sizes, inputs=self.case.inputs, seed=seed)

    def call(
        self,
        values: dict[str, Any],
        case: Case | None = None,
        given: Callable[[dict[str, Any]], dict[str, Any]] = lambda v: v,
    ) -> Leaves:
        """Run the side on `values`, which it may change; `given` is shown the inputs of every step."""
        used = case or self.case
        execution.poison(self.pair, values)
        versions = self._versions(values)
        with execution.quiet(self.side):
            call = execution.callable_of(self.side)
            if self.pair.is_stateful:
                states = execution.run_steps(call, self.pair, values, STEPS, lambda i: given(self.step_inputs(used, i)))
                return execution.of_all_steps(states)
            produced = execution.run(call, self.pair, values, gradients=False, seed=used.seed)
        for path, tensor, version, shape, stride in versions:
            if tensor._version != version and (tensor.shape, tensor.stride()) == (shape, stride):
                self.touched = self.touched or path
        return produced

    def _versions(self, values: dict[str, Any]) -> list[tuple[str, torch.Tensor, int, torch.Size, tuple[int, ...]]]:
        """How often each undeclared input has been written to: torch counts it."""
        return [
            (path, tensor, tensor._version, tensor.shape, tensor.stride())
            for path, tensor in make.unchanging(self.pair, values)
            if not self.pair.is_stateful and not tensor.is_inference()
        ]

    def truth(self, case: Case | None = None, replicas: int = NONE, *, gradients: bool = False) -> truths.Truth:
        """Discard where the reference alone is not finite on it."""
        case = case or self.case
        key = case.seed, replicas, gradients
        if key not in self.known:
            pair = replace(self.pair, steps=STEPS) if self.pair.is_stateful else self.pair
            self.known[key] = truths.establish(
                pair,
                case,
                self.device,
                gradients=gradients,
                home=self.home,
                replicas=replicas,
                drawn=self.drawn(case),
            )
        return self.known[key]

    def is_right(self, produced: Leaves, case: Case | None = None) -> bool:
        """Whether these are the answer to the case."""
        try:
            self.judge(produced, case)
        except NotEquivalent:
            return False
        return True

    def answers_rightly(self) -> bool:
        """Whether a call on the draw is right; not where it is wrong anyhow, or the reference is not finite on it."""
        try:
            self.truth()
        except truths.Discard:
            return False
        return self.is_right(self.call(self.drawn()))

    def judge(self, produced: Leaves, case: Case | None = None) -> None:
        """NotEquivalent where they are not the answer to the case."""
        seed = (case or self.case).seed
        if self._is_known(produced, self.right.get(seed)):
            return
        equivalence.hold(self.pair, functools.partial(self.truth, case), produced, name=self.name)
        self.right[seed] = execution.copies_of(produced)

    def _is_known(self, produced: Leaves, right: Leaves | None) -> bool:
        """Whether they are a right answer again, bit for bit and in the same form: most are, and to judge takes long.

        Where the sign of zero counts none is: equal values may differ in it.
        """
        if right is None or self.pair.signed_zeros or produced.keys() != right.keys():
            return False
        return all(_same_form(leaf, right[n]) and same_leaf(leaf, right[n]) for n, leaf in produced.items())

    def drifted(self, error: NotEquivalent) -> NotEquivalent | None:
        """The fault of a side that was right and is wrong ever after, if that is so; `error` says how."""
        if self.case.seed not in self.right or any(self.is_right(self.call(self.drawn())) for _ in range(3)):
            return None
        return self.fault(f"drifts: right at first, and wrong ever after some calls: {error}")

    def fault(self, what: str) -> NotEquivalent:
        return NotEquivalent(f"{self.pair.name}: the {self.name} side {what}")


def same_leaf(a: Leaf, b: Leaf) -> bool:
    """The same value, bit for bit; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and forms.identical(a, b)
    return type(a) is type(b) and a == b


def _same_form(a: Leaf, b: Leaf) -> bool:
    """Two tensors of one type that lie in memory in the same way; or no tensors."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor)
    strided = a.layout == b.layout == torch.strided
    return type(a) is type(b) and a.device == b.device and strided and a.stride() == b.stride()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage, byte by byte."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
