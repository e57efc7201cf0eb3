"""Compute the figures of a recording: noise, error rates, coverage, and the rule's constants. Imports no torch.

Every rate has a 95% interval. The figures of the gate are resampled; the others are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from perfsuite import estimates, planning, stages
from perfsuite import statistics as rule
from perfsuite.blocks import process_mean
from perfsuite.calibration.record import BLOCKS, ROUNDS, KindRecord, Recording, ToolRun, side_name
from perfsuite.calibration.resample import COPIES, Array, Pool, Simulation, Tally, pools, simulate
from perfsuite.errors import PerfsuiteError
from perfsuite.modes import accept
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Status

SUITES = 200
"""Simulated suites at each planted slowdown: a rate of 1% over 5 copies of a kind is then known to within 0.6%."""
UNCHANGED = 2
"""Factor on the number of suites for unchanged code, because false alarms of a whole suite are rare."""
WORLDS, WORLD_SHARE, WORLD_UNCHANGED = 20, 0.03, 5
"""Maximum number of resampled recordings, the share of the suites that each simulates, and the factor on that for
unchanged code. The range of their rates shows the error that comes from recording few processes."""
STATED = 5
"""Second threshold of the other tools in per cent; the first is the gate's own margin."""
LEVEL = 0.95
OUTLIER = 5.0
"""Robust standard deviations beyond which an ABBA round is an outlier: one round in a million if noise is normal."""
TARGETS: Mapping[str, float] = {"device": 0.01, "wall": 0.02}
"""Slowdown that the gate should find on each clock in 95% of the workloads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A share with its 95% interval; `of` is the number of trials, resampled or measured."""

    value: float
    low: float
    high: float
    of: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """A standard deviation with its 95% interval and degrees of freedom."""

    value: float
    low: float
    high: float
    dof: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """Standard deviations of a log-ratio, by level of the design, and of a process mean, which is the gate's unit."""

    abba: float
    """Standard deviation between the ABBA rounds of a block."""
    block: float
    process: float
    session: float | None
    """Standard deviation between sessions; None if only one was recorded."""
    outliers: float
    """Share of ABBA rounds farther from their block's median than OUTLIER robust standard deviations."""
    unit: Deviation
    bias: float
    """Mean over sessions of their process means; for two imports of one code it should be 0."""
    bias_se: float
    processes: int
    sessions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gated:
    """The gate's verdicts on one kind at one planted slowdown."""

    planted: float
    measured: float
    """Median of the planted slowdown over all recorded ABBA rounds. `error` is its standard error."""
    error: float
    regressed: Rate
    passed: Rate
    """PASS or IMPROVED."""
    noisy: Rate
    processes: float
    """Mean processes a workload."""
    seconds: float
    """Mean seconds a workload: timing both sides, without start, proof and warm-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Rate at which another tool fails one kind at one planted slowdown."""

    rule: str
    planted: float
    flagged: Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class KindResult:
    """All figures of one kind."""

    kind: str
    clock: str
    seconds: float
    """Seconds of a call of the optimized side."""
    processes: int
    to_reference: Components
    to_accepted: Components
    margin: float
    """Median margin over the simulated suites."""
    gate: tuple[Gated, ...]
    others: tuple[Compared, ...]
    coverage: Rate
    """Rate at which the 95% interval of the slowdown contains the true slowdown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A required error rate of the whole suite, and the rate that was found."""

    what: str
    wanted: float
    found: Rate
    at_most: bool = False
    """`wanted` is an upper bound, not a lower one."""

    @property
    def met(self) -> bool:
        return self.found.value <= self.wanted if self.at_most else self.found.value >= self.wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds: medians over the recorded processes."""

    process: float
    start: float
    sampling: Mapping[str, float]
    """Kind → seconds of all its sides."""
    gate: Mapping[float, tuple[float, float]]
    """Planted slowdown → mean (rounds, seconds) of the whole simulated suite; seconds of starts and timing."""
    tools: Mapping[str, float]
    """Tool → seconds of one run through the kinds, without the start of its process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One constant of the rule: its assumed value and what was measured."""

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
    """Workloads in the simulated suite."""
    suites: int
    """Simulated runs of unchanged suites."""
    kinds: tuple[KindResult, ...]
    targets: tuple[Target, ...]
    red: Rate
    """Share of unchanged suites with any red verdict."""
    improved: Rate
    """Share of unchanged suites with an IMPROVED verdict."""
    constants: tuple[Constant, ...]
    times: Times
    warnings: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Simulations:
    """The gate simulated from the recording, and from each resampled recording."""

    whole: Simulation
    worlds: Sequence[Simulation]

    def rate(self, read: Callable[[Simulation], tuple[int, int]]) -> Rate:
        """Return the share that `read` counts as (hits, trials).

        Its interval covers both Clopper and Pearson's and the central 95% of the resampled recordings. The first shows
        how few suites were simulated, the second how few processes were recorded.
        """
        found = rate(*read(self.whole))
        shares = [hits / of for hits, of in map(read, self.worlds) if of]
        if not shares:
            return found
        low, high = (float(q) for q in np.quantile(shares, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
        return Rate(value=found.value, low=min(found.low, low), high=max(found.high, high), of=found.of)

    def share(self, kinds: Sequence[str], side: str, *statuses: Status) -> Rate:
        """Return the share of the workloads of these kinds that get one of these verdicts."""

        def read(s: Simulation) -> tuple[int, int]:
            tallies = [s.tallies[k][side] for k in kinds]
            return sum(t.statuses[status] for t in tallies for status in statuses), sum(t.runs for t in tallies)

        return self.rate(read)

    def covered(self, kinds: Sequence[str]) -> Rate:
        """Return the share of the 95% intervals of the slowdown that contain the truth, over all planted slowdowns."""

        def read(s: Simulation) -> tuple[int, int]:
            tallies = [t for k in kinds for t in s.tallies[k].values()]
            return sum(t.covered for t in tallies), sum(t.runs for t in tallies)

        return self.rate(read)


def analyse(
    recording: Recording,
    *,
    seed: int = 0,
    suites: int = SUITES,
    progress: Callable[[str], None] = lambda what: None,
) -> Analysis:
    """Return all figures of a recording; the same `seed` gives the same figures. Raises PerfsuiteError if too little
    was recorded."""
    recorded = pools(recording)
    if not recorded:
        raise PerfsuiteError(
            f"too little is recorded: {recording.processes} process(es), and a variance needs 2 of one session; "
            "measure more with --processes"
        )
    sides = [side_name(x) for x in recording.extras]
    rng = np.random.default_rng(seed)
    whole = simulate(recorded, {**dict.fromkeys(sides, suites), OPTIMIZED: UNCHANGED * suites}, rng, progress=progress)
    copies: list[Simulation] = []
    each = max(1, round(suites * WORLD_SHARE))
    worlds = max(1, min(WORLDS, suites // 10))
    for number in range(worlds):
        progress(f"resampled recording {number + 1} of {worlds}")
        world = {k: p.again(rng) for k, p in recorded.items()}
        copies.append(simulate(world, {**dict.fromkeys(sides, each), OPTIMIZED: WORLD_UNCHANGED * each}, rng))
    simulated = Simulations(whole, copies)
    kinds = tuple(_kind(k, p, recording, simulated) for k, p in recorded.items())
    return Analysis(
        device=recording.machine.device,
        device_name=recording.machine.device_name,
        processes=recording.processes,
        sessions=len(recording.sessions),
        suite=len(recorded) * COPIES,
        suites=whole.suites[OPTIMIZED].runs,
        kinds=kinds,
        targets=tuple(_targets(kinds, recording, simulated)),
        red=simulated.rate(lambda s: (s.suites[OPTIMIZED].red, s.suites[OPTIMIZED].runs)),
        improved=simulated.rate(lambda s: (s.suites[OPTIMIZED].improved, s.suites[OPTIMIZED].runs)),
        constants=tuple(_constants(kinds, whole)),
        times=_times(recording, whole, recorded),
        warnings=tuple(_warnings(recording, recorded, whole)),
        left_out=tuple(dict.fromkeys(line for s in recording.sessions for line in s.left_out)),
    )


def _targets(kinds: Sequence[KindResult], recording: Recording, simulated: Simulations) -> Iterator[Target]:
    yield Target(
        what="unchanged suites with a false alarm",
        wanted=estimates.ALPHA,
        found=simulated.rate(lambda s: (s.suites[OPTIMIZED].alarms, s.suites[OPTIMIZED].runs)),
        at_most=True,
    )
    for clock, extra in TARGETS.items():
        names = [k.kind for k in kinds if k.clock == clock]
        if names and extra in recording.extras:
            yield Target(
                what=f"workloads {extra:.0%} slower found on the {clock} clock",
                wanted=estimates.POWER,
                found=simulated.share(names, side_name(extra), Status.REGRESSED),
            )
    yield Target(
        what="95% intervals of the slowdown that hold the truth",
        wanted=LEVEL,
        found=simulated.covered([k.kind for k in kinds]),
    )


# --- intervals -------------------------------------------------------------------------------------------------------


def clopper_pearson(count: float, of: float, level: float = LEVEL) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of a share; (0, 1) without trials. The count may be fractional."""
    if of <= 0:
        return 0.0, 1.0
    from scipy import special

    tail = (1 - level) / 2
    low = 0.0 if count <= 0 else float(special.betaincinv(count, of - count + 1, tail))
    high = 1.0 if count >= of else float(special.betaincinv(count + 1, of - count, 1 - tail))
    return low, high


