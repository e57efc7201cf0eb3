"""Time a candidate against the reference, each in its own process. The clock is read in this process, not in theirs."""

from __future__ import annotations

import contextlib
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perfsuite.correctness import equivalence, rule, truths
from perfsuite.correctness.comparison import excused_elements
from perfsuite.correctness.execution import only_tensors
from perfsuite.correctness.integrity.probe import same_leaf
from perfsuite.correctness.tally import Tally
from perfsuite.errors import NotEquivalent, PerfsuiteError, in_one_line
from perfsuite.judge.causes import beside_steps
from perfsuite.judge.problem import Problem
from perfsuite.judge.process import Ended
from perfsuite.judge.trial import Served, truth_of

ROUND_S = 0.02
"""Seconds in which the fastest side completes a round: this sets the number of calls of each side, up to MOST_CALLS."""
MOST_CALLS = 16
WARMUP_CALLS = 3
FEWEST_ROUNDS = 8
NARROW = 0.01
"""Half-width of an interval, as a log-ratio, at which it is narrow enough."""
LEVEL = 0.95
ALONE = 0.85
"""The candidate slows the reference down if the reference without it takes less than this share of its time with the
candidate, and each of its rounds without it is faster than each of its rounds with the candidate."""
ALONE_TIMES = 3
"""Number of measurements in which the reference must be faster alone. They alternate with measurements with the
candidate. One fast measurement is not enough: another program may just have ended."""
STAND_IN = "stand-in"
WRONG_WHILE_TIMED = "it returns a different answer while it is timed"
PROVEN, PROVING_SHARE = 4, 0.25
"""On average, one timed call in PROVEN is proven, while proving takes at most PROVING_SHARE of the time."""
MOST_DISCARDED = 8
"""Number of draws in a row on which the reference raises or is not finite, after which it is unusable."""
UNTIMED_SHARE = 0.1
"""Once each regime of values was tried, further untimed calls are proven for at most this share of the time."""
UNCERTAIN = 0.25
"""The time of a call is uncertain by this share of the time of its messages. Two processes with the same code differ
persistently by up to twice that amount."""
MOST_WIDENED = 10.0
"""An interval is widened by no more than this factor at each end."""
SLACK = 2.0
"""A timed answer may differ from the reference's by this multiple of the budget that the proofs use."""


class Unusable(Exception):  # noqa: N818 - a side, not an error of the judge's
    """The reference or its compiled form failed to start or to answer, so there is nothing to compare with."""

    def __init__(self, side: str, message: str) -> None:
        super().__init__(message)
        self.side = side


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speedup and its confidence interval at LEVEL."""

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
    messages_s: float = 0.0
    """Seconds of the messages for a call and of copying its output; the seconds of a call exclude them."""


def time_candidate(
    problem: Problem,
    sides: Mapping[str, Served],
    candidate: str,
    *,
    seconds: float,
    least: float,
    again: Callable[[], Served],
    stand_in: Callable[[], Served],
) -> Times:
    """Time interleaved rounds of all sides. Each call has new values, which are the same for all sides.

    At the end, close the candidate's process and, if the speedup may be at least `least`, time the reference without
    it. `again` starts a new process of the candidate, and `stand_in` another one of the reference. Raises NotEquivalent
    or Ended if the candidate fails or answers differently, and Unusable if another side does.
    """
    judge = _Judge(problem, candidate)
    calls = _calls(sides, judge)
    took: dict[str, list[float]] = {name: [] for name in sides}
    messages: list[float] = []
    until = time.monotonic() + seconds
    while True:
        of_calls, of_messages = _round(sides, judge, calls)
        for name, spent in of_calls.items():
            took[name].append(spent)
        messages.append(of_messages)
        rounds = len(took[candidate])
        ratios = {name: _ratio(took[name], took[candidate]) for name in sides if name != candidate}
        if rounds >= judge.rounds and (time.monotonic() > until or all(map(_is_narrow, ratios.values()))):
            sides[candidate].close()
            judge.judge_biases()
            if ratios["reference"].high >= least:  # otherwise it is too slow anyway
                with contextlib.closing(stand_in()) as other:
                    _same_alone(sides["reference"], judge, took["reference"], calls, again, other)
            medians = {name: statistics.median(values) for name, values in took.items()}
            messages_s = statistics.median(messages)
            return Times(
                rounds=rounds,
                calls=calls,
                seconds=medians,
                ratios={
                    n: _widened(r, medians[n], medians[candidate], UNCERTAIN * messages_s) for n, r in ratios.items()
                },
                messages_s=messages_s,
            )


def _round(sides: Mapping[str, Served], judge: _Judge, calls: int) -> tuple[dict[str, float], float]:
    """Return (seconds of a call of each side, seconds of the messages): medians of `calls` calls, each with values of
    its own.

    Each call is a request of its own. If the inputs of several calls were available at once, the candidate could
    process them in one launch.
    """
    spent: dict[str, list[float]] = {name: [] for name in sides}
    copies, untimed = [], secrets.randbelow(calls)
    for number in range(calls):
        if number == untimed and judge.candidate in sides:
            judge.prove_untimed(sides[judge.candidate])
        drawn = judge.drawn()
        for name in sorted(sides, key=lambda _: secrets.randbits(30)):
            spent[name].append(judge.called(name, sides[name], drawn))
        copies.append(judge.copying(sides["reference"]))
    messages = statistics.median(copies)
    return {name: _without(statistics.median(every), messages) for name, every in spent.items()}, messages


def _without(spent: float, copies: float) -> float:
    """Return the seconds of a call without its messages and copies, but at least the uncertainty of these."""
    return max(spent - copies, UNCERTAIN * copies)


def _same_alone(
    reference: Served,
    judge: _Judge,
    beside: Sequence[float],
    calls: int,
    again: Callable[[], Served],
    stand_in: Served,
) -> None:
    """Raise NotEquivalent if the reference is faster each time the candidate's process has ended.

    Then the `stand_in` is called in place of the candidate: between calls of any other process, the reference takes up
    to a fifth longer than alone.
    """

    def measured(sides: Mapping[str, Served]) -> list[float]:
        return [_round(sides, judge, calls)[0]["reference"] for _ in range(FEWEST_ROUNDS)]

    alone: list[float] = []
    for number in range(2 * ALONE_TIMES - 1):
        if number % 2:
            with contextlib.closing(again()) as candidate:
                beside = measured({judge.candidate: candidate, "reference": reference})
        else:
            alone = measured({STAND_IN: stand_in, "reference": reference})
        if not _faster(alone, beside):
            return
    raise NotEquivalent(
        f"it slows the reference, which takes {statistics.median(beside) * 1e6:.3g} µs beside it and "
        f"{statistics.median(alone) * 1e6:.3g} µs without it"
    )


def _faster(alone: Sequence[float], beside: Sequence[float]) -> bool:
    return max(alone) < min(beside) and statistics.median(alone) < ALONE * statistics.median(beside)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The arguments of a timed call, and its expected answer."""

    arguments: Sequence[Any]
    expected: Sequence[torch.Tensor]
    """The reference's outputs."""
    excused: Sequence[torch.Tensor | None]
    """For each output, the mask of the elements that the reference excuses."""
    truth: truths.Truth | None
    """The truth, for a random part of the calls: there, the candidate's answer is compared with it as in a proof."""


