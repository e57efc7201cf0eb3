"""The gate's rule: measurements of a run + what was accepted → a `Verdict` for each workload. Pure; no torch.

The optimized side of the accepted revision is interleaved with the current one in every process, so that no stored
time enters the comparison. After each number of processes in LOOKS the rule decides what is clear by then:

    PASS       the upper bound of the slowdown lies below the margin, at BETA over all looks (BETA_SHARES)
    REGRESSED  p <= ALPHA over RED_LOOKS and all selected workloads, and the estimate is at least half the margin
    IMPROVED   the same in the other direction, with an estimate of at least the margin
    NOISY      neither, after the last look

**Margin** The smallest slowdown that matters. A workload may declare it. Otherwise it is what the device resolves: the
smallest slowdown that six processes find with 95% power given the accepted noise, at least 1% on the device clock and
1.5% on the wall clock; where that is above 2%, what all twelve find, from 2% to 10%. Without an entry this run's own
noise takes the place of the accepted one.

**Noise** The variance of a process mean comes from the A/A comparison made at acceptance, shrunk toward the suite's
(statistics.py), and from this run's own processes. A workload that varies far beyond it (F tests) is judged by its own
processes, or blocks, alone. Where the whole run varies more than accepted, the variances of all interleaved workloads
grow by that factor; for this a random sample of the workloads (`Subject.sampled`) always runs a second process.

**The same code** as the accepted one, by the digests of all that it runs (changed.py), cannot be slower because of the
code. It passes after one process, unless that shows a slowdown of the margin; then the rule goes on until the median
of its processes shows none, or all of them together show one. A single disturbed process cannot make it NOISY.

**Stored figures** are compared only where the accepted revision cannot be run (`Subject.stored` says why). The session
shift does not cancel there, so the margin is wider. A slowdown is NOISY unless the optimized side's own seconds moved
most and the device's did not; a PASS is NOISY where the reference's seconds moved beyond the margin. A reference too
slow to repeat leaves the optimized side's seconds alone: they hold OWN_SECONDS_MARGIN.

**Promises** A promised speedup holds where the lower bound of this run's speedup is above it, at BETA over all looks.
It is broken where the upper bound, with the shifts between sessions in its error, is below it, at ALPHA over looks and
workloads. Where twelve processes with the reference in full show neither, the estimate decides: NOISY above the
promise, BELOW_FLOOR below. Promised counts (memory, syncs, launches) are exact. What each of two processes or more
counted more than when accepted is REGRESSED (counts.py).

A green verdict names the cause where the stored speedup is clearly no longer reached (causes.py).

Whatever is missing, contradictory or not finite is red: UNMEASURED or NO_BASELINE, never PASS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from perfsuite import causes, counts, planning, soundness
from perfsuite.baseline import Entry, changes_since
from perfsuite.blocks import block_variance, process_mean
from perfsuite.planning import FEW_FACTOR, FEW_LEAST
from perfsuite.priors import Suite
from perfsuite.records import Measurement, PromiseRecord, Status, Verdict, complete
from perfsuite.stages import BETA, LOOKS, RED_LOOKS, RED_PROCESSES, ahead, beta
from perfsuite.statistics import (
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
    fit_prior,
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
"""Rate of false alarms over the whole suite: one in a hundred runs at most."""
POWER = 0.95
USUAL_PROCESSES = 6
"""Number of processes that resolve a margin up to MARGIN_USUAL; for a larger margin all of LOOKS are counted on."""
MARGIN_MIN = {"device": 0.01, "wall": 0.015}
"""Below 1%, what differs between two builds of one function is code placement, not its design. What the host does
between launches varies more from process to process."""
MARGIN_USUAL = 0.02
MARGIN_MOST = 0.10
"""Largest default margin; a larger one has to be declared."""
STORED_MARGIN_MAX = 0.04
"""Largest margin against stored figures. Stored figures of one session resolve 2 to 3%, and beyond twice MARGIN_USUAL
it is no gate."""
MARGIN_STEP = 0.001
OWN_SECONDS_SD = 0.01
"""Standard deviation of seconds by themselves between sessions: they shift by about 1% with the chip's clock and
temperature."""
OWN_SECONDS_MARGIN = 0.10
"""Margin that seconds by themselves can hold at the suite-wide level with such shifts."""
NO_PROMISES = PromiseRecord()
NO_SHIFT = Variance(value=0.0, dof=math.inf)
"""The session's variance where both sides are timed in the same session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One workload under judgement, with everything known of it."""

    id: str
    runs: tuple[Measurement, ...] = ()
    entry: Entry | None = None
    """None where two revisions are compared without a baseline."""
    promises: PromiseRecord = NO_PROMISES
    margin: float | None = None
    """Margin as declared; None for the one that the device resolves."""
    against: str = ""
    """The revision that is interleaved, in words."""
    stored: str = ""
    """Why only stored figures can be compared; empty where the accepted revision is interleaved."""
    sampled: bool = False
    """In the sample that always runs a second process."""
    same_code: bool = False
    """Whether the current side provably runs the accepted code."""

    @property
    def few(self) -> bool:
        """Whether the reference was too slow to repeat when accepted, so that the stored ratio is not precise."""
        return self.entry is not None and "reference" in self.entry.few

    @property
    def other(self) -> str:
        """The side that the optimized one is compared with."""
        return "reference" if self.stored else "accepted"

    @property
    def clock(self) -> str:
        """The clock that it is timed on; there is an entry or a measurement."""
        return self.entry.clock if self.entry is not None else self.runs[0].clock

    @property
    def values(self) -> list[float]:
        """Process means of the log-ratio to the side `other`."""
        return _values(self.runs, self.other)


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """Not decided yet. `processes` more are needed, with the reference in full where its speedup is in doubt; `likely`
    more will probably decide."""

    processes: int
    reason: str
    reference: bool = False
    likely: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """This run's speedup over the reference (a log-ratio) and the promised one."""

    now: Estimate
    promised: float = 0.0
    """Promised log-ratio; 0 where nothing is promised."""
    holds: bool = True
    broken: bool = False
    full: int = 0
    """Processes that sampled the reference in full; where it is too slow to repeat, that timed it."""
    likely: int = 1
    """As `Open.likely`."""
    least: bool = False
    """Whether the reference was stopped, so that this is a lower bound."""

    def __str__(self) -> str:
        low, high = (math.exp(x) for x in self.now.interval())
        interval = "" if self.least else f" (95% interval {low:.4g} to {high:.4g})"
        return f"{'at least ' * self.least}{math.exp(self.now.value):.4g}× as fast as the reference{interval}"


