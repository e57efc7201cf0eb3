"""The gate: this run's measurements against what was accepted → a `Verdict` for each workload. Pure; no torch.

Two looks. The first compares a few processes with the stored baseline. It passes what it can, and raises no alarm
about regressions, for it cannot tell a slower function from a shift of the session. What it leaves `Open` is measured
again in further processes, the optimized side of the accepted revision interleaved with the current one; there the
session cancels, and a change is called REGRESSED or IMPROVED. A ratio passes the first look only where the reference's
own seconds are the accepted ones too: what slows the reference alone (a clock, a neighbour) would hide a slowdown.

    entries + runs → first_look → Verdict | Open → second_look, stage after stage → Verdict

The second look passes and accuses at the end of each of its STAGES what is clear by then; what it may err is divided
among them (Bonferroni). Where the accepted revision cannot be loaded, `stored_look` takes its place.

**Margin** of a workload: the smallest slowdown that SECOND_PROCESSES processes of the second look find with 95% power
given the workload's own noise, rounded up to .1% and at least 1%. Where that is beyond 2%, it is 2% if all STAGES find
it; if they do not, the workload is too noisy to be gated, and its design is to be mended.

**Errors** A regression is called at one-sided p ≤ ALPHA / m, m being all selected workloads as fixed at collection,
and an estimate of half the margin or more. A pass excludes a slowdown of the margin or more at BETA_FIRST or
BETA_SECOND. Where a run spreads far beyond the baseline (a neighbour, a throttled chip), nothing stored says how far
it errs: the second look then judges by the spread of its own processes, and is NOISY where that is not enough.

**Promises** A promised speedup holds if the lower bound of its interval over sessions holds it, at ALPHA over the
family of m by Holm's rule; it is broken if the upper bound is below it. Between the two the second look decides: an
estimate below the promise is BELOW_FLOOR, one above it NOISY. Promised counts (memory, syncs, launches) are exact:
one process above the promise breaks it. At least one process must have counted, except on a CPU, where there is
nothing to count with.

**A reference sampled only few times** (`"reference" in few`) has no ratio good to 1%. Its promise must hold with the
standard error doubled: few samples leave the tails unseen. Regression is judged without the reference: the first look
leaves the workload open, the second compares accepted with current, as ever. The fallback compares the optimized
side's own seconds with the accepted ones; clocks and temperatures shift seconds by about 1% from session to session
(OWN_SECONDS_SD), so that it can only hold OWN_SECONDS_MARGIN.

Whatever is missing, contradictory or not finite is red: UNMEASURED or NO_BASELINE, never PASS.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from perfsuite.baseline import Entry, changes_since, is_cpu, short
from perfsuite.records import COPY, LAUNCH, MATMUL, Measurement, PromiseRecord, SideRecord, Status, Verdict
from perfsuite.statistics import (
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
    holm,
    noise_of,
    paired_mean,
    process_mean,
    run_mean,
    spread_p,
    suite_spread,
    t_quantile,
    within,
)

FIRST_PROCESSES = 3
"""Start-up is paid three times a run of the suite; three means pass most workloads."""
SECOND_PROCESSES = 6
"""Six resolve 1% at the usual noise; only what the first look left open pays for them."""
STORED_PROCESSES = 12
"""Without the accepted revision the session shift stays; twice the processes buy back part of it."""
ALPHA = 0.005
"""False alarms a look over the whole suite: one in two hundred runs."""
BETA_FIRST = 0.01
BETA_SECOND = 0.02
"""How often a slowdown of the margin may pass, in each look; together they leave the gate 95% power and more."""
POWER = 0.95
MARGIN_MIN = 0.01
"""Below 1%, what differs between two builds of one function is code placement, not its design."""
MARGIN_MAX = 0.02
"""Beyond 2% a workload would let pass what users feel."""
STORED_MARGIN_MAX = 0.04
"""Against a stored baseline of one session 2 to 3% is what can be resolved; more than twice MARGIN_MAX is no gate."""
MARGIN_STEP = 0.001
FEW_FACTOR = 2.0
"""A handful of samples does not show the tails of its own error: twice the error covers what they hide."""
OWN_SECONDS_SD = 0.01
"""Seconds by themselves shift by about 1% from session to session, with the chip's clock and temperature."""
OWN_SECONDS_MARGIN = 0.10
"""What seconds by themselves can hold at the suite-wide level with such shifts."""
MOVED_DEVICE = 0.02
"""Both sides' seconds moved one way by more than this, and by more than their ratio: what they share, not a side. An
anchor kernel that moved by less has stayed."""
MOVED_SHARE = 0.5
"""The device moved a side where an anchor kernel moved the same way by at least this share of it."""
RATIO_MAX = 20.0
"""A log-ratio beyond this is a broken clock: no side is half a billion times as fast."""
COUNTS = ("peak_bytes", "host_syncs", "launches")


@dataclass(frozen=True, slots=True)
class Stage:
    """An end of the second look: after so many processes, with its part of ALPHA and of BETA_SECOND."""

    processes: int
    alpha: float
    beta: float