def rate(count: float, of: int) -> Rate:
    """Return the share with Clopper and Pearson's interval."""
    low, high = clopper_pearson(count, of)
    return Rate(value=_share(count, of), low=low, high=high, of=of)


def _share(count: float, of: float) -> float:
    return count / of if of else 0.0


def deviation(sd: float, dof: float) -> Deviation:
    """Return a standard deviation with the χ² interval of `dof` degrees of freedom."""
    from scipy import special

    tail = (1 - LEVEL) / 2
    low = sd * math.sqrt(dof / float(special.chdtri(dof, tail)))
    high = sd * math.sqrt(dof / float(special.chdtri(dof, 1 - tail)))
    return Deviation(value=sd, low=low, high=high, dof=dof)


# --- noise -----------------------------------------------------------------------------------------------------------


def components(recording: Recording, kind: str, other: str, side: str = OPTIMIZED) -> Components:
    """Return the nested components of variance of log(other / side), by the moments of the means of each level."""
    sessions = [
        np.array(
            [np.log(np.array(p.kinds[kind].rounds_s[other]) / np.array(p.kinds[kind].rounds_s[side])) for p in found]
        )
        for s in recording.sessions
        if len(found := [p for p in s.processes if kind in p.kinds]) > 1
    ]
    rounds, blocks = sessions[0].shape[2], sessions[0].shape[1]
    of_rounds = _mean_variance(sessions, axis=2)
    of_blocks = _mean_variance([s.mean(axis=2) for s in sessions], axis=1)
    block = of_blocks - of_rounds / rounds
    process_means = [[float(x) for x in s.mean(axis=(1, 2))] for s in sessions]
    of_processes, dof = rule.within(process_means)
    process = of_processes - of_blocks / blocks
    between, _ = rule.between(process_means, of_processes)
    # The process means and their bias, computed from block medians as the gate does.
    clock = next(p.kinds[kind].clock for s in recording.sessions for p in s.processes if kind in p.kinds)
    units = [[process_mean(blocks, clock) for blocks in np.median(s, axis=2).tolist()] for s in sessions]
    unit, dof = rule.within(units)
    several = len(units) > 1
    count = sum(len(u) for u in units)
    means = [fmean(u) for u in units]
    # Two sessions may agree by chance, so the error is at least that of the mean over all processes.
    error = max(rule.variance(means) / len(means) if several else 0.0, unit / count)
    return Components(
        abba=math.sqrt(of_rounds),
        block=math.sqrt(max(block, 0.0)),
        process=math.sqrt(max(process, 0.0)),
        session=math.sqrt(max(between, 0.0)) if several else None,
        outliers=_outliers(sessions),
        unit=deviation(math.sqrt(unit), dof),
        bias=fmean(means),
        bias_se=math.sqrt(error),
        processes=count,
        sessions=len(units),
    )