class _Judge:
    """Draws new values for each call, computes the reference's outputs for them here, and compares answers with
    these."""

    def __init__(self, problem: Problem, candidate: str) -> None:
        self.problem, self.candidate = problem, candidate
        self.began = time.monotonic()
        self.proving_s = self.untimed_s = 0.0
        self.tally = Tally()
        """The figures of the candidate's proven calls, each on values of its own."""
        self.kinds = problem.cases(1, secrets.randbits(31))
        """Draws for untimed calls, which together have each regime of values."""
        self.rounds = max(FEWEST_ROUNDS, len(self.kinds))
        """Fewest rounds. Each of the first ones also proves one draw of `kinds`."""
        truth = self._first_truth()
        self.forms = only_tensors(truth.reference)
        self.allowed = [
            SLACK
            * math.hypot(
                rule.K_NORM * max(_relative(truth.errors.get(name), leaf), _eps(leaf)),
                rule.MOVED_NORM * _relative(truth.moved.get(name), leaf),
            )
            for name, leaf in truth.reference.items()
            if isinstance(leaf, torch.Tensor)
        ]

    def _first_truth(self) -> truths.Truth:
        reason = ""
        for _ in range(MOST_DISCARDED):
            seed = secrets.randbits(31)
            truth = self._truth(seed, self.problem.values(seed))
            if isinstance(truth, truths.Truth):
                return truth
            reason = truth
        raise Unusable("reference", reason)

    def _truth(self, seed: int, values: dict[str, Any]) -> truths.Truth | str:
        """Return the truth for the inputs of this seed, or why there is none."""
        began = time.monotonic()
        try:
            return truth_of(self.problem, self.problem.case(seed), values)
        finally:
            self.proving_s += time.monotonic() - began

    def drawn(self) -> _Drawn:
        """Return new values for one call of each side, on which the reference does not raise."""
        reason = ""
        for _ in range(MOST_DISCARDED):
            try:
                return self._drawn()
            except PerfsuiteError:
                raise
            except Exception as error:
                reason = f"raises {in_one_line(error)}"
        raise Unusable("reference", reason)

    def _drawn(self) -> _Drawn:
        """Return new values for one call of each side. Raises what the reference raises on them."""
        seed = secrets.randbits(31)
        values = self.problem.values(seed)
        proven = not secrets.randbelow(PROVEN) and self.proving_s <= PROVING_SHARE * (time.monotonic() - self.began)
        truth = self._truth(seed, values) if proven else ""
        known = None if isinstance(truth, str) else truth
        answer = self.problem.call(values) if known is None else known.reference
        masks = self.problem.excused(values)
        return _Drawn(
            arguments=self.problem.arguments(values),
            expected=only_tensors(answer),
            excused=[excused_elements(masks, name, leaf) for name, leaf in answer.items()],
            truth=known,
        )

    def prove_untimed(self, side: Served) -> None:
        """Prove a call that is not timed, on values as a proof draws them. To the candidate it is like a timed call."""
        began, problem = time.monotonic(), self.problem
        if not self.kinds:
            if self.untimed_s > UNTIMED_SHARE * (began - self.began):
                return
            self.kinds = problem.cases(1, secrets.randbits(31))
        case = self.kinds.pop()
        values = problem.build(case)
        truth = truth_of(problem, case, values)
        self.untimed_s += time.monotonic() - began
        if isinstance(truth, truths.Truth):
            _, (answer,) = side.call([problem.arguments(values)], self.forms)
            self._prove(answer, truth)
            side.settled()

    def called(self, name: str, side: Served, drawn: _Drawn) -> float:
        """Call a side and check its answer. Return the seconds of the call and of its messages."""
        with self._blaming(name):
            spent, (answer,) = side.call([drawn.arguments], self.forms)
            self._check(answer, drawn)
            if drawn.truth is not None and name == self.candidate:
                self._prove(answer, drawn.truth)
            side.settled()
            return spent

    def _prove(self, answer: Sequence[torch.Tensor], truth: truths.Truth) -> None:
        began = time.monotonic()
        produced: dict[str, Any] = dict(zip(truth.reference, answer, strict=True))
        try:
            equivalence.judge(
                self.problem.pair, truth, produced, name="candidate", tally=self.tally, strict_strides=False
            )
        except NotEquivalent as error:
            raise NotEquivalent(f"{WRONG_WHILE_TIMED}: {str(error).partition(': ')[2] or error}") from None
        self.proving_s += time.monotonic() - began

    def judge_biases(self) -> None:
        """Raise NotEquivalent if the errors of the proven calls lean to one side."""
        for message in self.tally.biases.found():
            raise NotEquivalent(message)

    def copying(self, reference: Served) -> float:
        """Return the seconds of a request that only copies outputs."""
        with self._blaming("reference"):
            return reference.copies(self.forms)

    @contextlib.contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Ended, NotEquivalent) as error:
            if name == self.candidate:
                raise
            raise Unusable(name, str(error).removeprefix("it ")) from None

    def _check(self, answers: Sequence[torch.Tensor], drawn: _Drawn) -> None:
        for number, (a, b, excused) in enumerate(zip(answers, drawn.expected, drawn.excused, strict=True)):
            if not _near(a if excused is None else torch.where(excused, b, a), b, self.allowed[number]):
                clause = beside_steps(self.problem.pair, a, b)
                raise NotEquivalent(
                    f"{WRONG_WHILE_TIMED}: output {number} of a timed call is not the reference's{clause}"
                )