def analyse(subjects: Iterable[Subject], suite: Suite, *, selected: int) -> dict[str, Verdict | Open]:
    """Apply the rule to all that was measured so far. Call it again with every further process.

    `selected` is the number of workloads at collection. A verdict given earlier may be withdrawn when the run turns out
    to be noisier than it seemed. Raises ValueError if `selected` is less than the subjects.
    """
    every = list(subjects)
    if selected < len(every):
        raise ValueError(f"selected={selected}, but {len(every)} workloads are named: the family would be too small")
    found = {s.id: _unusable(s) for s in every}
    expected = {s.id: _expected(s, suite) for s in every if found[s.id] is None}
    factor = _noise_factor([s for s in every if s.id in expected and not s.stored], expected)
    return {
        s.id: found[s.id] or _judge(s, suite.of(s.clock), expected[s.id], 1.0 if s.stored else factor, selected)
        for s in every
    }


def promises_only(
    runs: Mapping[str, tuple[Measurement, ...]], promises: Mapping[str, PromiseRecord], *, selected: int
) -> dict[str, Verdict]:
    """Judge the promises by themselves, from one process on: in a plain run, or before acceptance.

    PASS means here that the promises hold, and says nothing about a regression. One look decides: a speedup that is
    neither shown nor broken is NOISY where the estimate reaches it, else BELOW_FLOOR.
    """
    prior = fit_prior(
        [_values(r, "reference")] for r in runs.values() if r and not soundness.incomplete(r, "reference")
    )
    answers: dict[str, Verdict] = {}
    for key, run in runs.items():
        s = Subject(id=key, runs=run, promises=promises.get(key, NO_PROMISES), stored="nothing is accepted")
        if text := _unsound(s):
            answers[key] = _say(s, Status.UNMEASURED, text)
            continue
        speed = _speedup(s, prior, selected, looks=1)
        assert speed is not None  # each process has a sound ratio to the reference
        shown = _shown(s, None, speed, None)
        if broken := counts.broken(run, s.promises):
            answers[key] = _say(replace(shown, moved="optimized"), Status.BELOW_FLOOR, broken)
        elif speed.holds:
            answers[key] = _say(shown, Status.PASS, f"{speed}{counts.uncounted(run, s.promises)}")
        else:
            answers[key] = _promise_missed(s, shown, speed)
    return answers


