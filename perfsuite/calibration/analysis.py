"""From a recording to figures: noise, error rates, coverage, what they say of the rule's constants. Pure, no torch.

Every rate has a 95% interval. A figure that is resampled says so by the number of processes it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from perfsuite import gate
from perfsuite import statistics as rule
from perfsuite.calibration.record import (
    ACCEPTED,
    OPTIMIZED,
    REFERENCE,
    KindRecord,
    Recording,
    Rounds,
    side_name,
)
from perfsuite.calibration.resample import Array, Pool, Simulation, pools, simulate
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Status

SUITES = 200
"""Resampled gates at each planted share: a rate of 1% over 5 copies of a kind is good to .6%."""
UNCHANGED = 2
"""Unchanged code gets so many times as many: alarms over a whole suite are rare."""
WORLDS = 20
"""Resampled recordings behind the part of an interval that comes from having recorded few processes."""
WORLD_SHARE = 0.03
"""Each of them is gated so much as the recording itself; unchanged code WORLD_UNCHANGED times that."""
WORLD_UNCHANGED = 5
FEW_PROCESSES = 5
"""Fewer recorded processes than the gate's own baseline has: the figures are shown, with a warning."""
STATED = 5
"""The threshold, in per cent, that is stated for the other tools beside the gate's own margin."""
LEVEL = 0.95
OUTLIER = 5.0
"""Normal noise has one quad in a million so far out; the standard deviations of a kind with many are mostly theirs."""
ALPHA_TOLD = 4.0
"""A rate of alarms whose interval ends within so many times ALPHA is called known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A share with its 95% interval; `of` says of how many, resampled or truly made."""

    value: float
    low: float
    high: float
    of: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A standard deviation with its 95% interval and degrees of freedom."""

    value: float
    low: float
    high: float
    dof: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """Standard deviations of a log-ratio, each level by itself; and of a process mean, which is the gate's unit."""

    quad: float
    block: float
    process: float
    session: float | None
    """None where one session was recorded."""
    outliers: float
    """Share of quads farther from their block's median than OUTLIER robust standard deviations."""
    unit: Spread
    bias: float
    """The mean over all processes; for two imports of one code it should be 0."""
    bias_se: float
    processes: int
    sessions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """What one rule said of one kind at one planted share."""

    rule: str
    planted: float
    measured: float
    """The planted slowdown: the median over all that was recorded."""
    flagged: Rate
    """REGRESSED, or the tool's own failure."""
    undecided: Rate | None = None
    """Red in another way: NOISY."""
    opened: float | None = None
    """Share that needed the second look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindResult:
    """All that is said of one kind."""

    kind: str
    clock: str
    seconds: float
    """A call of the optimized side."""
    processes: int
    to_reference: Components
    to_accepted: Components
    margin: float
    margin_most: float
    """Median and largest margin that the gate gave it over the resampled gates."""
    gate: tuple[Detection, ...]
    others: tuple[Detection, ...]
    coverage: Mapping[str, Rate]
    planted: Mapping[str, tuple[float, float]]
    """Side → the slowdown measured on the gate's clock, and its standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds: medians over the recorded processes."""

    process: float
    start: float
    sampling: Mapping[str, float]
    """Kind → seconds of all its sides."""
    first: float
    second: float
    """One process of the gate's first and second look through the kinds, by the sides that it would time."""
    gate: float
    """The whole gate where everything is decided by the first look."""
    stages: tuple[float, ...]
    """The whole gate where the second look goes on to each of its stages."""
    tools: Mapping[str, float]
    """Tool → one run through the kinds, without its process's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One constant of the rule beside what was measured."""

    name: str
    assumed: str
    measured: str
    reading: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """Everything that the table and the plot show."""

    device: str
    device_name: str
    processes: int
    sessions: int
    suite: int
    """Workloads in the resampled suite."""
    suites: int
    """Resampled suite runs on unchanged code."""
    kinds: tuple[KindResult, ...]
    alarms: Rate
    """Suite runs on unchanged code with at least one REGRESSED."""
    red: Rate
    """Suite runs on unchanged code with any red verdict."""
    constants: tuple[Constant, ...]
    times: Times
    warnings: tuple[str, ...]
    left_out: tuple[str, ...]