def _relative(error: torch.Tensor | None, leaf: torch.Tensor) -> float:
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf.resolve_conj())
    if error is None or not leaf.is_floating_point() or not leaf.numel():
        return 0.0
    size = float(leaf.double().square().mean().sqrt())
    return float(error.double().square().mean().sqrt()) / size if size > 0 and math.isfinite(size) else 0.0


def _eps(leaf: torch.Tensor) -> float:
    return torch.finfo(leaf.dtype).eps if leaf.is_floating_point() or leaf.is_complex() else 0.0


def _near(a: torch.Tensor, b: torch.Tensor, allowed: float) -> bool:
    if b.is_complex() and a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not b.is_floating_point():
        return same_leaf(a, b)
    a, b = a.double(), b.double()
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not same_leaf(a[~finite], b[~finite]):
        return False
    x, y = a[finite], b[finite]
    return float((x - y).norm()) <= allowed * float(y.norm())


def _calls(sides: Mapping[str, Served], judge: _Judge) -> int:
    """Warm up all sides, and return the number of calls in a round."""
    drawn = judge.drawn()
    fastest = min([judge.called(name, side, drawn) for _ in range(WARMUP_CALLS)][-1] for name, side in sides.items())
    return max(1, min(MOST_CALLS, math.ceil(ROUND_S / max(fastest, 1e-6))))


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> Ratio:
    """Return the median of the rounds' ratios, with a distribution-free interval, from order statistics."""
    from scipy import stats  # on first use: it takes half a second

    logs = sorted(math.log(a / b) for a, b in zip(slow, fast, strict=True))
    cut = int(stats.binom.ppf((1 - LEVEL) / 2, len(logs), 0.5))
    low, high = logs[max(0, cut - 1)], logs[min(len(logs) - 1, len(logs) - cut)]
    return Ratio(math.exp(statistics.median(logs)), math.exp(low), math.exp(high))


def _widened(ratio: Ratio, slow: float, fast: float, uncertain: float) -> Ratio:
    """Return `ratio` with an interval wide enough for errors of up to `uncertain` seconds in both `slow` and `fast`."""
    least = 1 / MOST_WIDENED
    low = max(1 - uncertain / slow, least) / (1 + uncertain / fast)
    high = (1 + uncertain / slow) / max(1 - uncertain / fast, least)
    return Ratio(ratio.value, ratio.low * max(low, least), ratio.high * min(high, MOST_WIDENED))


def _is_narrow(ratio: Ratio) -> bool:
    return math.log(ratio.high / ratio.low) / 2 <= NARROW
