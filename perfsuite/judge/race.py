"""Times a candidate against the reference, each in its own process, by a clock that is in neither."""

from __future__ import annotations

import math
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats

from perfsuite import equivalence
from perfsuite import inputs as make
from perfsuite.equivalence import NotEquivalent
from perfsuite.integrity.probe import same_leaf
from perfsuite.judge.problem import Problem
from perfsuite.judge.trial import Served

BATCH_S = 0.02
"""The least time of a batch: a message between processes takes a hundredth of it."""
MOST_CALLS = 64
MOST_BYTES = 1 << 30
"""The most memory for the inputs and outputs of one batch."""
FEWEST_ROUNDS = 8
NARROW = 0.01
"""An interval of this half-width, in log-ratio, is narrow enough."""
LEVEL = 0.95
ALONE = 0.85
"""If the reference alone takes less than this share of its time beside the candidate, the candidate slows it down."""
SLACK = 2.0
"""A timed answer may differ from the reference's by this multiple of the budget that the proofs use."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast, with its interval at LEVEL."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Times:
    """The result of all rounds: seconds of a call by side, and the speedup of the candidate over each other side."""

    rounds: int
    calls: int
    seconds: Mapping[str, float]
    ratios: Mapping[str, Ratio]


def race(problem: Problem, sides: Mapping[str, Served], candidate: str, seconds: float) -> Times:
    """Interleaved rounds of all sides on the same values, new ones in each. NotEquivalent where an answer is wrong.

    At the end the candidate's process is closed, and the reference is timed without it.
    """
    judge = _Judge(problem)
    calls = _calls(problem, sides, judge)
    took: dict[str, list[float]] = {name: [] for name in sides}
    until = time.monotonic() + seconds
    while True:
        every, expected = judge.drawn(calls)
        copies = _copying(sides["reference"], judge, calls)
        for name in sorted(sides, key=lambda _: secrets.randbits(30)):
            spent, outputs = sides[name].call(every, judge.forms)
            for answers, right in zip(outputs, expected, strict=True):
                judge.check(answers, right, name == candidate)
            sides[name].settled()
            took[name].append(_of_a_call(spent, copies, calls))
        rounds = len(took[candidate])
        ratios = {name: _ratio(took[name], took[candidate]) for name in sides if name != candidate}
        if rounds >= FEWEST_ROUNDS and (time.monotonic() > until or all(map(_is_narrow, ratios.values()))):
            sides[candidate].close()
            _same_alone(sides["reference"], judge, took["reference"], calls)
            return Times(
                rounds=rounds,
                calls=calls,
                seconds={name: statistics.median(values) for name, values in took.items()},
                ratios=ratios,
            )


def _copying(reference: Served, judge: _Judge, calls: int) -> float:
    """Seconds that a batch spends on copying its outputs."""
    return min(reference.copies(calls, judge.forms) for _ in range(2))


def _of_a_call(spent: float, copies: float, calls: int) -> float:
    """Seconds of one call in a batch, without the copying of its output."""
    return max(spent - copies, 0.01 * spent) / calls


def _same_alone(reference: Served, judge: _Judge, beside: Sequence[float], calls: int) -> None:
    """NotEquivalent where the reference is faster once the candidate's process is gone."""
    alone = []
    for _ in range(FEWEST_ROUNDS):
        every, _ = judge.drawn(calls)
        copies = _copying(reference, judge, calls)
        spent, _ = reference.call(every, judge.forms)
        alone.append(_of_a_call(spent, copies, calls))
    if max(alone) < min(beside) and statistics.median(alone) < ALONE * statistics.median(beside):
        raise NotEquivalent(
            f"it slows the reference, which takes {statistics.median(beside) * 1e6:.3g} µs beside it and "
            f"{statistics.median(alone) * 1e6:.3g} µs without it"
        )


class _Judge:
    """New values for each call, what the reference makes of them here, and whether an answer is that."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        case = make.workload_case(problem.pair.workloads[0], "float32", secrets.randbits(31))
        truth = equivalence.establish(problem.pair, case, problem.device, gradients=False)
        self.forms = [leaf for leaf in truth.reference.values() if isinstance(leaf, torch.Tensor)]
        self.allowed = [
            SLACK * equivalence.K_NORM * max(_relative(truth.errors.get(name), leaf), _eps(leaf))
            for name, leaf in truth.reference.items()
            if isinstance(leaf, torch.Tensor)
        ]

    def drawn(self, calls: int) -> tuple[list[list[Any]], list[list[torch.Tensor]]]:
        """(arguments of each call, the reference's outputs)."""
        every, expected = [], []
        for _ in range(calls):
            values = self.problem.values(secrets.randbits(31))
            expected.append([leaf for leaf in self.problem.call(values).values() if isinstance(leaf, torch.Tensor)])
            every.append(self.problem.arguments(values))
        return every, expected

    def check(self, answers: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], is_candidate: bool) -> None:
        """NotEquivalent where an answer of a timed call is not the reference's."""
        for number, (a, b) in enumerate(zip(answers, expected, strict=True)):
            if not _near(a, b, self.allowed[number]):
                what = "it answers otherwise while it is timed" if is_candidate else "torch.compile of the reference"
                raise NotEquivalent(f"{what}: output {number} of a timed call is not the reference's")


def _relative(error: torch.Tensor | None, leaf: torch.Tensor) -> float:
    if error is None or not leaf.is_floating_point() or not leaf.numel():
        return 0.0
    size = float(leaf.double().square().mean().sqrt())
    return float(error.double().square().mean().sqrt()) / size if size > 0 and math.isfinite(size) else 0.0


def _eps(leaf: torch.Tensor) -> float:
    return torch.finfo(leaf.dtype).eps if leaf.is_floating_point() else 0.0


def _near(a: torch.Tensor, b: torch.Tensor, allowed: float) -> bool:
    if not b.is_floating_point():
        return same_leaf(a, b)
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not same_leaf(a[~finite], b[~finite]):
        return False
    x, y = a[finite].double(), b[finite].double()
    return float((x - y).norm()) <= allowed * float(y.norm())


def _calls(problem: Problem, sides: Mapping[str, Served], judge: _Judge) -> int:
    """How many calls make a batch long enough, of the fastest side; all sides are warm afterwards."""
    every, _ = judge.drawn(1)
    held = make.bytes_in(every) + sum(t.numel() * t.element_size() for t in judge.forms)
    most = max(1, min(MOST_CALLS, MOST_BYTES // max(1, held)))
    fastest = math.inf
    for side in sides.values():
        for _ in range(3):
            seconds, _ = side.call(every, judge.forms)
        fastest = min(fastest, seconds)
    return max(1, min(most, math.ceil(BATCH_S / max(fastest, 1e-6))))


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """The median of the rounds' ratios, with an interval that supposes no distribution."""
    logs = sorted(math.log(a / b) for a, b in zip(slow, fast, strict=True))
    cut = int(stats.binom.ppf((1 - LEVEL) / 2, len(logs), 0.5))
    low, high = logs[max(0, cut - 1)], logs[min(len(logs) - 1, len(logs) - cut)]
    return Ratio(math.exp(statistics.median(logs)), math.exp(low), math.exp(high))


def _is_narrow(ratio: Ratio) -> bool:
    return math.log(ratio.high / ratio.low) / 2 <= NARROW