def _outliers(sessions: Sequence[Array]) -> float:
    away = np.concatenate([np.abs(s - np.median(s, axis=2, keepdims=True)).ravel() for s in sessions])
    return float((away > OUTLIER * 1.4826 * np.median(away)).mean())


def _mean_variance(values: Sequence[Array], axis: int) -> float:
    """Return the variance along the axis, pooled over all other axes; 0 if the axis has one value."""
    found = [v.var(axis=axis, ddof=1).ravel() for v in values if v.shape[axis] > 1]
    return float(np.concatenate(found).mean()) if found else 0.0


# --- one kind --------------------------------------------------------------------------------------------------------


def _kind(kind: str, pool: Pool, recording: Recording, simulated: Simulations) -> KindResult:
    records = [p.kinds[kind] for s in recording.sessions for p in s.processes if kind in p.kinds]
    tallies = simulated.whole.tallies[kind]
    margin = median(m for t in tallies.values() for m in t.margins)
    return KindResult(
        kind=kind,
        clock=records[0].clock,
        seconds=median(t for r in records for b in r.rounds_s[OPTIMIZED] for t in b),
        processes=len(records),
        to_reference=components(recording, kind, REFERENCE),
        to_accepted=components(recording, kind, ACCEPTED),
        margin=margin,
        gate=tuple(_gated(kind, extra, pool, records, simulated) for extra in recording.extras),
        others=tuple(_others(kind, recording, margin)),
        coverage=simulated.covered([kind]),
    )


