"""Estimate the slowdown and the speedup of a gated workload, with their standard errors, and the margin. Pure
functions; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from perfsuite.baseline.accepted_entries import Entry
from perfsuite.baseline.priors import SuiteNoise
from perfsuite.gate import planning
from perfsuite.gate.planning import FEW_FACTOR, FEW_LEAST
from perfsuite.gate.stages import BETA, RED_STAGES, STAGES, ahead, beta
from perfsuite.records import Measurement, PromiseRecord, complete
from perfsuite.statistics.blocks import block_variance, process_mean
from perfsuite.statistics.hierarchical import (
    INFLATION_WORKLOADS,
    PROCESS_DOF,
    PROCESS_SD,
    SESSION_DOF,
    SPREAD_P,
    Estimate,
    Noise,
    Variance,
    baseline_mean,
    estimate,
    inflation,
    inflation_of_few,
    noise_of,
    paired_mean,
    run_mean,
    spread_p,
    t_quantile,
    within,
)

ALPHA = 0.01
"""Rate of false alarms over the whole suite: at most one in a hundred runs."""

POWER = 0.95

USUAL_PROCESSES = 6
"""Number of processes that is assumed for a margin up to MARGIN_USUAL. For a larger margin, the largest number in
STAGES is assumed."""

MARGIN_MIN = {"device": 0.01, "wall": 0.015}
"""Smallest default margin by clock. Below 1%, builds of one function differ by code placement, not by their design. On
the wall clock, the host's work between launches varies more from process to process."""

MARGIN_USUAL = 0.02

MARGIN_MOST = 0.10
"""Largest default margin; a larger one has to be declared."""

STORED_MARGIN_MAX = 0.04
"""Largest margin against stored figures. Stored figures of one session resolve 2 to 3%. A margin above twice
MARGIN_USUAL would be too loose to be useful."""

MARGIN_STEP = 0.001

OWN_SECONDS_SD = 0.01
"""Relative standard deviation of absolute times between sessions. They shift by about 1% with the chip's clock rate and
temperature."""

OWN_SECONDS_MARGIN = 0.10
"""Margin for absolute times that can be tested at the suite-wide level despite such shifts."""

NO_PROMISES = PromiseRecord()

NO_SHIFT = Variance(value=0.0, dof=math.inf)
"""Variance between sessions if both sides are timed in the same session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One workload of the gate, with all its data."""

    id: str
    runs: tuple[Measurement, ...] = ()
    entry: Entry | None = None
    """None if two revisions are compared without a baseline."""
    promises: PromiseRecord = NO_PROMISES
    margin: float | None = None
    """Declared margin; None for the one that the device can resolve."""
    against: str = ""
    """Description of the revision that is interleaved."""
    stored: str = ""
    """Reason why only stored figures can be compared; empty if the accepted revision is interleaved."""
    sampled: bool = False
    """Whether the workload is in the random sample that always runs a second process."""
    same_code: bool = False
    """Whether the current side provably runs the accepted code."""

    @property
    def few(self) -> bool:
        """True if the reference was too slow to repeat when accepted, so that the stored ratio is not precise."""
        return self.entry is not None and "reference" in self.entry.few

    @property
    def other(self) -> str:
        """The side that the optimized one is compared with."""
        return "reference" if self.stored else "accepted"

    @property
    def clock(self) -> str:
        """The clock on which the workload is timed. Needs an entry or a measurement."""
        return self.entry.clock if self.entry is not None else self.runs[0].clock

    @property
    def values(self) -> list[float]:
        """Process means of the log-ratio to the side `other`."""
        return process_values(self.runs, self.other)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """This run's speedup over the reference (a log-ratio) and the promised one."""

    now: Estimate
    promised: float = 0.0
    """Promised speedup; 0 if none is promised."""
    holds: bool = True
    """Whether this run shows that the promise holds."""
    broken: bool = False
    """Whether the shortfall is too large for a shift between sessions."""
    full: int = 0
    """Number of processes that timed the reference in every block, or at all if it is too slow to repeat."""
    likely: int = 1
    """Number of further processes that are probably enough for a decision."""
    least: bool = False
    """Whether the reference was stopped, so that this is a lower bound."""

    def __str__(self) -> str:
        low, high = (math.exp(x) for x in self.now.interval())
        interval = "" if self.least else f" (95% interval {low:.4g} to {high:.4g})"
        return f"{'at least ' * self.least}{math.exp(self.now.value):.4g}× as fast as the reference{interval}"


