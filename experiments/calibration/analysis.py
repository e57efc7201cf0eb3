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

from experiments.calibration import constants
from experiments.calibration.figures import (
    LEVEL,
    Analysis,
    Compared,
    Components,
    Gated,
    KindResult,
    Rate,
    Target,
    Times,
    clopper_pearson,
    deviation,
    rate,
    share,
)
from experiments.calibration.record import BLOCKS, ROUNDS, KindRecord, ProcessRecord, Recording, ToolRun, side_name
from experiments.calibration.resample import COPIES, Array, Pool, Simulation, pools, simulate
from perfsuite.errors import PerfsuiteError
from perfsuite.gate import estimates
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Status
from perfsuite.session.modes import accept
from perfsuite.statistics import hierarchical as rule
from perfsuite.statistics.blocks import process_mean

SUITES = 200
"""Simulated suites at each planted slowdown: a rate of 1% over 5 copies of a kind is then known to within 0.6%."""
UNCHANGED = 2
"""Factor on the number of suites for unchanged code, because false alarms of a whole suite are rare."""
WORLDS, WORLD_SHARE, WORLD_UNCHANGED = 20, 0.03, 5
"""Maximum number of resampled recordings, the share of the suites that each simulates, and the factor on that for
unchanged code. The range of their rates shows the error that comes from recording few processes."""
STATED = 5
"""Second threshold of the other tools in per cent; the first is the gate's own margin."""
OUTLIER = 5.0
"""Robust standard deviations beyond which an ABBA round is an outlier: one round in a million if noise is normal."""
TARGETS: Mapping[str, float] = {"device": 0.01, "wall": 0.02}
"""Slowdown that the gate should find on each clock in 95% of the workloads."""


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
        constants=tuple(constants.compare(kinds, whole)),
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


# --- noise -----------------------------------------------------------------------------------------------------------


def components(recording: Recording, kind: str, other: str, side: str = OPTIMIZED) -> Components:
    """Return the nested components of variance of log(other / side), by the moments of the means of each level."""
    sessions = _log_ratios(recording, kind, other, side)
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


def _log_ratios(recording: Recording, kind: str, other: str, side: str) -> list[Array]:
    """Return log(other / side) of each session by process, block and ABBA round, without the sessions that have fewer
    than two processes of the kind."""
    found = []
    for session in recording.sessions:
        processes = [p.kinds[kind].rounds_s for p in session.processes if kind in p.kinds]
        if len(processes) > 1:
            found.append(np.array([np.log(np.array(p[other]) / np.array(p[side])) for p in processes]))
    return found


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
        processes=share(tally.processes, tally.runs),
        seconds=share(tally.blocks, tally.runs) * pool.block_s,
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


# --- seconds, warnings -----------------------------------------------------------------------------------------------


def _times(recording: Recording, whole: Simulation, recorded: Mapping[str, Pool]) -> Times:
    processes = [p for s in recording.sessions for p in s.processes]
    start = _middle([p.start_s for p in processes])
    return Times(
        process=_middle([p.seconds for p in processes]),
        start=start,
        sampling={k: _middle([p.kinds[k].seconds for p in processes if k in p.kinds]) for k in recording.kinds},
        gate={extra: _gate_seconds(side_name(extra), whole, recorded, start) for extra in recording.extras},
        tools=_tool_seconds(recording.kinds, processes),
    )


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _gate_seconds(side: str, whole: Simulation, recorded: Mapping[str, Pool], start_s: float) -> tuple[float, float]:
    """Return the mean (rounds, seconds) of a simulated suite whose workloads have this side's slowdown."""
    suite = whole.suites[side]
    timing = sum(whole.tallies[k][side].blocks * p.block_s for k, p in recorded.items())
    return suite.rounds / suite.runs, (suite.rounds * start_s + timing) / suite.runs


def _tool_seconds(kinds: Sequence[str], processes: Sequence[ProcessRecord]) -> dict[str, float]:
    tools = {}
    for label, tool in (("pytest-benchmark", "benchmark"), ("do_bench", "do_bench")):
        runs = [
            [r.seconds for p in processes if k in p.kinds for r in getattr(p.kinds[k], tool).values()] for k in kinds
        ]
        if any(runs):
            tools[label] = sum(map(_middle, runs))
    return tools


def _warnings(recording: Recording, recorded: Mapping[str, Pool], whole: Simulation) -> Iterator[str]:
    for kind, pool in recorded.items():
        if sum(pool.sizes) < accept.PROCESSES:
            yield f"{kind}: only {sum(pool.sizes)} processes are recorded; its rates are rough"
    for kind in recording.kinds:
        if kind not in recorded:
            yield f"{kind}: recorded in one process of a session only, which shows nothing of its noise"
    bounded = {
        k: share(sum(x.bounded for x in t.values()), sum(x.runs for x in t.values())) for k, t in whole.tallies.items()
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