def _gated(kind: str, extra: float, pool: Pool, records: Sequence[KindRecord], simulated: Simulations) -> Gated:
    side = side_name(extra)
    measured, error = planted_size(records, side)
    tally = simulated.whole.tallies[kind][side]
    return Gated(
        planted=extra,
        measured=measured,
        error=error,
        regressed=simulated.share([kind], side, Status.REGRESSED),
        passed=simulated.share([kind], side, Status.PASS, Status.IMPROVED),
        noisy=simulated.share([kind], side, Status.NOISY),
        processes=_share(tally.processes, tally.runs),
        seconds=_share(tally.blocks, tally.runs) * pool.block_s,
    )


def planted_size(records: Sequence[KindRecord], side: str) -> tuple[float, float]:
    """Return the side's median slowdown relative to the accepted side, over all recorded ABBA rounds, and its standard
    error.

    The standard error is that of the process medians: they vary by more than the rounds within a process suggest.
    """
    logs = [np.log(np.array(r.rounds_s[side]) / np.array(r.rounds_s[ACCEPTED])) for r in records]
    own = np.array([np.median(x) for x in logs])
    sd = 1.4826 * float(np.median(np.abs(own - np.median(own))))
    return math.expm1(float(np.median(np.concatenate(logs)))), 1.2533 * sd / math.sqrt(len(own))


def thresholds(margin: float) -> tuple[int, int]:
    """Return the thresholds of the other tools in per cent: the margin, rounded up because pytest-benchmark accepts
    only whole per cents, and STATED."""
    return math.ceil(margin * 100 - 1e-9), STATED


def _others(kind: str, recording: Recording, margin: float) -> Iterator[Compared]:
    at = dict.fromkeys(thresholds(margin))
    tools = [("pytest-benchmark", "benchmark", f, p) for p in at for f in ("median", "min")]
    tools += [("do_bench", "do_bench", "median", p) for p in at]
    for label, tool, field, percents in tools:
        for extra in recording.extras:
            found = compared(recording, kind, tool, field, percents, side_name(extra))
            if found is not None:
                yield Compared(rule=f"{label} {field}:{percents}%", planted=extra, flagged=found)


def compared(recording: Recording, kind: str, tool: str, field: str, percents: int, side: str) -> Rate | None:
    """Return the rate at which a new run of `side` fails against a stored run of the unchanged side of another process.

    If several sessions were recorded, the stored run is from another session. pytest-benchmark's own check compares all
    such pairs. The interval is that of half the number of processes as trials, which bounds the variance of a mean over
    dependent pairs (Hoeffding 1963). None if the tool was not run.
    """
    stored = _runs(recording, kind, tool, OPTIMIZED)
    new = _runs(recording, kind, tool, side)
    if not stored or not new:
        return None
    from pytest_benchmark import utils

    parse: Any = utils.parse_compare_fail  # untyped
    check = parse(f"{field}:{percents}%")
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


def _runs(recording: Recording, kind: str, tool: str, side: str) -> list[tuple[int, int, ToolRun]]:
    return [
        (s, p, runs[side])
        for s, session in enumerate(recording.sessions)
        for p, process in enumerate(session.processes)
        if kind in process.kinds and side in (runs := getattr(process.kinds[kind], tool))
    ]


# --- constants -------------------------------------------------------------------------------------------------------