def analyse(
    recording: Recording,
    *,
    seed: int = 0,
    suites: int = SUITES,
    worlds: int = WORLDS,
    progress: Callable[[str], None] = lambda what: None,
) -> Analysis:
    """All figures of a recording; the same for the same `seed`. PerfsuiteError where too little was recorded."""
    recorded = pools(recording)
    if not recorded:
        raise PerfsuiteError(
            f"too little is recorded: {recording.processes} process(es), and a variance needs 2 of one session; "
            "measure more with --processes"
        )
    sides = [side_name(x) for x in recording.extras]
    rng = np.random.default_rng(seed)
    whole = simulate(recorded, sides, suites=suites, rng=rng, progress=progress)
    simulate(recorded, [OPTIMIZED], suites=suites * (UNCHANGED - 1), rng=rng, into=whole, progress=progress)
    copies: list[Simulation] = []
    each = max(1, round(suites * WORLD_SHARE))
    for number in range(worlds):
        progress(f"resampled recording {number + 1} of {worlds}")
        world = {k: p.again(rng) for k, p in recorded.items()}
        made = simulate(world, sides, suites=each, rng=rng, known=recorded)
        more = each * (WORLD_UNCHANGED - 1)
        copies.append(simulate(world, [OPTIMIZED], suites=more, rng=rng, known=recorded, into=made))
    kinds = tuple(_kind(k, p, recording, whole, copies) for k, p in recorded.items())
    unchanged = whole.suites[OPTIMIZED]
    size = len(recorded) * (whole.tallies[next(iter(recorded))][OPTIMIZED].runs // max(unchanged.runs, 1))
    worlds_of = [w.suites[OPTIMIZED] for w in copies]
    alarms = _pooled(unchanged.alarms, unchanged.runs, [_share(w.alarms, w.runs) for w in worlds_of])
    red = _pooled(unchanged.red, unchanged.runs, [_share(w.red, w.runs) for w in worlds_of])
    return Analysis(
        device=recording.machine.device,
        device_name=recording.machine.device_name,
        processes=recording.processes,
        sessions=len(recording.sessions),
        suite=size,
        suites=unchanged.runs,
        kinds=kinds,
        alarms=alarms,
        red=red,
        constants=tuple(_constants(kinds, alarms, whole, recorded)),
        times=_times(recording),
        warnings=tuple(_warnings(recording, recorded)),
        left_out=tuple(dict.fromkeys(line for s in recording.sessions for line in s.left_out)),
    )


# --- intervals -------------------------------------------------------------------------------------------------------


def clopper_pearson(count: float, of: float, level: float = LEVEL) -> tuple[float, float]:
    """Exact interval of a share; a count that is no whole number is taken as it is. (0, 1) of nothing."""
    if of <= 0:
        return 0.0, 1.0
    from scipy import special

    tail = (1 - level) / 2
    low = 0.0 if count <= 0 else float(special.betaincinv(count, of - count + 1, tail))
    high = 1.0 if count >= of else float(special.betaincinv(count + 1, of - count, 1 - tail))
    return low, high


def rate(count: float, of: int) -> Rate:
    """The share with Clopper and Pearson's interval."""
    low, high = clopper_pearson(count, of)
    return Rate(value=_share(count, of), low=low, high=high, of=of)


def _share(count: float, of: float) -> float:
    return count / of if of else 0.0


def _pooled(count: int, of: int, worlds: Sequence[float]) -> Rate:
    """The share; its interval is the wider of Clopper and Pearson's, and the range over resampled recordings."""
    found = rate(count, of)
    if not worlds:
        return found
    low, high = (float(q) for q in np.quantile(worlds, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return Rate(value=found.value, low=min(found.low, low), high=max(found.high, high), of=of)


def spread(sd: float, dof: float) -> Spread:
    """A standard deviation with the χ² interval of so many degrees of freedom."""
    from scipy import special

    tail = (1 - LEVEL) / 2
    low = sd * math.sqrt(dof / float(special.chdtri(dof, tail)))
    high = sd * math.sqrt(dof / float(special.chdtri(dof, 1 - tail)))
    return Spread(value=sd, low=low, high=high, dof=dof)


# --- noise -----------------------------------------------------------------------------------------------------------


def components(recording: Recording, kind: str, other: str, pool: Pool, side: str = OPTIMIZED) -> Components:
    """The nested components of variance of log(other / side), by the moments of the means of each level."""
    sessions = [
        np.array(
            [np.log(np.array(p.kinds[kind].quads_s[other]) / np.array(p.kinds[kind].quads_s[side])) for p in found]
        )
        for s in recording.sessions
        if len(found := [p for p in s.processes if kind in p.kinds]) > 1
    ]
    quads, blocks = sessions[0].shape[2], sessions[0].shape[1]
    quad = _mean_variance(sessions, axis=2)
    of_blocks = _mean_variance([s.mean(axis=2) for s in sessions], axis=1)
    block = of_blocks - quad / quads
    process_means = [[float(x) for x in s.mean(axis=(1, 2))] for s in sessions]
    of_processes, dof = rule.within(process_means)
    process = of_processes - of_blocks / blocks
    between, _ = rule.between(process_means, of_processes)
    # The unit, and what is left of it in the mean, as the gate takes them: of block medians.
    arrays = (pool.reference if other == REFERENCE else pool.accepted)[side]
    units = [[rule.process_mean(row.tolist()) for row in a] for a in arrays]
    unit, dof = rule.within(units)
    several = len(units) > 1
    count = sum(len(u) for u in units)
    means = [fmean(u) for u in units]
    # Two sessions may agree by luck: the error is at least what their processes leave.
    error = max(rule.variance(means) / len(means) if several else 0.0, unit / count)
    return Components(
        quad=math.sqrt(quad),
        block=math.sqrt(max(block, 0.0)),
        process=math.sqrt(max(process, 0.0)),
        session=math.sqrt(max(between, 0.0)) if several else None,
        outliers=_outliers(sessions),
        unit=spread(math.sqrt(unit), dof),
        bias=fmean(means),
        bias_se=math.sqrt(error),
        processes=count,
        sessions=len(units),
    )


def _outliers(sessions: Sequence[Array]) -> float:
    away = np.concatenate([np.abs(s - np.median(s, axis=2, keepdims=True)).ravel() for s in sessions])
    return float((away > OUTLIER * 1.4826 * np.median(away)).mean())


def _mean_variance(values: Sequence[Array], axis: int) -> float:
    """Variance along the axis, pooled over everything else; 0 where there is one value along it."""
    found = [v.var(axis=axis, ddof=1).ravel() for v in values if v.shape[axis] > 1]
    return float(np.concatenate(found).mean()) if found else 0.0


# --- one kind --------------------------------------------------------------------------------------------------------


def _kind(kind: str, pool: Pool, recording: Recording, whole: Simulation, worlds: Sequence[Simulation]) -> KindResult:
    records = [p.kinds[kind] for s in recording.sessions for p in s.processes if kind in p.kinds]
    tallies = whole.tallies[kind]
    margins = [m for t in tallies.values() for m in t.margins]
    margin = median(margins)
    gated = []
    planted: dict[str, tuple[float, float]] = {}
    for extra in recording.extras:
        side = side_name(extra)
        tally = tallies[side]
        planted[side] = planted_size(records, side)
        noisy = tally.red - tally.count(Status.REGRESSED)
        gated.append(
            Detection(
                rule="gate",
                planted=extra,
                measured=planted[side][0],
                flagged=_pooled(
                    tally.count(Status.REGRESSED),
                    tally.runs,
                    [_share(w.tallies[kind][side].count(Status.REGRESSED), w.tallies[kind][side].runs) for w in worlds],
                ),
                undecided=_pooled(
                    noisy,
                    tally.runs,
                    [
                        _share(t.red - t.count(Status.REGRESSED), t.runs)
                        for t in (w.tallies[kind][side] for w in worlds)
                    ],
                ),
                opened=_share(tally.opened, tally.runs),
            )
        )
    names = dict.fromkeys(name for t in tallies.values() for name in t.covered)
    coverage = {}
    for name in names:
        seen = [t.covered[name] for t in tallies.values() if name in t.covered]
        coverage[name] = rate(sum(s[0] for s in seen), sum(s[1] for s in seen))
    return KindResult(
        kind=kind,
        clock=records[0].clock,
        seconds=median(t for r in records for b in r.quads_s[OPTIMIZED] for t in b),
        processes=len(records),
        to_reference=components(recording, kind, REFERENCE, pool),
        to_accepted=components(recording, kind, ACCEPTED, pool),
        margin=margin,
        margin_most=max(margins),
        gate=tuple(gated),
        others=tuple(_others(kind, planted, recording, margin)),
        coverage=coverage,
        planted=planted,
    )


def planted_size(records: Sequence[KindRecord], side: str) -> tuple[float, float]:
    """The slowdown of the side against the accepted one: the median over every quad recorded, and its standard error.

    The error is that of a median over the processes' own medians, which spread by more than their quads tell.
    """
    logs = [np.log(np.array(r.quads_s[side]) / np.array(r.quads_s[ACCEPTED])) for r in records]
    own = np.array([np.median(x) for x in logs])
    spread = 1.4826 * float(np.median(np.abs(own - np.median(own))))
    return math.expm1(float(np.median(np.concatenate(logs)))), 1.2533 * spread / math.sqrt(len(own))


def thresholds(margin: float) -> tuple[int, int]:
    """Per cent at which the other tools are held: the margin, in pytest-benchmark's whole per cents, and STATED.

    A kind too noisy to be gated is held at the widest margin that the gate allows.
    """
    return math.ceil(min(margin, gate.MARGIN_MAX) * 100 - 1e-9), STATED


def _others(
    kind: str, planted: Mapping[str, tuple[float, float]], recording: Recording, margin: float
) -> Iterator[Detection]:
    tools = [("pytest-benchmark", "benchmark", f, p) for p in thresholds(margin) for f in ("median", "min")]
    tools += [("do_bench", "do_bench", "median", p) for p in dict.fromkeys(thresholds(margin))]
    for label, tool, field, percent in tools:
        for extra in recording.extras:
            found = compared(recording, kind, tool, field, percent, side_name(extra))
            if found is not None:
                yield Detection(
                    rule=f"{label} {field}:{percent}%",
                    planted=extra,
                    measured=planted[side_name(extra)][0],
                    flagged=found,
                )


def compared(recording: Recording, kind: str, tool: str, field: str, percent: int, side: str) -> Rate | None:
    """How often a new run of `side` fails against a stored run of the unchanged side of another process.

    The stored run is of another session where there are several. All such pairs are compared, by pytest-benchmark's
    own check; the interval counts half as many trials as processes, which bounds the variance of a mean over
    dependent pairs (Hoeffding 1963). None where the tool was not run.
    """
    stored = _runs(recording, kind, tool, OPTIMIZED)
    new = _runs(recording, kind, tool, side)
    if not stored or not new:
        return None
    from pytest_benchmark import utils

    parse: Any = utils.parse_compare_fail  # untyped
    check = parse(f"{field}:{percent}%")
    several = len({s for s, _, _ in stored}) > 1
    fails = pairs = 0
    for old_session, old_process, old in stored:
        for session, process, run in new:
            if session == old_session if several else (session, process) == (old_session, old_process):
                continue
            pairs += 1
            fails += check.fails({field: getattr(run, field)}, {field: getattr(old, field)}) is not None
    if not pairs:
        return None
    trials = max(min(len(stored), len(new)) // 2, 1)
    low, high = clopper_pearson(fails / pairs * trials, trials)
    return Rate(value=fails / pairs, low=low, high=high, of=pairs)


def _runs(recording: Recording, kind: str, tool: str, side: str) -> list[tuple[int, int, Rounds]]:
    return [
        (s, p, runs[side])
        for s, session in enumerate(recording.sessions)
        for p, process in enumerate(session.processes)
        if kind in process.kinds and side in (runs := getattr(process.kinds[kind], tool))
    ]


# --- constants -------------------------------------------------------------------------------------------------------


def _constants(
    kinds: Sequence[KindResult], alarms: Rate, whole: Simulation, recorded: Mapping[str, Pool]
) -> Iterator[Constant]:
    for name, which in (("PROCESS_SD", "to_reference"), ("PROCESS_SD, two imports", "to_accepted")):
        units = {k.kind: getattr(k, which).unit for k in kinds}
        dof = sum(u.dof for u in units.values())
        pooled = spread(math.sqrt(sum(u.value**2 * u.dof for u in units.values()) / dof), dof)
        yield Constant(
            name=name,
            assumed=_percent(rule.PROCESS_SD),
            measured=f"{_percent(pooled.value)} ({_percent(pooled.low)} to {_percent(pooled.high)}) over the kinds",
            reading=_reading(rule.PROCESS_SD, pooled.low, pooled.high),
        )
        if which == "to_reference":
            low, high = _prior_range(rule.PROCESS_SD, rule.PROCESS_DOF)
            outside = [k for k, u in units.items() if u.high < low or u.low > high]
            yield Constant(
                name="PROCESS_DOF",
                assumed=f"{rule.PROCESS_DOF:g}: kinds differ from {_percent(low)} to {_percent(high)}",
                measured=", ".join(f"{k} {_percent(u.value)}" for k, u in units.items()),
                reading="agrees" if not outside else f"outside of it: {', '.join(outside)}",
            )
    yield from _sessions(kinds)
    biases = {k.kind: k.to_accepted for k in kinds}
    # Each kind's mean is the bias and its own error; together a χ² where the bias is as assumed.
    strayed = sum(b.bias**2 / (b.bias_se**2 + rule.IMPORT_BIAS**2) for b in biases.values())
    agrees = _chi2_survival(strayed, len(biases)) > 1 - LEVEL
    told = min(b.bias_se for b in biases.values()) <= 2 * rule.IMPORT_BIAS
    yield Constant(
        name="IMPORT_BIAS",
        assumed=_percent(rule.IMPORT_BIAS),
        measured=", ".join(f"{k} {_percent(b.bias)} ± {_percent(b.bias_se)}" for k, b in biases.items()),
        reading=("agrees" if told else "agrees, but known less well than it") if agrees else "assumed too small here",
    )
    if alarms.low > gate.ALPHA:
        reading = "more than assumed"
    elif alarms.high <= ALPHA_TOLD * gate.ALPHA:
        reading = "agrees"
    else:
        reading = "not contradicted, but not known well: measure more --processes, or resample more --suites"
    yield Constant(
        name="ALPHA",
        assumed=f"{_percent(gate.ALPHA)} of suite runs",
        measured=f"{_percent(alarms.value)} ({_percent(alarms.low)} to {_percent(alarms.high)})",
        reading=reading,
    )
    yield Constant(
        name="MARGIN_MIN",
        assumed=_percent(gate.MARGIN_MIN),
        measured="; ".join(f"{k.kind}: margin {_percent(k.margin)}, {_caught(k)}" for k in kinds),
        reading=_margins(kinds),
    )
    passed = {k: 1 - _share(t[OPTIMIZED].opened, t[OPTIMIZED].runs) for k, t in whole.tallies.items()}
    share = fmean(passed.values())
    yield Constant(
        name="FIRST_PROCESSES",
        assumed=f"{gate.FIRST_PROCESSES}: pass most unchanged workloads",
        measured=", ".join(f"{k} {v:.0%}" for k, v in passed.items()),
        reading="agrees" if share >= 0.5 else "passes few: more processes, or a baseline of several sessions",
    )
    silent = {k: _share(t[OPTIMIZED].red, t[OPTIMIZED].runs) for k, t in whole.tallies.items()}
    weak = [k for k, v in silent.items() if v > 0.05]
    unchanged = [t[OPTIMIZED] for t in whole.tallies.values()]
    reached = [sum(t.stages[i] for t in unchanged) for i in range(len(gate.STAGES))]
    ended = [1 - _share(later, reached[0]) for later in reached[1:]]
    yield Constant(
        name="STAGES",
        assumed=f"{gate.STAGES[0].processes} processes decide most, {gate.STAGES[1].processes} nearly all that is left",
        measured=" and ".join(f"{share:.0%}" for share in ended) + " of unchanged workloads are decided by then"
        if reached[0]
        else "the first look left nothing open",
        reading="agrees" if ended[0] >= 0.5 or not reached[0] else "decide few: later stages are needed",
    )
    yield Constant(
        name="the last stage",
        assumed=f"{gate.STAGES[-1].processes} processes: decide what is left",
        measured="unchanged and red: " + ", ".join(f"{k} {_percent(v)}" for k, v in silent.items()),
        reading="agrees" if not weak else f"too few for {', '.join(weak)}, or the kind is too noisy here",
    )


def _sessions(kinds: Sequence[KindResult]) -> Iterator[Constant]:
    known = {k.kind: s for k in kinds if (s := k.to_reference.session) is not None}
    if not known:
        text = "not measured: one session was recorded; add one with --more"
        for name, value in (("SESSION_SD", _percent(rule.SESSION_SD)), ("SESSION_DOF", f"{rule.SESSION_DOF:g}")):
            yield Constant(name=name, assumed=value, measured=text, reading="assumed, also in the resampled gates")
        return
    dof = sum(k.to_reference.sessions - 1 for k in kinds if k.kind in known)
    pooled = spread(math.sqrt(fmean(s**2 for s in known.values())), dof)
    yield Constant(
        name="SESSION_SD",
        assumed=_percent(rule.SESSION_SD),
        measured=f"{_percent(pooled.value)} ({_percent(pooled.low)} to {_percent(pooled.high)}) over the kinds",
        reading=_reading(rule.SESSION_SD, pooled.low, pooled.high),
    )
    low, high = _prior_range(rule.SESSION_SD, rule.SESSION_DOF)
    yield Constant(
        name="SESSION_DOF",
        assumed=f"{rule.SESSION_DOF:g}: kinds differ from {_percent(low)} to {_percent(high)}",
        measured=", ".join(f"{k} {_percent(s)}" for k, s in known.items()),
        reading="agrees" if all(s <= high for s in known.values()) else "kinds differ by more",
    )


def _chi2_survival(value: float, dof: int) -> float:
    from scipy import special

    return float(special.chdtrc(dof, value))


def _prior_range(sd: float, dof: float) -> tuple[float, float]:
    """Where 95% of the true standard deviations lie, under a scaled inverse χ² prior."""
    from scipy import special

    low, high = (float(special.chdtri(dof, p)) for p in (0.025, 0.975))
    return sd * math.sqrt(dof / low), sd * math.sqrt(dof / high)


def _reading(assumed: float, low: float, high: float) -> str:
    if assumed < low:
        return "assumed too small here"
    return "agrees" if assumed <= high else "cautious: less was measured"


def _caught(kind: KindResult) -> str:
    found = [d for d in kind.gate if d.planted > 0 and d.flagged.value >= 0.95]
    return f"95% caught from {_percent(min(d.measured for d in found))}" if found else "none caught at 95%"


def _margins(kinds: Sequence[KindResult]) -> str:
    noisy = [k.kind for k in kinds if k.margin > gate.MARGIN_MAX]
    if noisy:
        return f"too noisy to be gated here: {', '.join(noisy)}"
    wide = [k.kind for k in kinds if k.margin > gate.MARGIN_MIN]
    return "agrees" if not wide else f"resolved only above it: {', '.join(wide)}"


def _percent(value: float) -> str:
    """A share in per cent, with as many digits as it has meaning."""
    size = abs(100 * value)
    return f"{100 * value:.{0 if size >= 99.95 else 1 if size >= 1 or size < 5e-4 else 2 if size >= 0.1 else 3}f}%"


percent = _percent


# --- seconds, warnings -----------------------------------------------------------------------------------------------


def _times(recording: Recording) -> Times:
    processes = [p for s in recording.sessions for p in s.processes]
    kinds = recording.kinds

    def middle(values: Sequence[float]) -> float:
        return median(values) if values else 0.0

    def of(kind: str, read: Callable[[KindRecord], float]) -> float:
        return middle([read(p.kinds[kind]) for p in processes if kind in p.kinds])

    def sides(names: Sequence[str]) -> float:
        return sum(of(k, lambda r: sum(r.side_s[n] for n in names)) for k in kinds)

    start = middle([p.start_s for p in processes])
    first = start + sides([REFERENCE, OPTIMIZED])
    second = start + sides([REFERENCE, ACCEPTED, OPTIMIZED])
    tools = {}
    for label, tool in (("pytest-benchmark", "benchmark"), ("do_bench", "do_bench")):
        runs = [
            [r.seconds for p in processes if k in p.kinds for r in getattr(p.kinds[k], tool).values()] for k in kinds
        ]
        if any(runs):
            tools[label] = sum(map(middle, runs))
    return Times(
        process=middle([p.seconds for p in processes]),
        start=start,
        sampling={k: of(k, lambda r: r.seconds) for k in kinds},
        first=first,
        second=second,
        gate=gate.FIRST_PROCESSES * first,
        stages=tuple(gate.FIRST_PROCESSES * first + stage.processes * second for stage in gate.STAGES),
        tools=tools,
    )


def _warnings(recording: Recording, recorded: Mapping[str, Pool]) -> Iterator[str]:
    for kind, pool in recorded.items():
        if sum(pool.sizes) < FEW_PROCESSES:
            yield f"{kind}: only {sum(pool.sizes)} processes are recorded; its rates are little more than a sketch"
    for kind in recording.kinds:
        if kind not in recorded:
            yield f"{kind}: recorded in one process of a session only, which tells nothing of its noise"
    if (recording.blocks, recording.quads) != _gate_design():
        blocks, quads = _gate_design()
        yield (
            f"{recording.blocks} blocks of {recording.quads} quads a process were recorded; "
            f"the gate measures {blocks} of {quads}"
        )
    if recording.machine.device.startswith("cpu"):
        yield "a CPU: calls run on one thread, both clocks are the host's, and a shared machine disturbs them"
    stacks = {tuple(getattr(s, n) for n in ("driver", "cuda", "torch", "triton")) for s in recording.sessions}
    if len(stacks) > 1:
        yield "the sessions ran on different software"


def _gate_design() -> tuple[int, int]:
    """BLOCKS and QUADS of `perfsuite.sampling`, which imports torch."""
    return 8, 7


def document(analysis: Analysis) -> dict[str, Any]:
    """The figures as JSON."""
    from perfsuite.records import to_json

    found = to_json(analysis)
    assert isinstance(found, dict)
    return found
