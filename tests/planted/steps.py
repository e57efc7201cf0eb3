"""Faults 49 to 51: state that instances share, step inputs that are kept, steps that are skipped."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from catalogue import Time, fault, honest, pair

from perfsuite import Pair, floats, size, stateful, tensor

Step = Callable[[torch.Tensor], None]

VALUES = floats(-2, 2)


def momentum(p: torch.Tensor) -> Step:
    m = torch.zeros_like(p)

    def step(g: torch.Tensor) -> None:
        m.mul_(0.9).add_(g)
        p.sub_(0.01 * m)

    return step


def counted(p: torch.Tensor, steps: list[int] | None = None) -> Step:
    number = [0] if steps is None else steps
    number[0] = 0

    def step(g: torch.Tensor) -> None:
        number[0] += 1
        p.sub_(g / number[0])

    return step


def stepping(optimized: Callable[..., Step], reference: Callable[..., Step] = momentum) -> Pair:
    options: dict[str, Any] = {
        "inputs": {"p": tensor("n", values=VALUES)},
        "step_inputs": {"g": tensor("n", values=VALUES)},
        "mutates": {"p"},
        "sizes": {"n": size(1, 17)},
        "workloads": [],
    }
    return pair(stateful(optimized), reference=stateful(reference), **options)


@fault(49, "momentum in a global", "when several instances of it step in turn", stage="integrity")
def global_momentum(time: Time) -> Pair:
    state: dict[str, torch.Tensor] = {}

    def build(p: torch.Tensor) -> Step:
        state["m"] = torch.zeros_like(p)

        def step(g: torch.Tensor) -> None:
            state["m"].mul_(0.9).add_(g)
            p.sub_(0.01 * state["m"])

        return step

    return stepping(build)


@fault(49, "four slots that instances take in turn", "when several instances of it step in turn", stage="integrity")
def four_slots(time: Time) -> Pair:
    slots: list[torch.Tensor] = []
    made = itertools.count()

    def build(p: torch.Tensor) -> Step:
        number = next(made)
        if number < 4:
            slots.append(torch.zeros_like(p))
        slot = slots[number % 4] = torch.zeros_like(p) if slots[number % 4].shape != p.shape else slots[number % 4]
        slot.zero_()

        def step(g: torch.Tensor) -> None:
            slot.mul_(0.9).add_(g)
            p.sub_(0.01 * slot)

        return step

    return stepping(build)


@fault(49, "a counter of all instances", "when several instances of it step in turn", stage="integrity")
def shared_counter(time: Time) -> Pair:
    steps = [0]
    return stepping(lambda p: counted(p, steps), reference=counted)


@honest(49, "momentum by instance in a global")
def momentum_by_instance(time: Time) -> Pair:
    states: dict[int, torch.Tensor] = {}

    def build(p: torch.Tensor) -> Step:
        number = len(states)
        states[number] = torch.zeros_like(p)

        def step(g: torch.Tensor) -> None:
            states[number].mul_(0.9).add_(g)
            p.sub_(0.01 * states[number])

        return step

    return stepping(build)


def with_the_last(kept: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
    """Return a pair with momentum; each step stores `kept` of its gradient and adds it in the next step."""

    def build(p: torch.Tensor) -> Step:
        m, last = torch.zeros_like(p), list[torch.Tensor]()

        def step(g: torch.Tensor) -> None:
            if last:
                m.mul_(0.9).add_(last.pop())
            p.sub_(0.01 * (0.9 * m + g))
            last.append(kept(g))

        return step

    return stepping(build)


@fault(50, "the last gradient kept", "where the inputs of a step are overwritten after it", stage="integrity")
def keeps_gradient(time: Time) -> Pair:
    return with_the_last(lambda g: g)


@fault(50, "all gradients kept", "where the inputs of a step are overwritten after it", stage="integrity")
def keeps_gradients(time: Time) -> Pair:
    def build(p: torch.Tensor) -> Step:
        every: list[torch.Tensor] = []

        def step(g: torch.Tensor) -> None:
            every.append(g)
            weights = [0.9 ** (len(every) - 1 - i) for i in range(len(every))]
            p.sub_(0.01 * sum(w * one for w, one in zip(weights, every, strict=True)))

        return step

    return stepping(build)


@honest(50, "a copy of the last gradient")
def copies_gradient(time: Time) -> Pair:
    return with_the_last(torch.clone)


@fault(
    51,
    "a gradient of zeros left out",
    "p (in place) after ",
    " steps of the optimized side is wrong",
    stage="equivalence",
)
def leaves_out_zeros(time: Time) -> Pair:
    def build(p: torch.Tensor) -> Step:
        step = momentum(p)
        return lambda g: step(g) if bool(g.any()) else None

    return stepping(build)


@fault(
    51,
    "momentum that stays at zeros",
    "p (in place) after ",
    " steps of the optimized side is wrong",
    stage="equivalence",
)
def stays_at_zeros(time: Time) -> Pair:
    def build(p: torch.Tensor) -> Step:
        m = torch.zeros_like(p)

        def step(g: torch.Tensor) -> None:
            m.copy_(torch.where(g == 0, m, 0.9 * m + g))
            p.sub_(0.01 * m)

        return step

    return stepping(build)


@honest(51, "an update of zeros left out")
def leaves_out_updates(time: Time) -> Pair:
    def build(p: torch.Tensor) -> Step:
        m = torch.zeros_like(p)

        def step(g: torch.Tensor) -> None:
            m.mul_(0.9).add_(g)
            if bool(m.any()):
                p.sub_(0.01 * m)

        return step

    return stepping(build)