STAGES = (Stage(3, 0.001, 0.005), Stage(SECOND_PROCESSES, 0.002, 0.0075), Stage(12, 0.002, 0.0075))
"""Most is clear after three. Twelve are for a machine that is noisier than the one that accepted: their own spread is
known well enough to judge by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """A workload that the first look could not decide, with all that the next one needs.

    `slowdown`, `low` and `high` are the first look's figures as in `Verdict`; None where the ratio tells nothing.
    """

    id: str
    reason: str
    entry: Entry
    promises: PromiseRecord
    runs: tuple[Measurement, ...]
    noise: Noise
    """The accepted noise: the entry's own, or the suite's where the reference was sampled few times."""
    paired: Noise
    """The noise of two revisions interleaved."""
    twin: bool
    """Whether `paired` was measured at acceptance, or is the ratio's noise in its stead."""
    selected: int
    margin: float
    slowdown: float | None = None
    low: float | None = None
    high: float | None = None
    spread: bool = False
    """The first look's processes spread far beyond the accepted noise: they lend the next look no variance."""

    @property
    def few(self) -> bool:
        return "reference" in self.entry.few or any("reference" in m.few for m in self.runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    """This run's speedup (a log-ratio), the log of the promised one, and what they amount to."""

    speedup: Estimate
    bound: float | None
    holds: bool = True
    broken: bool = False

    @property
    def promised(self) -> str:
        return "" if self.bound is None else f"{math.exp(self.bound):.4g}×"

    @property
    def measured(self) -> str:
        low, high = self.speedup.interval()
        return f"{math.exp(self.speedup.value):.4g}× (95% interval {math.exp(low):.4g} to {math.exp(high):.4g})"


# --- the looks -----------------------------------------------------------------------------------------------------


def suite_prior(entries: Mapping[str, Entry]) -> Noise:
    """The suite's own noise, from every entry whose reference was sampled in full."""
    return fit_prior(e.process_means() for e in entries.values() if "reference" not in e.few)


def twin_prior(entries: Mapping[str, Entry]) -> Noise | None:
    """The suite's noise of two imports of one revision, as measured when it was accepted; None where it was not."""
    twins = [means for e in entries.values() if (means := e.process_means("accepted"))]
    return fit_prior(twins) if twins else None


def margin(entry: Entry, prior: Noise, *, selected: int, twins: Noise | None = None) -> float:
    """The smallest relative slowdown that the second look finds with 95% power; above MARGIN_MAX it is too noisy.

    The second look holds two revisions of one side against each other. Where that was measured at acceptance (the
    accepted side against its own second import), its noise counts; else that of the ratio to the reference stands in.
    """
    process = _paired_noise(entry, prior, twins).process
    lent = 0 if _has_twin(entry, twins) else FIRST_PROCESSES - 1

    def found_by(processes: int, alpha: float) -> float:
        # By then the looks' processes have been added to what is known of the noise.
        known = Variance(value=process.value, dof=process.dof + lent + processes - 1)
        return _paired_margin(known, processes, alpha / selected)

    size = found_by(SECOND_PROCESSES, ALPHA - STAGES[0].alpha)
    if size <= MARGIN_MAX:
        return size
    return max(MARGIN_MAX, found_by(STAGES[-1].processes, STAGES[-1].alpha))


def too_noisy(entries: Mapping[str, Entry], ids: Collection[str]) -> list[str]:
    """A line for each of these accepted workloads that the gate will call too noisy, whatever it measures."""
    prior, twins = suite_prior(entries), twin_prior(entries)
    sizes = {i: margin(entries[i], prior, selected=len(entries), twins=twins) for i in sorted(ids) if i in entries}
    return [
        f"{key}: {_too_noisy(size)}, or measure it longer (`perfsuite accept --more`)"
        for key, size in sizes.items()
        if size > MARGIN_MAX and "reference" not in entries[key].few
    ]


def missing(entries: Mapping[str, Entry], collected: Collection[str], *, whole: bool) -> list[str]:
    """An error line for each accepted workload that was not collected: renamed, removed, or never reached.

    Only where the selection is `whole`: a part of the suite says nothing of the rest.
    """
    if not whole:
        return []
    return [
        f"{key}: in the baseline but not collected; if it was renamed or removed, run `perfsuite accept`"
        for key in sorted(set(entries) - set(collected))
    ]


def first_look(
    entries: Mapping[str, Entry],
    runs: Mapping[str, Sequence[Measurement]],
    promises: Mapping[str, PromiseRecord],
    *,
    selected: int,
    prior: Noise | None = None,
    processes: int = FIRST_PROCESSES,
) -> dict[str, Verdict | Open]:
    """Stage 1: `processes` processes of this run against the stored baseline, sorted by id.

    `promises` has every selected workload, `runs` the measurements of each (a missing key: nothing was measured),
    `entries` the whole baseline of this device. `selected` is the number of workloads at collection; `prior` is
    `suite_prior(entries)` unless given. ValueError if `selected` is less than the workloads named.
    """
    keys = sorted({*promises, *runs})
    _check_selected(selected, keys)
    prior = prior or suite_prior(entries)
    twins = twin_prior(entries)
    answers: dict[str, Verdict | Open] = {}
    opened: dict[str, Open] = {}
    for key in keys:
        promise, run, entry = promises.get(key, PromiseRecord()), tuple(runs.get(key, ())), entries.get(key)
        found = _unusable(key, run, processes, "reference") or _counts(key, run, promise, look=1)
        if found:
            answers[key] = found
        elif entry is None:
            text = "nothing is accepted for it on this device; run `perfsuite accept`"
            answers[key] = _say(_blank(key, len(run)), Status.NO_BASELINE, text)
        else:
            answers[key] = _changed(entry, run) or _open(entry, run, promise, prior, twins, selected)
    opened = {k: a for k, a in answers.items() if isinstance(a, Open)}
    if suite_spread((_values(o.runs, "reference"), o.noise.process) for o in opened.values() if not o.few):
        opened = {k: replace(o, spread=True) for k, o in opened.items()}
    held = _promises(opened, {k: o.runs for k, o in opened.items()}, selected)
    return {key: _decide_first(opened[key], held[key]) if key in opened else answers[key] for key in keys}


def second_look(
    opened: Mapping[str, Open], runs: Mapping[str, Sequence[Measurement]], *, stage: int = len(STAGES) - 1
) -> dict[str, Verdict]:
    """Stage 2: the optimized side of the accepted revision interleaved with the current one, in further processes.

    Each measurement has `log_ratios["accepted"]`, and "reference" too unless that one is too slow to repeat here. No
    stored time enters the comparison of the two revisions; what is known of the noise does. An entry accepted from a
    dirty tree has no revision that holds what was accepted: use `stored_look`.

    `runs` has the processes of all stages up to `stage`. Before the last one only PASS, REGRESSED and IMPROVED are
    said, of what is clear; what is not named, and a promise in doubt, go on to the next.
    """
    now, last = STAGES[stage], stage == len(STAGES) - 1
    answers: dict[str, Verdict] = {}
    for key, found in _paired(opened, runs, now.processes).items():
        if isinstance(found, Verdict):
            if last:
                answers[key] = found
            continue
        item, promise = opened[key], found.promise
        status, text = _speed(found.slower, item.margin, now.alpha / item.selected, now.beta, found.against)
        doubt = promise.broken or _promise_failed(found.shown, promise, item.entry)
        if last or status is Status.REGRESSED or (status.green and not doubt):
            answers[key] = _settled(item, found, status, text)
    return answers


@dataclass(frozen=True, kw_only=True, slots=True)
class _Paired:
    """One workload's comparison of two revisions, before it is judged."""

    shown: Verdict
    slower: Estimate
    promise: _Promise
    spread: bool
    against: str
    runs: tuple[Measurement, ...]
    """Of both looks, those that have a ratio to the reference."""


def _paired(
    opened: Mapping[str, Open], runs: Mapping[str, Sequence[Measurement]], processes: int
) -> dict[str, Verdict | _Paired]:
    unusable, usable = _usable(opened, runs, processes, "accepted")
    answers: dict[str, Verdict | _Paired] = dict(unusable)
    every = {k: _values(run, "accepted") for k, run in usable.items()}
    noisy = suite_spread((every[k], opened[k].paired.process) for k in usable)
    prior = fit_prior([values] for values in every.values()) if noisy else None
    both = {k: (*opened[k].runs, *(m for m in run if m.log_ratios.get("reference"))) for k, run in usable.items()}
    held = _promises({k: opened[k] for k in usable}, both, _selected(opened))
    for key, run in usable.items():
        item = opened[key]
        values = every[key]
        process = item.paired.process
        spread = noisy or item.spread or spread_p(values, process) < SPREAD_P
        if not item.spread and not item.few and not item.twin:
            process = process.updated(*within([_values(item.runs, "reference")]))
        known = _known(process, values, spread=spread)
        if prior is not None:
            # The whole machine is noisier than the one that accepted: no workload is calm but by luck.
            known = max(known, noise_of([values], prior).process, key=lambda v: v.value)
        noise = replace(item.noise, process=known)
        # log_ratios["accepted"] is positive where the current side is faster.
        slower = _negated(estimate(paired_mean(values), noise))
        answers[key] = _Paired(
            shown=_shown(item, slower, held[key], look=2, processes=len(item.runs) + len(run)),
            slower=slower,
            promise=held[key],
            spread=spread,
            against=f"the accepted revision {short(item.entry.revision)}",
            runs=both[key],
        )
    return dict(sorted(answers.items()))


def _settled(item: Open, found: _Paired, status: Status, text: str) -> Verdict:
    """The verdict, given what `_speed` says."""
    spread = found.spread and status is Status.NOISY
    verdict = _decide_last(item, found.shown, status, text, found.promise, spread=spread)
    if verdict.status is Status.REGRESSED:
        return replace(verdict, moved="optimized")
    if item.few:
        return verdict
    if verdict.status.green:
        return _add_moved(verdict, *_ratio_moved(item, found.runs))
    if verdict.status is Status.BELOW_FLOOR and status.green and _held_when_accepted(found.promise, item.entry):
        # The function is the accepted one: what fell short is the reference's, the software's or the machine's doing.
        side, why = _ratio_moved(item, found.runs)
        if side == "device":
            text = f"{found.promise.measured} the reference, short of the promised {found.promise.promised}"
            verdict = _say(found.shown, Status.NOISY, text)
        return _add_moved(verdict, side, why)
    return verdict


def stored_look(
    opened: Mapping[str, Open],
    runs: Mapping[str, Sequence[Measurement]],
    *,
    reason: str,
    processes: int = STORED_PROCESSES,
) -> dict[str, Verdict]:
    """Stage 2 where the accepted revision cannot be loaded, for the `reason` that every message repeats.

    `runs` are all processes to compare with the baseline: new ones, or the first look's and further ones. The
    session's shift does not cancel, so that the margin is wider, up to STORED_MARGIN_MAX; the message tells it.
    """
    answers, usable = _usable(opened, runs, processes, "reference")
    noisy = suite_spread(
        (_values(run, "reference"), opened[k].noise.process) for k, run in usable.items() if not opened[k].few
    )
    held = _promises({k: opened[k] for k in usable}, usable, _selected(opened))
    why = f"compared with the stored baseline, for the accepted revision was not loaded: {_one_line(reason)}"
    for key, run in usable.items():
        item = opened[key]
        if item.few:
            item = replace(item, margin=OWN_SECONDS_MARGIN)
            slower, spread = _own_seconds(item, run), False
            against = "when accepted, by its own seconds"
        else:
            item = replace(item, margin=_stored_margin(item, len(run)))
            spread = spread_p(_values(run, "reference"), item.noise.process) < SPREAD_P
            slower = _against_baseline(replace(item, spread=spread), run)
            against = "when accepted, relative to the reference"
        shown = _shown(item, slower, held[key], look=2, processes=len(run))
        status, text = _speed(slower, item.margin, ALPHA / item.selected, BETA_SECOND, against)
        verdict = _decide_last(item, shown, status, text, held[key], spread=noisy or spread)
        if verdict.status is Status.PASS and item.margin > STORED_MARGIN_MAX and not item.few:
            text = f"without the accepted revision only a slowdown of {item.margin:.1%} would be seen"
            verdict = _say(shown, Status.NOISY, f"{text}; make that revision loadable, or accept more sessions")
        if verdict.status in (Status.REGRESSED, Status.IMPROVED):
            side, shifts = _moved(item, run, slower.value)
            if side != "optimized" and not item.few:
                text = f"its ratio to the reference is {_change(slower.value, 'lower', 'higher')} than when accepted"
                verdict = _say(shown, Status.NOISY, f"{text}, but not for the optimized side alone")
            verdict = _add_moved(verdict, side, shifts)
        elif (
            verdict.status is Status.PASS
            and not item.few
            and (state := _other_state(item, run, max(item.margin, MOVED_DEVICE)))
        ):
            verdict = _say(shown, Status.NOISY, state)
        answers[key] = replace(verdict, message=f"{verdict.message}; {why}")
    return dict(sorted(answers.items()))


def compare_look(
    runs: Mapping[str, Sequence[Measurement]],
    *,
    revision: str,
    selected: int | None = None,
    processes: int = SECOND_PROCESSES,
) -> dict[str, Verdict]:
    """Stage 2 by itself: the optimized side now against that of any `revision`; no baseline, no promise.

    `log_ratios["accepted"]` are against that revision. The workloads of this run supply the prior of their own noise.
    """
    family = len(runs) if selected is None else selected
    _check_selected(family, runs)
    found = {k: _unusable(k, tuple(r), processes, "accepted") for k, r in runs.items()}
    answers: dict[str, Verdict] = {k: v for k, v in found.items() if v}
    usable = {k: _values(runs[k], "accepted") for k in runs if k not in answers}
    prior = fit_prior([values] for values in usable.values())
    for key, values in usable.items():
        noise = noise_of([values], prior)
        slower = _negated(estimate(paired_mean(values), noise))
        size = _paired_margin(noise.process, len(values), ALPHA / family)
        low, high = slower.interval()
        shown = replace(
            _blank(key, len(values)),
            look=2,
            margin=size,
            slowdown=math.expm1(slower.value),
            low=math.expm1(low),
            high=math.expm1(high),
        )
        status, text = _speed(slower, size, ALPHA / family, BETA_SECOND, f"the revision {short(revision)}")
        if status is Status.PASS and size > MARGIN_MAX:
            status, text = Status.NOISY, f"{_too_noisy(size)}; compared with the revision {short(revision)}"
        moved = "optimized" if status in (Status.REGRESSED, Status.IMPROVED) else None
        answers[key] = _say(replace(shown, moved=moved), status, text)
    return dict(sorted(answers.items()))


def promises_look(
    runs: Mapping[str, Sequence[Measurement]],
    promises: Mapping[str, PromiseRecord],
    *,
    selected: int,
    prior: Noise | None = None,
    processes: int = 1,
) -> dict[str, Verdict]:
    """The promises by themselves, without a baseline and from one process on: a plain run, or before acceptance.

    PASS says here that the promises hold, and nothing about a regression. A promise within the noise is NOISY.
    """
    keys = sorted({*promises, *runs})
    _check_selected(selected, keys)
    answers: dict[str, Verdict] = {}
    usable: dict[str, tuple[Measurement, ...]] = {}
    for key in keys:
        run = tuple(runs.get(key, ()))
        found = _unusable(key, run, processes, "reference") or _counts(
            key, run, promises.get(key, PromiseRecord()), look=0
        )
        if found:
            answers[key] = found
        else:
            usable[key] = run
    prior = prior or fit_prior([_values(r, "reference")] for r in usable.values())
    speeds = {
        key: _speedup(run, noise_of([_values(run, "reference")], prior), promises.get(key, PromiseRecord()))
        for key, run in usable.items()
    }
    for key, promise in _judged(speeds, selected).items():
        shown = _with_speedup(_blank(key, len(usable[key])), promise)
        failed = _promise_failed(shown, promise, None)
        note = _uncounted(usable[key], promises.get(key, PromiseRecord()))
        answers[key] = failed or _say(shown, Status.PASS, f"{promise.measured} the reference{note}")
    return {key: answers[key] for key in keys}


# --- what a look decides -------------------------------------------------------------------------------------------


def _decide_first(item: Open, promise: _Promise) -> Verdict | Open:
    slower = None if item.few else _against_baseline(item, item.runs)
    shown = _shown(item, slower, promise, look=1, processes=len(item.runs))
    item = replace(item, slowdown=shown.slowdown, low=shown.low, high=shown.high)
    if promise.broken and not _held_when_accepted(promise, item.entry):
        return _broken(shown, promise, item.entry)
    if item.margin > MARGIN_MAX:
        return _say(shown, Status.NOISY, _too_noisy(item.margin))
    if slower is None:
        return replace(item, reason="its reference is sampled few times, so that the ratio cannot tell 1%")
    if item.spread:
        return replace(item, reason="the processes of this run spread far beyond the baseline's")
    if promise.broken:
        return replace(item, reason=f"the promised {promise.promised} is missed, which it was not when accepted")
    if not promise.holds:
        reason = f"the promised speedup of {promise.promised} is within the noise of {promise.measured}"
        return replace(item, reason=reason)
    against = "when accepted, relative to the reference"
    status, text = _speed(slower, item.margin, ALPHA / item.selected, BETA_FIRST, against)
    if status is Status.IMPROVED:
        return replace(item, reason="it seems faster than when accepted")
    if not status.green:
        return replace(item, reason=f"a slowdown of {item.margin:.1%} is not excluded")
    if moved := _other_state(item, item.runs, item.margin):
        return replace(item, reason=moved)
    text = f"{promise.measured} the reference, {item.entry.speedup():.4g}× when accepted; {text}"
    return _say(shown, status, text + _uncounted(item.runs, item.promises))


def _decide_last(item: Open, shown: Verdict, status: Status, text: str, promise: _Promise, *, spread: bool) -> Verdict:
    """The verdict where no further look will come, given what `_speed` says."""
    if promise.broken:
        return _broken(shown, promise, item.entry)
    if spread:
        text = "its processes spread far beyond the accepted noise (a neighbour or throttling)"
        return _say(shown, Status.NOISY, f"{text}; measure again on a quiet machine")
    if status is Status.REGRESSED:
        return _say(shown, status, text)
    failed = _promise_failed(shown, promise, item.entry)
    if failed:
        return failed
    if status.green:
        text = f"{promise.measured} the reference, {item.entry.speedup():.4g}× when accepted; {text}"
        text += _uncounted(item.runs, item.promises)
    return _say(shown, status, text)


def _speed(slower: Estimate, size: float, level: float, beta: float, against: str) -> tuple[Status, str]:
    """REGRESSED, IMPROVED, PASS or NOISY by the speed alone, and what is said of it."""
    change = math.expm1(slower.value)
    low, high = (100 * math.expm1(x) for x in slower.interval())
    figures = f"{change:.1%} slower" if change >= 0 else f"{-change:.1%} faster"
    bounds = (low, high) if change >= 0 else (-high, -low)
    text = f"the optimized side is {figures} than {against} "
    text += f"(95% interval {bounds[0]:.1f} to {bounds[1]:.1f}%, margin {size:.1%})"
    if slower.p_above(0) <= level and change >= size / 2:
        return Status.REGRESSED, text
    if slower.p_below(0) <= level and -change >= size:
        return Status.IMPROVED, f"{text}; run `perfsuite accept` to hold it there"
    if slower.upper(1 - beta) < math.log1p(size):
        return Status.PASS, f"a slowdown of {size:.1%} is excluded"
    return Status.NOISY, f"{text}: neither a slowdown of {size:.1%} nor its absence is shown; measure again"


def _paired_margin(process: Variance, processes: int, level: float) -> float:
    """The margin of so many processes with two revisions interleaved."""
    noise = Noise(process=process, session=Variance(value=0.0, dof=math.inf))
    return _resolvable(estimate(paired_mean([0.0] * processes), noise), level)


def _stored_margin(item: Open, processes: int) -> float:
    """The margin of so many processes against the stored baseline: the session's shift is in it."""
    noise = replace(item.noise, process=replace(item.noise.process, dof=item.noise.process.dof + processes - 1))
    accepted = baseline_mean(item.entry.process_means(), noise)
    error = estimate(accepted.minus(run_mean([0.0] * processes)), noise)
    return max(item.margin, _resolvable(error, ALPHA / item.selected))


def _resolvable(error: Estimate, level: float) -> float:
    """The slowdown shown with 95% power by an estimate with this error; at least MARGIN_MIN, in MARGIN_STEP."""
    needed = t_quantile(1 - level, error.dof) + t_quantile(POWER, error.dof)
    steps = math.ceil(math.expm1(needed * error.se) / MARGIN_STEP - 1e-9)
    return max(MARGIN_MIN, round(steps * MARGIN_STEP, 6))


def _too_noisy(size: float) -> str:
    return (
        f"too noisy to be gated: only a slowdown of {size:.1%} would be seen, {MARGIN_MAX:.0%} is the most allowed; "
        "mend its design (a longer workload, or the device clock in place of the wall clock) and accept it again"
    )


# --- estimates -----------------------------------------------------------------------------------------------------


def _accepted_noise(entry: Entry, prior: Noise) -> Noise:
    return prior if "reference" in entry.few else noise_of(entry.process_means(), prior)


def _has_twin(entry: Entry, twins: Noise | None) -> bool:
    return twins is not None and bool(entry.process_means("accepted"))


def _paired_noise(entry: Entry, prior: Noise, twins: Noise | None) -> Noise:
    if twins is not None and _has_twin(entry, twins):
        return noise_of(entry.process_means("accepted"), twins)
    return _accepted_noise(entry, prior)


def _open(
    entry: Entry,
    run: tuple[Measurement, ...],
    promise: PromiseRecord,
    prior: Noise,
    twins: Noise | None,
    selected: int,
) -> Open:
    noise = _accepted_noise(entry, prior)
    item = Open(
        id=entry.id,
        reason="",
        entry=entry,
        promises=promise,
        runs=run,
        noise=noise,
        paired=_paired_noise(entry, prior, twins),
        twin=_has_twin(entry, twins),
        selected=selected,
        margin=margin(entry, prior, selected=selected, twins=twins),
    )
    spread = not item.few and spread_p(_values(run, "reference"), noise.process) < SPREAD_P
    return replace(item, spread=spread)


def _run_noise(item: Open, values: Sequence[float]) -> Noise:
    """The accepted noise and this run's own; only this run's where it spreads far beyond the other."""
    noise = noise_of(item.entry.process_means(), item.noise) if item.few else item.noise
    return replace(noise, process=_known(noise.process, values, spread=item.spread))


def _known(accepted: Variance, values: Sequence[float], *, spread: bool) -> Variance:
    """What is known of the process variance after these; where they `spread` beyond the accepted one, they alone."""
    value, dof = within([values])
    if spread and dof > 0:
        return Variance(value=max(value, accepted.value), dof=dof)
    return accepted.updated(value, dof)


def _against_baseline(item: Open, run: Sequence[Measurement]) -> Estimate:
    """Log slowdown of the optimized side, relative to the reference, since it was accepted."""
    values = _values(run, "reference")
    noise = _run_noise(item, values)
    return estimate(baseline_mean(item.entry.process_means(), noise).minus(run_mean(values)), noise)


def _own_seconds(item: Open, run: Sequence[Measurement]) -> Estimate:
    """Log slowdown of the optimized side by its own seconds: what is left where the reference tells nothing."""
    accepted = [[math.log(p.seconds["optimized"]) for p in s.processes] for s in item.entry.sessions]
    now = [math.log(_seconds(m.sides["optimized"])) for m in run]
    own = Variance(value=PROCESS_SD**2, dof=PROCESS_DOF).updated(*within([*accepted, now]))
    noise = Noise(process=own, session=Variance(value=OWN_SECONDS_SD**2, dof=SESSION_DOF))
    return estimate(run_mean(now).minus(baseline_mean(accepted, noise)), noise)


def _promises(
    opened: Mapping[str, Open], runs: Mapping[str, tuple[Measurement, ...]], selected: int
) -> dict[str, _Promise]:
    speeds = {
        key: _speedup(runs[key], _run_noise(item, _values(runs[key], "reference")), item.promises)
        for key, item in opened.items()
    }
    return _judged(speeds, selected)


def _speedup(run: Sequence[Measurement], noise: Noise, promise: PromiseRecord) -> _Promise:
    # The promise is about every session, not this one: the session's shift stays an error.
    speed = estimate(run_mean(_values(run, "reference")), noise)
    few = any("reference" in m.few for m in run)
    bound = None if promise.speedup is None else math.log(promise.speedup)
    return _Promise(speedup=replace(speed, se=speed.se * FEW_FACTOR) if few else speed, bound=bound)


def _judged(speeds: Mapping[str, _Promise], selected: int) -> dict[str, _Promise]:
    bounds = {k: p.bound for k, p in speeds.items() if p.bound is not None}
    holds = holm({k: speeds[k].speedup.p_above(b) for k, b in bounds.items()}, ALPHA, selected)
    broken = holm({k: speeds[k].speedup.p_below(b) for k, b in bounds.items()}, ALPHA, selected)
    return {k: replace(p, holds=k not in bounds or k in holds, broken=k in broken) for k, p in speeds.items()}


def _values(run: Sequence[Measurement], other: str) -> list[float]:
    return [process_mean(m.log_ratios[other]) for m in run]


def _seconds(side: SideRecord) -> float:
    return median(side.blocks_s)


def _negated(error: Estimate) -> Estimate:
    return replace(error, value=-error.value)


# --- what cannot be judged, and the promises -----------------------------------------------------------------------


def _usable(
    opened: Mapping[str, Open], runs: Mapping[str, Sequence[Measurement]], processes: int, other: str
) -> tuple[dict[str, Verdict], dict[str, tuple[Measurement, ...]]]:
    answers: dict[str, Verdict] = {}
    usable: dict[str, tuple[Measurement, ...]] = {}
    for key, item in opened.items():
        run = tuple(runs.get(key, ()))
        found = (
            _unusable(key, run, processes, other)
            or _counts(key, (*item.runs, *run), item.promises, look=2)
            or _changed(item.entry, run)
        )
        if found:
            answers[key] = replace(found, look=2)
        else:
            usable[key] = run
    return answers, usable


def _unusable(key: str, run: tuple[Measurement, ...], processes: int, other: str) -> Verdict | None:
    """UNMEASURED where these measurements do not make up a whole one."""
    if not run:
        text = "nothing was measured; look for its error in this run's output"
    elif len(run) < processes:
        text = f"measured in {len(run)} of {processes} processes; look for the others' errors in this run's output"
    elif any(m.id != key for m in run):
        text = f"holds a measurement of {next(m.id for m in run if m.id != key)}"
    else:
        text = _disagreement(run) or _incomplete(run, other) or ""
    return _say(_blank(key, len(run)), Status.UNMEASURED, text) if text else None


def _disagreement(run: tuple[Measurement, ...]) -> str | None:
    for name in ("device", "clock", "direction", "dtype", "sizes"):
        values = [getattr(m, name) for m in run]
        if any(v != values[0] for v in values):
            return f"its processes disagree on {name}: {values[0]!r}, {next(v for v in values if v != values[0])!r}"
    return None


def _incomplete(run: tuple[Measurement, ...], other: str) -> str | None:
    sides = ("optimized", "reference") if other == "reference" else ("optimized",)
    for m in run:
        # In a second look the ratio to the reference may be missing, but what is there must be sound.
        for name in {other, *(["reference"] if m.log_ratios.get("reference") else [])}:
            ratios = m.log_ratios.get(name, ())
            if not ratios or not all(abs(r) <= RATIO_MAX for r in ratios):
                return f"a process gave no sound ratio to the {name} side"
        for side in sides:
            blocks = m.sides[side].blocks_s if side in m.sides else ()
            if not blocks or not all(math.isfinite(b) and b > 0 for b in blocks):
                return f"a process gave no time of the {side} side"
    return None


def _changed(entry: Entry, run: Sequence[Measurement]) -> Verdict | None:
    """A verdict where the workload is not the accepted one any more."""
    change = changes_since(entry, run[0])
    if change is None:
        return None
    status = Status.WRONG_MACHINE if change.startswith("device ") else Status.NO_BASELINE
    text = f"changed since it was accepted: {change}; run `perfsuite accept` for it"
    return _say(_blank(entry.id, len(run)), status, text)


def _counts(key: str, run: Sequence[Measurement], promise: PromiseRecord, *, look: int) -> Verdict | None:
    """BELOW_FLOOR where a process counted more than is promised, UNMEASURED where none counted."""
    shown = replace(_blank(key, len(run)), look=look)
    counted = {name: _counted(run, name) for name in COUNTS if getattr(promise, name) is not None}
    over = [
        f"{n} {max(c)} (promised {getattr(promise, n)})"
        for n, c in counted.items()
        if c and max(c) > getattr(promise, n)
    ]
    if over:
        text = f"the optimized side exceeds its promise: {', '.join(over)}; mend it, or change the promise"
        return _say(replace(shown, moved="optimized"), Status.BELOW_FLOOR, text)
    uncounted = [name for name, counts in counted.items() if not counts]
    if uncounted and not is_cpu(run[0].device):
        return _say(shown, Status.UNMEASURED, f"{', '.join(uncounted)} promised, but no process counted it")
    return None


def _counted(run: Sequence[Measurement], name: str) -> list[int]:
    counts = (getattr(m.sides["optimized"], name) for m in run if "optimized" in m.sides)
    return [c for c in counts if c is not None]


def _uncounted(run: Sequence[Measurement], promise: PromiseRecord) -> str:
    names = [n for n in COUNTS if getattr(promise, n) is not None and not _counted(run, n)]
    return f"; {', '.join(names)} promised, but not countable on a CPU" if names else ""


def _promise_failed(shown: Verdict, promise: _Promise, entry: Entry | None) -> Verdict | None:
    """The verdict where a promise does not hold and no further look will come."""
    if promise.broken:
        return _broken(shown, promise, entry)
    if promise.holds or promise.bound is None:
        return None
    if promise.speedup.value < promise.bound:
        return _broken(shown, promise, entry)
    text = f"{promise.measured} the reference does not show the promised {promise.promised}, nor that it is missed; "
    return _say(shown, Status.NOISY, f"{text}promise less, or mend the workload's noise")


def _held_when_accepted(promise: _Promise, entry: Entry) -> bool:
    return promise.bound is not None and math.log(entry.speedup()) >= promise.bound


def _broken(shown: Verdict, promise: _Promise, entry: Entry | None) -> Verdict:
    text = f"{promise.measured} the reference, below the promised {promise.promised}"
    text += f"; {entry.speedup():.4g}× when accepted" if entry else ""
    if not promise.broken:
        text += "; the promise is within the noise, but above the estimate"
    return _say(shown, Status.BELOW_FLOOR, text)


# --- which side moved ----------------------------------------------------------------------------------------------


def _moved(item: Open, run: Sequence[Measurement], slower: float) -> tuple[str | None, str]:
    """(what moved, why) by each side's own seconds and the anchor kernels', given the log slowdown of their ratio."""
    shift = {side: _shift(item, run, side) for side in ("optimized", "reference")}
    anchors = _anchor_shifts(item, run)
    optimized, reference = shift["optimized"], shift["reference"]
    together = optimized * reference > 0 and min(abs(optimized), abs(reference)) > max(MOVED_DEVICE, abs(slower))
    if together:
        with_it = not anchors or _moved_with(anchors, min(optimized, reference, key=abs))
        side = "device" if with_it else "software"
        word = "slower" if optimized > 0 else "faster"
        why = f"both sides' seconds are {word} ({_change(optimized)} and {_change(reference)})"
    else:
        side, other = ("reference", "optimized") if abs(reference) > abs(optimized) else ("optimized", "reference")
        why = f"by its own seconds the {side} is {_change(shift[side])}, the {other} {_change(shift[other])}"
        if _moved_with(anchors, shift[side]):
            side = "device"
    if side in _TOLD:
        why += f": {_TOLD[side]}"
    changes = ", ".join(f"{name} {_change(moved)}" for name, moved in anchors.items())
    return side, f"{why} (anchor kernels: {changes})" if changes else why


def _shift(item: Open, run: Sequence[Measurement], side: str) -> float:
    """The log change of a side's own seconds since it was accepted; 0 where they were not measured."""
    now = [math.log(_seconds(m.sides[side])) for m in run if side in m.sides and m.sides[side].blocks_s]
    return fmean(now) - math.log(item.entry.sides[side].seconds) if now else 0.0


def _other_state(item: Open, run: Sequence[Measurement], most: float) -> str:
    """Why the stored ratio says nothing here: the reference's own seconds moved by more than `most`; else empty.

    A clock, a neighbour or a host that slows the reference alone would hide a slowdown of the optimized side.
    """
    moved = _shift(item, run, "reference")
    if abs(moved) <= math.log1p(most):
        return ""
    return f"the reference is {_change(moved)} than when accepted, so that the ratio to it may hide a change"


_TOLD = {"device": "the device", "software": "not the device, but software that both use"}


def _moved_with(anchors: Mapping[str, float], shift: float) -> bool:
    """Whether an anchor kernel moved as a side did that moved by `shift`."""
    least = max(MOVED_DEVICE, MOVED_SHARE * abs(shift))
    return any(a * shift > 0 and abs(a) > least for a in anchors.values())


def _anchor_shifts(item: Open, run: Sequence[Measurement]) -> dict[str, float]:
    """The log change of each anchor kernel that says something of this workload; empty where none are known."""
    entry, limit = item.entry, item.entry.limit
    names = {"memory": [COPY], "compute": [MATMUL]}.get(limit.by if limit else "", [COPY, MATMUL])
    names += [LAUNCH] if entry.clock == "wall" else []
    accepted = entry.anchors()
    shifts = {}
    for name in names:
        now = [m.anchors[name] for m in run if name in m.anchors]
        if now and name in accepted:
            shifts[name] = math.log(median(now)) - math.log(accepted[name])
    return shifts


def _ratio_moved(item: Open, run: Sequence[Measurement]) -> tuple[str | None, str]:
    """Where the optimized side is as accepted but its ratio to the reference is not: what moved instead."""
    slower = _against_baseline(item, run)
    low, high = slower.interval(0.99)
    if low <= 0 <= high or abs(slower.value) < math.log1p(item.margin / 2):
        return None, ""
    side, why = _moved(item, run, slower.value)
    if side == "optimized":
        # Interleaved with the accepted revision it has not moved: what did is beneath both revisions.
        known = bool(_anchor_shifts(item, run))
        side = "software" if known else "device"
        why = f"both revisions moved alike: {_TOLD['software'] if known else 'the device or its software'}"
    return side, f"its ratio to the reference is {_change(slower.value, 'lower', 'higher')} than when accepted: {why}"


def _change(log: float, more: str = "slower", less: str = "faster") -> str:
    change = math.expm1(log)
    return f"{change:.1%} {more}" if change >= 0 else f"{-change:.1%} {less}"


# --- verdicts ------------------------------------------------------------------------------------------------------


def _blank(key: str, processes: int) -> Verdict:
    return Verdict(id=key, status=Status.UNMEASURED, message="", processes=processes)


def _shown(item: Open, slower: Estimate | None, promise: _Promise, *, look: int, processes: int) -> Verdict:
    shown = replace(
        _with_speedup(_blank(item.id, processes), promise),
        look=look,
        margin=item.margin,
        accepted_speedup=item.entry.speedup(),
    )
    if slower is None:
        return shown
    low, high = slower.interval()
    return replace(shown, slowdown=math.expm1(slower.value), low=math.expm1(low), high=math.expm1(high))


def _with_speedup(shown: Verdict, promise: _Promise) -> Verdict:
    low, high = promise.speedup.interval()
    return replace(
        shown, speedup=math.exp(promise.speedup.value), speedup_low=math.exp(low), speedup_high=math.exp(high)
    )


def _say(shown: Verdict, status: Status, text: str) -> Verdict:
    return replace(shown, status=status, message=_one_line(f"{status} {shown.id}: {text}"))


def _add_moved(verdict: Verdict, side: str | None, why: str) -> Verdict:
    return replace(verdict, moved=side, message=f"{verdict.message}; {why}" if why else verdict.message)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _selected(opened: Mapping[str, Open]) -> int:
    return max((o.selected for o in opened.values()), default=1)


def _check_selected(selected: int, keys: Collection[str]) -> None:
    if selected < len(keys):
        raise ValueError(f"selected={selected}, but {len(keys)} workloads are named: the family would be too small")