def margin_of(entry: Entry, suite: SuiteNoise, *, selected: int) -> float:
    """Return the smallest relative slowdown that the rule detects with 95% power, given the accepted noise."""
    return _default_margin(
        expected_variance(Subject(id=entry.id, entry=entry), suite), selected, MARGIN_MIN[entry.clock]
    )


def expected_variance(s: Subject, suite: SuiteNoise) -> Variance:
    """Return the accepted variance of a process mean, scaled to the number of blocks of this run's processes."""
    suite = suite.of(s.clock)
    if s.stored:
        return (noise_of(s.entry.process_means(), suite.ratio) if s.entry and not s.few else suite.ratio).process
    means = s.entry.process_means("accepted") if s.entry else []
    if not means or s.entry is None:
        return suite.paired.process
    found = noise_of(means, suite.paired).process
    if not s.runs:
        return found
    blocks = median(len(m.log_ratios["accepted"]) for m in s.runs)
    return replace(found, value=found.value * planning.scale(s.entry, blocks))


def noise_factor(subjects: Sequence[Subject], expected: Mapping[str, Variance]) -> float:
    """Return the ratio of this run's variance to the accepted one, over the workloads timed with both revisions."""
    others = [s for s in subjects if not s.same_code]
    if len(others) < INFLATION_WORKLOADS:
        return inflation_of_few(_block_variances(subjects))
    return inflation((s.values, expected[s.id]) for s in others)


def _block_variances(subjects: Iterable[Subject]) -> Iterator[tuple[Variance, Variance]]:
    """Yield (variance of a block in this run, variance when accepted) for each workload that has both."""
    for s in subjects:
        if s.entry is None:
            continue
        clock, processes = s.runs[0].clock, [p for session in s.entry.sessions for p in session.processes]
        now, before = (
            Variance(value=value, dof=dof)
            for value, dof in (
                block_variance([m.log_ratios[s.other] for m in s.runs], clock),
                block_variance([p.log_ratios.get("accepted", ()) for p in processes], clock),
            )
        )
        if min(now.value, now.dof, before.value, before.dof) > 0:
            yield now, before


def _known(expected: Variance, run: Sequence[Measurement], other: str) -> Variance:
    """Return the estimated process variance after this run.

    If the process means vary far beyond `expected`, only their own variance is used. If the blocks do, their variance
    replaces the expected one, since the mean of a process is not more precise than its blocks.
    """
    processes = [m.log_ratios[other] for m in run]
    value, dof = block_variance(processes, run[0].clock)
    value *= fmean(1 / len(blocks) for blocks in processes)
    if spread_p(value, dof, expected) < SPREAD_P:
        expected = replace(expected, value=value)
    value, dof = within([process_values(run, other)])
    if spread_p(value, dof, expected) < SPREAD_P:
        return Variance(value=value, dof=dof)
    return expected.updated(value, dof)


def slowdown_of(
    s: Subject, suite: SuiteNoise, accepted_noise: Variance, factor: float, selected: int
) -> tuple[Estimate, float]:
    """Return (log slowdown of the optimized side, margin)."""
    if s.stored and s.few:
        return _own_seconds(s), s.margin or OWN_SECONDS_MARGIN
    known = _known(replace(accepted_noise, value=factor * accepted_noise.value), s.runs, s.other)
    if not s.stored:
        # Without an entry, the noise is not known beforehand, so the margin follows from this run's own noise.
        margin = s.margin or (
            margin_of(s.entry, suite, selected=selected)
            if s.entry
            else _default_margin(known, selected, MARGIN_MIN[s.runs[0].clock])
        )
        # log_ratios["accepted"] is positive if the current side is faster.
        return _paired([-v for v in s.values], known), margin
    assert s.entry is not None
    noise = Noise(process=known, session=noise_of(s.entry.process_means(), suite.ratio).session)
    accepted = baseline_mean(s.entry.process_means(), noise)
    error = estimate(accepted.minus(run_mean([0.0] * STAGES[-1])), noise)
    least = MARGIN_MIN[s.entry.clock]
    own = _default_margin(accepted_noise, selected, least)
    # Beyond STORED_MARGIN_MAX the gate would be useless, unless the margin against the accepted revision is as large.
    margin = s.margin or min(max(own, _resolvable(error, selected, least)), max(own, STORED_MARGIN_MAX))
    return estimate(accepted.minus(run_mean(s.values)), noise), margin