def _constants(kinds: Sequence[KindResult], whole: Simulation) -> Iterator[Constant]:
    for name, which in (("PROCESS_SD", "to_accepted"), ("PROCESS_SD, to the reference", "to_reference")):
        units = {k.kind: getattr(k, which).unit for k in kinds}
        dof = sum(u.dof for u in units.values())
        pooled = deviation(math.sqrt(sum(u.value**2 * u.dof for u in units.values()) / dof), dof)
        yield Constant(
            name=name,
            assumed=percent(rule.PROCESS_SD),
            measured=_interval(pooled),
            reading=_reading(rule.PROCESS_SD, pooled),
        )
        if which == "to_accepted":
            low, high = _prior_range(rule.PROCESS_SD, rule.PROCESS_DOF)
            outside = [k for k, u in units.items() if u.high < low or u.low > high]
            yield Constant(
                name="PROCESS_DOF",
                assumed=f"{rule.PROCESS_DOF:g}: kinds differ from {percent(low)} to {percent(high)}",
                measured=", ".join(f"{k} {percent(u.value)}" for k, u in units.items()),
                reading=f"outside of it: {', '.join(outside)}" if outside else "agrees",
            )
    yield from _sessions(kinds)
    yield _import_bias({k.kind: k.to_accepted for k in kinds})
    wide = [k.kind for k in kinds if k.margin > estimates.MARGIN_MIN[k.clock]]
    yield Constant(
        name="MARGIN_MIN",
        assumed=", ".join(f"{percent(least)} on the {clock} clock" for clock, least in estimates.MARGIN_MIN.items()),
        measured="; ".join(f"{k.kind}: margin {percent(k.margin)}, {_found(k)}" for k in kinds),
        reading=f"resolved only above it: {', '.join(wide)}" if wide else "agrees",
    )
    unchanged = {k: t[OPTIMIZED] for k, t in whole.tallies.items()}
    yield _of_unchanged(
        unchanged,
        "TARGET_SHARE",
        f"{planning.TARGET_SHARE:g} of the margin: one process decides nearly always",
        lambda t: _share(t.first, t.unsampled),
        least=0.5,
    )
    yield _of_unchanged(
        unchanged,
        "LOOKS",
        f"{stages.LOOKS[-1]} processes decide what is left",
        lambda t: 1 - _share(t.statuses[Status.NOISY], t.runs),
        least=0.95,
    )


def _of_unchanged(
    tallies: Mapping[str, Tally], name: str, assumed: str, read: Callable[[Tally], float], *, least: float
) -> Constant:
    """Return a constant that affects how many unchanged workloads are decided, with the decided share of each kind."""
    shares = {k: read(t) for k, t in tallies.items()}
    weak = [k for k, share in shares.items() if share < least]
    return Constant(
        name=name,
        assumed=assumed,
        measured="unchanged and decided: " + ", ".join(f"{k} {percent(s)}" for k, s in shares.items()),
        reading=f"less than {least:.0%}: {', '.join(weak)}" if weak else "agrees",
    )


def _import_bias(biases: Mapping[str, Components]) -> Constant:
    # Each kind's mean is its bias plus its own error. The sum follows a χ² distribution if the bias is as assumed.
    total = sum(b.bias**2 / (b.bias_se**2 + rule.IMPORT_BIAS**2) for b in biases.values())
    agrees = _chi2_survival(total, len(biases)) > 1 - LEVEL
    known = min(b.bias_se for b in biases.values()) <= 2 * rule.IMPORT_BIAS
    return Constant(
        name="IMPORT_BIAS",
        assumed=percent(rule.IMPORT_BIAS),
        measured=", ".join(f"{k} {percent(b.bias)} ± {percent(b.bias_se)}" for k, b in biases.items()),
        reading=("agrees" if known else "agrees, but measured less precisely") if agrees else "assumed too small here",
    )


def _sessions(kinds: Sequence[KindResult]) -> Iterator[Constant]:
    known = {k.kind: s for k in kinds if (s := k.to_reference.session) is not None}
    if not known:
        text = "not measured: one session was recorded; add one with --more"
        for name, value in (("SESSION_SD", percent(rule.SESSION_SD)), ("SESSION_DOF", f"{rule.SESSION_DOF:g}")):
            yield Constant(name=name, assumed=value, measured=text, reading="not known")
        return
    dof = sum(k.to_reference.sessions - 1 for k in kinds if k.kind in known)
    pooled = deviation(math.sqrt(fmean(s**2 for s in known.values())), dof)
    yield Constant(
        name="SESSION_SD",
        assumed=percent(rule.SESSION_SD),
        measured=_interval(pooled),
        reading=_reading(rule.SESSION_SD, pooled),
    )
    low, high = _prior_range(rule.SESSION_SD, rule.SESSION_DOF)
    yield Constant(
        name="SESSION_DOF",
        assumed=f"{rule.SESSION_DOF:g}: kinds differ from {percent(low)} to {percent(high)}",
        measured=", ".join(f"{k} {percent(s)}" for k, s in known.items()),
        reading="agrees" if all(s <= high for s in known.values()) else "kinds differ by more",
    )