def margin_of(entry: Entry, suite: Suite, *, selected: int) -> float:
    """Return the smallest relative slowdown that the rule finds with 95% power, given the accepted noise."""
    return _default_margin(_expected(Subject(id=entry.id, entry=entry), suite), selected, MARGIN_MIN[entry.clock])


def _judge(s: Subject, suite: Suite, accepted: Variance, factor: float, selected: int) -> Verdict | Open:
    """Return the verdict on one workload whose measurements are sound, or what it still needs.

    `accepted` is the variance of a process mean as accepted, and this run has `factor` times as much.
    """
    processes = len(s.runs)
    further = next((n - processes for n in LOOKS if n > processes), 0)
    if further and processes not in LOOKS:
        return Open(processes=further, reason="between two looks")
    slower, margin = _slowdown(s, suite, accepted, factor, selected)
    speed = _speedup(s, suite.ratio, selected, looks=len(LOOKS))
    shown = _shown(s, slower, speed, margin)
    status, text = _by_speed(s, slower, margin, selected)
    if broken := counts.broken(s.runs, s.promises):
        return _say(replace(shown, moved="optimized"), Status.BELOW_FLOOR, broken)
    if more := counts.more_than_accepted(s.runs, s.entry):
        if processes == 1:
            return Open(processes=1, reason=f"{more}; measured once more")
        return _say(replace(shown, moved="optimized"), Status.REGRESSED, more)
    if status is Status.REGRESSED:
        return _regressed(s, shown, slower, text)
    doubtful = speed is not None and not speed.holds
    if status is None:
        one = Estimate(value=-slower.value, se=slower.se * math.sqrt(processes), dof=slower.dof)
        likely = planning.further(one, -math.log1p(margin), processes, ahead(processes))
        return Open(processes=further, reason=text, reference=doubtful, likely=likely)
    if not status.green:
        return _say(shown, status, text + _stored_note(s))
    if speed is not None and doubtful:
        enough = RED_PROCESSES if speed.broken else LOOKS[-1]
        if speed.full >= enough or processes >= 2 * LOOKS[-1]:
            return _promise_missed(s, shown, speed)
        text = f"{speed}: the promised {speed.promised:.4g}× is in doubt"
        return Open(processes=1, reason=text, reference=True, likely=speed.likely)
    if s.stored and not s.few and (moved := causes.reference_moved(s.entry, s.runs, margin)):
        return _say(shown, Status.NOISY, moved + _stored_note(s))
    return _with_cause(s, _say(shown, status, text + _stored_note(s)), speed, margin)


def _by_speed(s: Subject, slower: Estimate, margin: float, selected: int) -> tuple[Status | None, str]:
    """Return REGRESSED, IMPROVED, PASS, NOISY or None (not clear yet) by the speed alone, and the reason in words."""
    level, processes = ALPHA / len(RED_LOOKS) / selected, len(s.runs)
    change = math.expm1(slower.value)
    against = "when accepted, by the stored figures" if s.stored else s.against
    low, high = (math.expm1(x) for x in slower.interval())
    bounds = (low, high) if change >= 0 else (-high, -low)
    text = f"the optimized side is {causes.change(slower.value)} than {against} "
    text += f"(95% interval {100 * bounds[0]:.1f} to {bounds[1]:.1%}, margin {margin:.1%})"
    if processes >= RED_PROCESSES and slower.p_above(0) <= level and change >= margin / 2:
        return Status.REGRESSED, text
    if s.same_code and (typical := -median(s.values)) < math.log1p(margin):
        return Status.PASS, f"it runs the code of {s.against}; measured {causes.change(typical)} than that"
    if slower.upper(1 - beta(processes)) < math.log1p(margin) and (processes > 1 or not s.sampled):
        faster = slower.p_below(0) <= level and -change >= margin
        if faster and processes < RED_PROCESSES:
            return None, f"{text}; an improvement is reported after {RED_PROCESSES} processes"
        if faster:
            return Status.IMPROVED, f"{text}; run `perfsuite accept` to keep the gain"
        return Status.PASS, f"a slowdown of {margin:.1%} is excluded"
    if processes >= LOOKS[-1]:
        bound = math.expm1(slower.upper(1 - beta(processes)))
        decided = math.ceil(100 * bound + 1e-9) / 100
        always = f"; if it is always as noisy, let smaller ones pass: declare margin={decided:g}" if decided < 1 else ""
        return Status.NOISY, (
            f"too noisy: after {processes} processes a slowdown of up to {bound:.1%} is not excluded, "
            f"where {margin:.1%} matters; {text}; measure on a quiet machine{always}"
        )
    return None, f"a slowdown of {margin:.1%} is neither shown nor excluded yet"