def _own_seconds(s: Subject) -> Estimate:
    """Return the log slowdown of the optimized side by its own seconds. It is used if the reference is too slow for a
    precise ratio."""
    assert s.entry is not None
    accepted = [[math.log(p.seconds["optimized"]) for p in session.processes] for session in s.entry.sessions]
    now = [math.log(median(m.sides["optimized"].blocks_s)) for m in s.runs]
    own = Variance(value=PROCESS_SD**2, dof=PROCESS_DOF).updated(*within([*accepted, now]))
    noise = Noise(process=own, session=Variance(value=OWN_SECONDS_SD**2, dof=SESSION_DOF))
    return estimate(run_mean(now).minus(baseline_mean(accepted, noise)), noise)


def speedup_of(s: Subject, prior: Noise, selected: int, *, stages: int) -> Speedup | None:
    """Return this run's speedup over the reference; None if the reference was not timed.

    A promise holds if this run shows it. It is broken only if the shortfall is too large for a shift between sessions.
    """
    timed, least = complete((m for m in s.runs if m.log_ratios.get("reference")), "reference")
    full = [m for m in timed if "reference" not in m.few]
    used = full or timed
    if not used:
        return None
    # Later processes time the reference in full or not at all. So if two have few samples, the reference is slow.
    slow = s.few or (len(timed) > 1 and not full)
    noise = noise_of(s.entry.process_means() if s.entry else [], prior)
    noise = replace(noise, process=_known(noise.process, used, "reference"))
    mean = run_mean(process_values(used, "reference"))
    now, here = estimate(mean, noise), estimate(mean, replace(noise, session=NO_SHIFT))
    if not full:
        now, here = replace(now, se=FEW_FACTOR * now.se), replace(here, se=FEW_FACTOR * here.se)
    promised = s.promises.speedup
    if promised is None:
        return Speedup(now=now, full=len(full), least=least)
    bound = math.log(promised)
    shown = here if stages > 1 else now  # a promise that is being accepted must hold in every session
    spare = FEW_LEAST if s.entry and not slow and not full else 0.0
    one = replace(here, se=math.sqrt(noise.process.value))
    return Speedup(
        now=now,
        promised=promised,
        holds=shown.p_above(bound) <= (beta(len(s.runs)) if stages > 1 else BETA) and now.value >= bound + spare,
        broken=not least and now.p_below(bound) <= ALPHA / stages / selected,
        least=least,
        full=len(timed) if slow else len(full),
        likely=planning.further(one, bound, len(full), ahead(len(s.runs))),
    )


def _default_margin(process: Variance, selected: int, least: float) -> float:
    """Return the slowdown that USUAL_PROCESSES processes resolve. If it is above MARGIN_USUAL, return the one that
    STAGES[-1] processes resolve, limited to MARGIN_USUAL to MARGIN_MOST."""

    def found_by(processes: int) -> float:
        error = _paired([0.0] * processes, replace(process, dof=process.dof + processes - 1))
        return _resolvable(error, selected, least)

    size = found_by(USUAL_PROCESSES)
    return size if size <= MARGIN_USUAL else min(MARGIN_MOST, max(MARGIN_USUAL, found_by(STAGES[-1])))


def _resolvable(error: Estimate, selected: int, least: float) -> float:
    """Return the slowdown that an estimate with this error detects with 95% power: at least `least`, in multiples of
    MARGIN_STEP."""
    needed = t_quantile(1 - ALPHA / len(RED_STAGES) / selected, error.dof) + t_quantile(POWER, error.dof)
    # Margins end at MARGIN_MOST, so a larger value need not be exact, and its exponential could overflow.
    steps = math.ceil(math.expm1(min(needed * error.se, 1.0)) / MARGIN_STEP - 1e-9)
    return max(least, round(steps * MARGIN_STEP, 6))


def _paired(values: Sequence[float], process: Variance) -> Estimate:
    """Return the mean of processes that interleave two revisions, which a shift between sessions does not affect."""
    return estimate(paired_mean(values), Noise(process=process, session=NO_SHIFT))


def process_values(run: Iterable[Measurement], other: str) -> list[float]:
    return [process_mean(m.log_ratios[other], m.clock) for m in run]