def _chi2_survival(value: float, dof: int) -> float:
    from scipy import special

    return float(special.chdtrc(dof, value))


def _prior_range(sd: float, dof: float) -> tuple[float, float]:
    """Return the range of 95% of the true standard deviations, under a scaled inverse χ² prior."""
    from scipy import special

    low, high = (float(special.chdtri(dof, p)) for p in (0.025, 0.975))
    return sd * math.sqrt(dof / low), sd * math.sqrt(dof / high)


def _interval(found: Deviation) -> str:
    return f"{percent(found.value)} ({percent(found.low)} to {percent(found.high)}) over the kinds"


def _reading(assumed: float, found: Deviation) -> str:
    if assumed < found.low:
        return "assumed too small here"
    return "agrees" if assumed <= found.high else "cautious: less was measured"


def _found(kind: KindResult) -> str:
    found = [g for g in kind.gate if g.planted > 0 and g.regressed.value >= estimates.POWER]
    share = f"{estimates.POWER:.0%}"
    return f"{share} found from {percent(min(g.measured for g in found))}" if found else f"none found at {share}"


def percent(value: float) -> str:
    """Return a share in per cent, with more decimals the smaller it is."""
    size = abs(100 * value)
    return f"{100 * value:.{0 if size >= 99.95 else 1 if size >= 1 or size < 5e-4 else 2 if size >= 0.1 else 3}f}%"


# --- seconds, warnings -----------------------------------------------------------------------------------------------


def _times(recording: Recording, whole: Simulation, recorded: Mapping[str, Pool]) -> Times:
    processes = [p for s in recording.sessions for p in s.processes]
    kinds = recording.kinds

    def middle(values: Sequence[float]) -> float:
        return median(values) if values else 0.0

    start = middle([p.start_s for p in processes])
    tools = {}
    for label, tool in (("pytest-benchmark", "benchmark"), ("do_bench", "do_bench")):
        runs = [
            [r.seconds for p in processes if k in p.kinds for r in getattr(p.kinds[k], tool).values()] for k in kinds
        ]
        if any(runs):
            tools[label] = sum(map(middle, runs))
    gated = {}
    for extra in recording.extras:
        suite = whole.suites[side_name(extra)]
        timing = sum(whole.tallies[k][side_name(extra)].blocks * p.block_s for k, p in recorded.items())
        gated[extra] = (suite.rounds / suite.runs, (suite.rounds * start + timing) / suite.runs)
    return Times(
        process=middle([p.seconds for p in processes]),
        start=start,
        sampling={k: middle([p.kinds[k].seconds for p in processes if k in p.kinds]) for k in kinds},
        gate=gated,
        tools=tools,
    )


def _warnings(recording: Recording, recorded: Mapping[str, Pool], whole: Simulation) -> Iterator[str]:
    for kind, pool in recorded.items():
        if sum(pool.sizes) < accept.PROCESSES:
            yield f"{kind}: only {sum(pool.sizes)} processes are recorded; its rates are rough"
    for kind in recording.kinds:
        if kind not in recorded:
            yield f"{kind}: recorded in one process of a session only, which shows nothing of its noise"
    bounded = {
        k: _share(sum(x.bounded for x in t.values()), sum(x.runs for x in t.values())) for k, t in whole.tallies.items()
    }
    if any(bounded.values()):
        shares = ", ".join(f"{k} {s:.0%}" for k, s in bounded.items() if s)
        yield (
            f"the gate would measure more than the {recording.blocks} blocks a process that were recorded (share of "
            f"workloads: {shares}); it is simulated with {recording.blocks}"
        )
    if (recording.blocks, recording.rounds) != (BLOCKS, ROUNDS):
        yield (
            f"{recording.blocks} blocks of {recording.rounds} rounds a process were recorded; "
            f"`perfsuite accept` measures {BLOCKS} of {ROUNDS}"
        )
    if recording.machine.device.startswith("cpu"):
        yield "a CPU: calls run on one thread, both clocks are the host's, and other processes disturb them"
    stacks = {tuple(getattr(s, n) for n in ("driver", "cuda", "torch", "triton")) for s in recording.sessions}
    if len(stacks) > 1:
        yield "the sessions ran on different software"