def _regressed(s: Subject, shown: Verdict, slower: Estimate, text: str) -> Verdict:
    if not s.stored:
        return _say(replace(shown, moved="optimized"), Status.REGRESSED, text)
    side, why = causes.of_ratio(s.entry, s.runs, slower.value)
    if side == "device" or (side != "optimized" and not s.few):
        text = f"it is slower by the stored figures, but not because of the optimized side: {why}"
        return _say(replace(shown, moved=side), Status.NOISY, text + _stored_note(s))
    return _say(replace(shown, moved="optimized"), Status.REGRESSED, f"{text}; {why}{_stored_note(s)}")


def _promise_missed(s: Subject, shown: Verdict, speed: Speedup) -> Verdict:
    """Return the verdict where the speed is as accepted, yet the promised speedup is not shown."""
    text = f"{speed}; promised {speed.promised:.4g}×"
    if s.entry is not None:
        text += f", {s.entry.speedup():.4g}× when accepted"
    if speed.now.value >= math.log(speed.promised):
        return _say(shown, Status.NOISY, f"{text}: within the noise; promise less, or reduce the workload's noise")
    held = s.entry is not None and s.entry.speedup() >= speed.promised and not s.few
    side, why = causes.of_speedup(s.entry, s.runs) if held else (None, "")
    status = Status.NOISY if side == "device" else Status.BELOW_FLOOR
    return _say(replace(shown, moved=side), status, f"{text}; {why}" if why else text)


def _with_cause(s: Subject, verdict: Verdict, speed: Speedup | None, margin: float) -> Verdict:
    """Return the green verdict; where the stored speedup is no longer reached, with the cause."""
    if s.entry is None or speed is None or speed.least or s.few:
        return verdict
    lost = math.log(s.entry.speedup()) - speed.now.value
    least = math.log1p(max(margin, MARGIN_USUAL)) if speed.full else FEW_LEAST
    if lost < least or lost < 2 * speed.now.se:
        return verdict
    side, why = causes.of_speedup(s.entry, s.runs)
    text = f"{speed}, {s.entry.speedup():.4g}× when accepted: {why}"
    return replace(verdict, moved=side, message=f"{verdict.message}; {text}")


# --- estimates ------------------------------------------------------------------------------------------------------


def _expected(s: Subject, suite: Suite) -> Variance:
    """Return the variance of a process mean, as accepted, for as many blocks as this run's processes have."""
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


def _noise_factor(subjects: Sequence[Subject], expected: Mapping[str, Variance]) -> float:
    """Return how many times the accepted variance this run has, over the workloads timed with both revisions."""
    if len(subjects) < INFLATION_WORKLOADS:
        return inflation_of_few(_block_variances(subjects))
    return inflation((s.values, expected[s.id]) for s in subjects if not s.same_code)


def _block_variances(subjects: Iterable[Subject]) -> Iterator[tuple[Variance, Variance]]:
    """Yield (variance of a block in this run, the same when it was accepted) of each workload that has both."""
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
    """Return the process variance as known after this run. Where this run's processes vary far beyond `expected`, they
    alone count.

    Blocks that vary far beyond it show this at once: the mean of a process is no better than its blocks.
    """
    processes = [m.log_ratios[other] for m in run]
    value, dof = block_variance(processes, run[0].clock)
    value *= fmean(1 / len(blocks) for blocks in processes)
    if spread_p(value, dof, expected) < SPREAD_P:
        expected = replace(expected, value=value)
    value, dof = within([_values(run, other)])
    if spread_p(value, dof, expected) < SPREAD_P:
        return Variance(value=value, dof=dof)
    return expected.updated(value, dof)


