"""The gate's rule: measurements of a run + accepted figures → a `Verdict` for each workload. Pure functions; no torch.

The optimized side of the accepted revision is interleaved with the current one in every process, so no stored time
enters the comparison. After each number of processes in STAGES, the rule tests:

    PASS       the upper bound of the slowdown is below the margin, at BETA over all stages (BETA_SHARES)
    REGRESSED  p <= ALPHA over RED_STAGES and all selected workloads, and the estimate is at least half the margin
    IMPROVED   the same in the other direction, with an estimate of at least the margin
    NOISY      none of these, after the last stage

**Margin** The smallest slowdown that matters. A workload may declare it. By default, it is the smallest slowdown that
six processes detect with 95% power given the accepted noise, and at least 1% on the device clock and 1.5% on the wall
clock. If that is above 2%, it is the slowdown that twelve processes detect, limited to 2% to 10%. Without an entry,
this run's own noise is used instead of the accepted one.

**Noise** The variance of a process mean comes from the A/A comparison made at acceptance, shrunk toward the suite's
(hierarchical.py), and from this run's own processes. If a workload varies far beyond it (F tests), only its own
processes or blocks are used. If the whole run varies more than accepted, the variances of all interleaved workloads are
multiplied by that factor. To estimate the factor, a random sample of the workloads (`Subject.sampled`) always runs a
second process.

**The same code** as the accepted one, by the digests of everything that it runs (changed.py), cannot be slower because
of the code. It passes after one process, unless that shows a slowdown of the margin. Then the rule continues until the
median of its processes shows none, or all of them together show one. A single disturbed process cannot make it NOISY.

**Stored figures** are compared only if the accepted revision cannot be run (`Subject.stored` has the reason). The
session shift does not cancel, so the margin is wider. A slowdown is NOISY unless the optimized side's own seconds
changed most and the device's did not. A PASS is NOISY if the reference's seconds changed by more than the margin. If
the reference is too slow to repeat, only the optimized side's seconds are compared, with OWN_SECONDS_MARGIN.

**Promises** A promised speedup holds if the lower bound of this run's speedup is above it, at BETA over all stages. It
is broken if the upper bound, whose error includes the shifts between sessions, is below it, at ALPHA over stages and
workloads. If twelve processes with the reference in full show neither, the estimate decides: NOISY above the promise,
BELOW_FLOOR below. A promised throughput holds if the mean of this run's processes reaches it. If it does not after
RED_PROCESSES processes, the verdict is NOISY if a shift between sessions may be the reason or the device became slower,
else BELOW_FLOOR. Promised counts (memory, syncs, launches) are exact. A count above the accepted one in each of at
least two processes is REGRESSED (counts.py).

A green verdict names the cause if the stored speedup is clearly no longer reached (causes.py).

Missing, contradictory or non-finite data are red: UNMEASURED or NO_BASELINE, never PASS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from perfsuite.baseline.accepted_entries import changes_since
from perfsuite.baseline.priors import SuiteNoise
from perfsuite.gate import causes, counts, planning, soundness, throughput
from perfsuite.gate.estimates import (
    ALPHA,
    MARGIN_USUAL,
    NO_PROMISES,
    Speedup,
    Subject,
    expected_variance,
    noise_factor,
    process_values,
    slowdown_of,
    speedup_of,
)
from perfsuite.gate.planning import FEW_LEAST
from perfsuite.gate.stages import RED_PROCESSES, RED_STAGES, STAGES, ahead, beta
from perfsuite.records import Measurement, PromiseRecord, Status, Verdict
from perfsuite.statistics.hierarchical import Estimate, Variance, fit_prior


@dataclass(frozen=True, kw_only=True, slots=True)
class Undecided:
    """No decision yet. `processes` more are needed, with the reference in full if `reference`. `likely` more will
    probably be enough for a decision."""

    processes: int
    reason: str
    reference: bool = False
    likely: int = 1


def analyse(subjects: Iterable[Subject], suite: SuiteNoise, *, selected: int) -> dict[str, Verdict | Undecided]:
    """Apply the rule to all measurements so far. Call this again after every further process.

    `selected` is the number of workloads at collection. An earlier verdict may be withdrawn if the run turns out to be
    noisier than it seemed. Raises ValueError if `selected` is less than the number of subjects.
    """
    every = list(subjects)
    if selected < len(every):
        raise ValueError(f"selected={selected}, but {len(every)} workloads are named: the family would be too small")
    found = {s.id: _unusable(s) for s in every}
    expected = {s.id: expected_variance(s, suite) for s in every if found[s.id] is None}
    factor = noise_factor([s for s in every if s.id in expected and not s.stored], expected)
    return {
        s.id: found[s.id] or _judge(s, suite.of(s.clock), expected[s.id], 1.0 if s.stored else factor, selected)
        for s in every
    }


def promises_only(
    runs: Mapping[str, tuple[Measurement, ...]], promises: Mapping[str, PromiseRecord], *, selected: int
) -> dict[str, Verdict]:
    """Test the promises alone, from one or more processes: in a plain run, or before acceptance.

    Here, PASS means that the promises hold, and says nothing about a regression. There is only one stage. A speedup
    that is neither shown nor broken is NOISY if the estimate reaches it, else BELOW_FLOOR. A throughput that is not
    shown is NOISY unless it is clearly below its promise.
    """
    prior = fit_prior(
        [process_values(r, "reference")] for r in runs.values() if r and not soundness.incomplete(r, "reference")
    )
    answers: dict[str, Verdict] = {}
    for key, run in runs.items():
        s = Subject(id=key, runs=run, promises=promises.get(key, NO_PROMISES), stored="nothing is accepted")
        if text := _unsound(s):
            answers[key] = _say(s, Status.UNMEASURED, text)
            continue
        speed = speedup_of(s, prior, selected, stages=1)
        assert speed is not None  # each process has a sound ratio to the reference
        rate = throughput.throughput_of(s, selected, stages=1)
        shown = _shown(s, None, speed, None)
        missed = [] if speed.holds else [_promise_missed(s, shown, speed)]
        if rate is not None and not rate.holds:
            missed.append(_throughput_missed(s, shown, rate))
        if broken := counts.broken(run, s.promises):
            answers[key] = _say(replace(shown, moved="optimized"), Status.BELOW_FLOOR, broken)
        elif missed:
            answers[key] = next((v for v in missed if v.status is Status.BELOW_FLOOR), missed[0])
        else:
            answers[key] = _say(shown, Status.PASS, f"{speed}{counts.uncounted(run, s.promises)}")
    return answers


def _judge(s: Subject, suite: SuiteNoise, accepted: Variance, factor: float, selected: int) -> Verdict | Undecided:
    """Return the verdict on one workload whose measurements are sound, or `Undecided`.

    `accepted` is the accepted variance of a process mean. This run has `factor` times that variance.
    """
    processes = len(s.runs)
    further = next((n - processes for n in STAGES if n > processes), 0)
    if further and processes not in STAGES:
        return Undecided(processes=further, reason="between two stages")
    # Processes after the last stage serve a promise. If they counted for the slowdown, they would be further stages.
    staged = replace(s, runs=s.runs[: STAGES[-1]])
    slower, margin = slowdown_of(staged, suite, accepted, factor, selected)
    speed = speedup_of(s, suite.ratio, selected, stages=len(STAGES))
    shown = _shown(s, slower, speed, margin)
    status, text = _by_speed(staged, slower, margin, selected)
    if broken := counts.broken(s.runs, s.promises):
        return _say(replace(shown, moved="optimized"), Status.BELOW_FLOOR, broken)
    if more := counts.more_than_accepted(s.runs, s.entry):
        if counts.witnesses(s.runs, s.entry) < 2 and processes < STAGES[-1]:
            return Undecided(processes=1, reason=f"{more}; measured once more")
        return _say(replace(shown, moved="optimized"), Status.REGRESSED, more)
    rate = throughput.throughput_of(s, selected, stages=len(STAGES))
    unshown = _unshown(speed, rate)
    if status is Status.REGRESSED:
        return _regressed(s, shown, slower, text, unshown)
    doubtful = speed is not None and not speed.holds
    if status is None:
        one = Estimate(value=-slower.value, se=slower.se * math.sqrt(processes), dof=slower.dof)
        likely = planning.further(one, -math.log1p(margin), processes, ahead(processes))
        return Undecided(processes=further, reason=text, reference=doubtful, likely=likely)
    if not status.green:
        return _say(shown, status, text + unshown + _stored_note(s))
    if in_doubt := _promise_in_doubt(s, shown, speed, rate):
        return in_doubt
    if s.stored and not s.few and (moved := causes.reference_moved(s.entry, s.runs, margin)):
        return _say(shown, Status.NOISY, moved + _stored_note(s))
    return _with_cause(s, _say(shown, status, text + _stored_note(s)), speed, margin)


def _promise_in_doubt(
    s: Subject, shown: Verdict, speed: Speedup | None, rate: throughput.Throughput | None
) -> Verdict | Undecided | None:
    """Return None if all promises of speedup and throughput hold; else how many more processes are needed, or the
    verdict that a promise is missed."""
    processes = len(s.runs)
    if speed is not None and not speed.holds:
        enough = RED_PROCESSES if speed.broken else STAGES[-1]
        if speed.full >= enough or processes >= 2 * STAGES[-1]:
            return _promise_missed(s, shown, speed)
        text = f"{speed}: the promised {speed.promised:.4g}× is in doubt"
        return Undecided(processes=1, reason=text, reference=True, likely=speed.likely)
    if rate is not None and not rate.holds:
        if processes >= RED_PROCESSES:
            return _throughput_missed(s, shown, rate)
        return Undecided(processes=1, reason=f"{rate}: the promised {rate.goal} are in doubt")
    return None


def _by_speed(s: Subject, slower: Estimate, margin: float, selected: int) -> tuple[Status | None, str]:
    """Return (REGRESSED, IMPROVED, PASS, NOISY or None for no decision yet, reason in words), by the speed alone."""
    level, processes = ALPHA / len(RED_STAGES) / selected, len(s.runs)
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
    if processes >= STAGES[-1]:
        bound = math.expm1(slower.upper(1 - beta(processes)))
        decided = math.ceil(100 * bound + 1e-9) / 100
        always = f"; if it is always as noisy, let smaller ones pass: declare margin={decided:g}" if decided < 1 else ""
        return Status.NOISY, (
            f"too noisy: after {processes} processes a slowdown of up to {bound:.1%} is not excluded, "
            f"where {margin:.1%} matters; {text}; measure on a quiet machine{always}"
        )
    return None, f"a slowdown of {margin:.1%} is neither shown nor excluded yet"


def _unshown(speed: Speedup | None, rate: throughput.Throughput | None) -> str:
    """Return words about the promises that this run does not show, for a workload whose speed is undecided."""
    texts = [f"{speed}, promised {speed.promised:.4g}×"] if speed is not None and not speed.holds else []
    texts += [f"{rate}, promised {rate.goal}"] if rate is not None and not rate.holds else []
    return "".join(f"; not shown either: {text}" for text in texts)


def _regressed(s: Subject, shown: Verdict, slower: Estimate, text: str, unshown: str) -> Verdict:
    """Return the verdict if the optimized side is slower. Against stored figures, the device or the reference may be
    the reason; then the speed is undecided."""
    if not s.stored:
        return _say(replace(shown, moved="optimized"), Status.REGRESSED, text)
    side, why = causes.of_ratio(s.entry, s.runs, slower.value)
    if side == "device" or (side != "optimized" and not s.few):
        text = f"it is slower by the stored figures, but not because of the optimized side: {why}"
        return _say(replace(shown, moved=side), Status.NOISY, text + unshown + _stored_note(s))
    return _say(replace(shown, moved="optimized"), Status.REGRESSED, f"{text}; {why}{_stored_note(s)}")


def _promise_missed(s: Subject, shown: Verdict, speed: Speedup) -> Verdict:
    """Return the verdict if the speed is as accepted, but the promised speedup is not shown."""
    text = f"{speed}; promised {speed.promised:.4g}×"
    if s.entry is not None:
        text += f", {s.entry.speedup():.4g}× when accepted"
    if speed.now.value >= math.log(speed.promised):
        return _say(shown, Status.NOISY, f"{text}: within the noise; promise less, or reduce the workload's noise")
    held = s.entry is not None and s.entry.speedup() >= speed.promised and not s.few
    side, why = causes.of_speedup(s.entry, s.runs) if held else (None, "")
    status = Status.NOISY if side == "device" else Status.BELOW_FLOOR
    return _say(replace(shown, moved=side), status, f"{text}; {why}" if why else text)


def _throughput_missed(s: Subject, shown: Verdict, rate: throughput.Throughput) -> Verdict:
    """Return the verdict if the promised throughput is not reached."""
    text = f"{rate}; promised {rate.goal}"
    if not rate.broken:
        return _say(shown, Status.NOISY, f"{text}: sessions differ by as much; promise less")
    side, why = causes.of_seconds(s.entry, s.runs) if throughput.had_reached(s) else (None, "")
    status = Status.NOISY if side == "device" else Status.BELOW_FLOOR
    return _say(replace(shown, moved=side), status, f"{text}; {why}" if why else text)


def _with_cause(s: Subject, verdict: Verdict, speed: Speedup | None, margin: float) -> Verdict:
    """Return the green verdict, with the cause if the stored speedup is no longer reached, or if it is exceeded because
    the reference has become slower."""
    if s.entry is None or speed is None or speed.least or s.few:
        return verdict
    lost = math.log(s.entry.speedup()) - speed.now.value
    least = math.log1p(max(margin, MARGIN_USUAL)) if speed.full else FEW_LEAST
    if -FEW_LEAST < lost < least or abs(lost) < 2 * speed.now.se:
        return verdict
    side, why = causes.of_speedup(s.entry, s.runs)
    if lost < 0 and side != "reference":
        return verdict
    text = f"{speed}, {s.entry.speedup():.4g}× when accepted: {why}"
    return replace(verdict, moved=side, message=f"{verdict.message}; {text}")


# --- workloads to which the rule cannot be applied ------------------------------------------------------------------


def _unusable(s: Subject) -> Verdict | Undecided | None:
    """Return the verdict on a workload to which the rule cannot be applied, because its measurements are missing,
    unsound or of another workload; None if it can."""
    if not s.runs:
        return Undecided(processes=1, reason="nothing was measured")
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
    """Return what is missing or contradictory in the measurements; empty if they are sound."""
    if not s.runs:
        return "nothing was measured"
    foreign = next((m.id for m in s.runs if m.id != s.id), None)
    text = f"holds a measurement of {foreign}" if foreign else soundness.disagreement(s.runs)
    text = text or soundness.incomplete(s.runs, s.other)
    if not text and s.promises.speedup is not None and not any(m.log_ratios.get("reference") for m in s.runs):
        text = "speedup promised, but no process timed the reference"
    return text or throughput.missing(s) or counts.missing(s.runs, s.promises)


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