def _slowdown(
    s: Subject, suite: Suite, accepted_noise: Variance, factor: float, selected: int
) -> tuple[Estimate, float]:
    """Return (log slowdown of the optimized side, margin)."""
    if s.stored and s.few:
        return _own_seconds(s), s.margin or OWN_SECONDS_MARGIN
    known = _known(replace(accepted_noise, value=factor * accepted_noise.value), s.runs, s.other)
    if not s.stored:
        # Without an entry nothing is known of the noise beforehand: the margin follows from this run's own.
        margin = s.margin or (
            margin_of(s.entry, suite, selected=selected)
            if s.entry
            else _default_margin(known, selected, MARGIN_MIN[s.runs[0].clock])
        )
        # log_ratios["accepted"] is positive where the current side is faster.
        return _paired([-v for v in s.values], known), margin
    assert s.entry is not None
    noise = Noise(process=known, session=noise_of(s.entry.process_means(), suite.ratio).session)
    accepted = baseline_mean(s.entry.process_means(), noise)
    error = estimate(accepted.minus(run_mean([0.0] * LOOKS[-1])), noise)
    least = MARGIN_MIN[s.entry.clock]
    own = _default_margin(accepted_noise, selected, least)
    # Beyond STORED_MARGIN_MAX it would be no gate, unless the accepted revision itself resolves no less.
    margin = s.margin or min(max(own, _resolvable(error, selected, least)), max(own, STORED_MARGIN_MAX))
    return estimate(accepted.minus(run_mean(s.values)), noise), margin


def _own_seconds(s: Subject) -> Estimate:
    """Return the log slowdown of the optimized side by its own seconds. It is used where the reference shows
    nothing."""
    assert s.entry is not None
    accepted = [[math.log(p.seconds["optimized"]) for p in session.processes] for session in s.entry.sessions]
    now = [math.log(median(m.sides["optimized"].blocks_s)) for m in s.runs]
    own = Variance(value=PROCESS_SD**2, dof=PROCESS_DOF).updated(*within([*accepted, now]))
    noise = Noise(process=own, session=Variance(value=OWN_SECONDS_SD**2, dof=SESSION_DOF))
    return estimate(run_mean(now).minus(baseline_mean(accepted, noise)), noise)


def _speedup(s: Subject, prior: Noise, selected: int, *, looks: int) -> Speedup | None:
    """Return this run's speedup over the reference; None where the reference was not timed.

    A promise holds where this run shows it. It is broken only if no session's shift explains why this run is below it.
    """
    timed, least = complete((m for m in s.runs if m.log_ratios.get("reference")), "reference")
    full = [m for m in timed if "reference" not in m.few]
    used = full or timed
    if not used:
        return None
    # After the first process all of the reference is asked for, or none: two with few samples show that it is slow.
    slow = s.few or (len(timed) > 1 and not full)
    noise = noise_of(s.entry.process_means() if s.entry else [], prior)
    noise = replace(noise, process=_known(noise.process, used, "reference"))
    mean = run_mean(_values(used, "reference"))
    now, here = estimate(mean, noise), estimate(mean, replace(noise, session=NO_SHIFT))
    if not full:
        now, here = replace(now, se=FEW_FACTOR * now.se), replace(here, se=FEW_FACTOR * here.se)
    promised = s.promises.speedup
    if promised is None:
        return Speedup(now=now, full=len(full), least=least)
    bound = math.log(promised)
    shown = here if looks > 1 else now  # a promise that is accepted is to hold in every session
    spare = FEW_LEAST if s.entry and not slow and not full else 0.0
    one = replace(here, se=math.sqrt(noise.process.value))
    return Speedup(
        now=now,
        promised=promised,
        holds=shown.p_above(bound) <= (beta(len(s.runs)) if looks > 1 else BETA) and now.value >= bound + spare,
        broken=not least and now.p_below(bound) <= ALPHA / looks / selected,
        least=least,
        full=len(timed) if slow else len(full),
        likely=planning.further(one, bound, len(full), ahead(len(s.runs))),
    )


def _default_margin(process: Variance, selected: int, least: float) -> float:
    """Return the slowdown that USUAL_PROCESSES resolve. Where it is above MARGIN_USUAL, return the one that all
    processes resolve, between MARGIN_USUAL and MARGIN_MOST."""

    def found_by(processes: int) -> float:
        error = _paired([0.0] * processes, replace(process, dof=process.dof + processes - 1))
        return _resolvable(error, selected, least)

    size = found_by(USUAL_PROCESSES)
    return size if size <= MARGIN_USUAL else min(MARGIN_MOST, max(MARGIN_USUAL, found_by(LOOKS[-1])))


def _resolvable(error: Estimate, selected: int, least: float) -> float:
    """Return the slowdown shown with 95% power by an estimate with this error; at least `least`, in MARGIN_STEP."""
    needed = t_quantile(1 - ALPHA / len(RED_LOOKS) / selected, error.dof) + t_quantile(POWER, error.dof)
    # No margin is beyond MARGIN_MOST: a larger error need not be exact, and its exponential could overflow.
    steps = math.ceil(math.expm1(min(needed * error.se, 1.0)) / MARGIN_STEP - 1e-9)
    return max(least, round(steps * MARGIN_STEP, 6))


def _paired(values: Sequence[float], process: Variance) -> Estimate:
    """Return the mean of processes that interleave two revisions: no session's shift enters."""
    return estimate(paired_mean(values), Noise(process=process, session=NO_SHIFT))


def _values(run: Iterable[Measurement], other: str) -> list[float]:
    return [process_mean(m.log_ratios[other], m.clock) for m in run]


# --- what cannot be judged ------------------------------------------------------------------------------------------


def _unusable(s: Subject) -> Verdict | Open | None:
    """Return the verdict on a workload that cannot be judged, because its measurements are unsound or of something
    else; None if it can."""
    if not s.runs:
        return Open(processes=1, reason="nothing was measured")
    if text := _unsound(s):
        return _say(s, Status.UNMEASURED, text)
    if s.entry is None:
        return _say(s, Status.NO_BASELINE, "nothing is accepted; run `perfsuite accept` for it") if s.stored else None
    change = changes_since(s.entry, s.runs[0])
    if change is None:
        return None
    status = Status.WRONG_MACHINE if change.startswith("device ") else Status.NO_BASELINE
    return _say(s, status, f"changed since it was accepted: {change}; run `perfsuite accept` for it")


def _unsound(s: Subject) -> str:
    """Return what is missing or contradictory in the measurements; empty where they are sound."""
    if not s.runs:
        return "nothing was measured"
    foreign = next((m.id for m in s.runs if m.id != s.id), None)
    text = f"holds a measurement of {foreign}" if foreign else soundness.disagreement(s.runs)
    text = text or soundness.incomplete(s.runs, s.other)
    if not text and s.promises.speedup is not None and not any(m.log_ratios.get("reference") for m in s.runs):
        text = "speedup promised, but no process timed the reference"
    return text or counts.missing(s.runs, s.promises)


# --- words ----------------------------------------------------------------------------------------------------------


def _shown(s: Subject, slower: Estimate | None, speed: Speedup | None, margin: float | None) -> Verdict:
    """Return the figures of a verdict, without its status."""
    verdict = Verdict(
        id=s.id,
        status=Status.UNMEASURED,
        message="",
        processes=len(s.runs),
        compared="stored figures" if s.stored and s.entry else s.against,
        margin=margin,
        accepted_speedup=s.entry.speedup() if s.entry else None,
        same_code=s.same_code,
    )
    if slower is not None:
        change, low, high = (math.expm1(x) for x in (slower.value, *slower.interval()))
        verdict = replace(verdict, slowdown=change, low=low, high=high)
    if speed is not None:
        now, low, high = (math.exp(x) for x in (speed.now.value, *speed.now.interval()))
        verdict = replace(verdict, speedup=now)
        if not speed.least:
            verdict = replace(verdict, speedup_low=low, speedup_high=high)
    return verdict


def _stored_note(s: Subject) -> str:
    return f"; compared with stored figures: {s.stored}" if s.stored and s.entry else ""


def _say(shown: Subject | Verdict, status: Status, text: str) -> Verdict:
    verdict = shown if isinstance(shown, Verdict) else _shown(shown, None, None, None)
    return replace(verdict, status=status, message=" ".join(f"{status} {verdict.id}: {text}".split()))
