"""Run the gate many times on processes drawn from a recording. Pure functions; imports no torch.

Each simulated run accepts a suite from five processes a workload and then gates it as `perfsuite gate` does: every open
workload gets another process, then `gate.analyse` decides on all workloads, until none is open.

A process is drawn with replacement, then its blocks. The recorded process means already contain block noise, so drawing
blocks would count it twice. The means are therefore shrunk toward the mean of their session until the drawn process
means vary as much as the recorded ones (Davison and Hinkley, Bootstrap Methods, 3.8). The noise is drawn from all sides
alike: a few per cent of planted work do not change it, and six sides show more of its tails than one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from experiments.calibration.record import BLOCKS, KindRecord, Recording, side_name
from perfsuite.baseline.accepted_entries import Entry, Process, Session, SideSummary
from perfsuite.baseline.priors import suite_noise
from perfsuite.gate import decision, estimates, planning
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Measurement, PromiseRecord, SideRecord, Status, Verdict
from perfsuite.session.modes import accept, paired
from perfsuite.statistics.blocks import block_variance, process_mean

Array = NDArray[np.float64]

COPIES = 5
"""Workloads of each kind in the simulated suite: enough for the suite to supply its own noise prior."""
DATE = "2000-01-01T00:00:00+00:00"


def block_ratios(kind: KindRecord, other: str, side: str) -> Array:
    """Return a process's block log-ratios as the gate computes them: the median over ABBA rounds of
    log(time of other / time of side)."""
    ratios = np.log(np.array(kind.rounds_s[other]) / np.array(kind.rounds_s[side]))
    return np.asarray(np.median(ratios, axis=1), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Pool:
    """The processes of one kind: side → session → log(time of the accepted side / time of the side).

    Each array has a row for each process and a column for each block.
    """

    sides: Mapping[str, tuple[Array, ...]]
    block_s: float
    """Seconds of one block, for the accepted and the optimized side together."""
    clock: str = "device"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Processes of each session."""
        return tuple(len(a) for a in self.sides[OPTIMIZED])

    def mean(self, side: str) -> float:
        """Return a side's mean over sessions of the mean over their processes."""
        return float(np.mean([_means(a, self.clock).mean() for a in self.sides[side]]))

    def again(self, rng: np.random.Generator) -> Pool:
        """Return a bootstrap copy: the processes of each session, drawn with replacement."""
        rows = [rng.integers(0, n, n) for n in self.sizes]
        drawn = {s: tuple(a[r] for a, r in zip(arrays, rows, strict=True)) for s, arrays in self.sides.items()}
        return replace(self, sides=drawn)

    def noise(self) -> tuple[Array, ...]:
        """Return the noise of each session: blocks around their side's mean, a row for each process and side."""
        return tuple(_around(arrays, self.clock) for arrays in zip(*self.sides.values(), strict=True))


def pools(recording: Recording) -> dict[str, Pool]:
    """Return each kind's pool, without the sessions in which the kind has fewer than two processes."""
    found = {}
    for name in recording.kinds:
        sessions = [[p.kinds[name] for p in s.processes if name in p.kinds] for s in recording.sessions]
        sessions = [s for s in sessions if len(s) > 1]
        if sessions:
            spent = [p.side_s[ACCEPTED] + p.side_s[OPTIMIZED] for s in sessions for p in s]
            found[name] = Pool(
                {
                    s: tuple(np.array([block_ratios(k, ACCEPTED, s) for k in p]) for p in sessions)
                    for s in map(side_name, recording.extras)
                },
                float(np.median(spent)) / recording.blocks,
                sessions[0][0].clock,
            )
    return found


def _means(blocks: Array, clock: str) -> Array:
    """Return the process means, as a column."""
    return np.array([[process_mean(row, clock)] for row in blocks.tolist()])


def _around(sides: Sequence[Array], clock: str) -> Array:
    processes, blocks = sides[0].shape
    means = [_means(a, clock) for a in sides]
    recorded = float(np.mean([m.var(ddof=1) for m in means]))
    # The variance that drawing blocks adds to a process mean.
    added = block_variance([row for a in sides for row in a.tolist()], clock)[0] * (blocks - 1) / blocks**2
    drawn = recorded * (processes - 1) / processes
    share = math.sqrt(max(recorded - added, 0.0) / drawn) if drawn > 0 else 0.0
    return np.concatenate([a - m + share * (m - m.mean()) for a, m in zip(sides, means, strict=True)])


@dataclass(slots=True)
class Tally:
    """The gate's verdicts on one kind at one planted slowdown."""

    statuses: Counter[Status] = field(default_factory=Counter)
    first: int = 0
    """Runs decided by one process, among those that were not in the sample (`unsampled`)."""
    unsampled: int = 0
    processes: int = 0
    blocks: int = 0
    bounded: int = 0
    """Runs whose plan asked for more blocks a process than were recorded."""
    covered: int = 0
    """Runs whose 95% interval of the slowdown contained the truth."""
    margins: list[float] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return self.statuses.total()

    def add(self, verdict: Verdict, *, slowdown: float, blocks: int, sampled: bool, bounded: bool) -> None:
        """Add the verdict on one workload. `slowdown` is the true one, `blocks` those of all its processes."""
        assert verdict.low is not None
        assert verdict.high is not None
        assert verdict.margin is not None
        self.statuses[verdict.status] += 1
        self.first += not sampled and verdict.processes == 1
        self.unsampled += not sampled
        self.processes += verdict.processes
        self.blocks += blocks
        self.bounded += bounded
        self.covered += verdict.low <= slowdown <= verdict.high
        self.margins.append(verdict.margin)


@dataclass(slots=True)
class SuiteTally:
    """The gate's verdicts on whole suites at one planted slowdown."""

    runs: int = 0
    alarms: int = 0
    """Runs with at least one REGRESSED."""
    red: int = 0
    """Runs with at least one red verdict of any kind."""
    improved: int = 0
    """Runs with at least one IMPROVED."""
    rounds: int = 0

    def add(self, verdicts: Collection[Verdict], rounds: int) -> None:
        """Add the verdicts on one suite, which took so many rounds of processes."""
        self.runs += 1
        self.alarms += any(v.status is Status.REGRESSED for v in verdicts)
        self.red += any(not v.status.green for v in verdicts)
        self.improved += any(v.status is Status.IMPROVED for v in verdicts)
        self.rounds += rounds


@dataclass(slots=True)
class Simulation:
    """Result of a simulation: kind → side → tally, and side → suite."""

    tallies: dict[str, dict[str, Tally]]
    suites: dict[str, SuiteTally]


def simulate(
    recorded: Mapping[str, Pool],
    suites: Mapping[str, int],
    rng: np.random.Generator,
    *,
    progress: Callable[[str], None] = lambda what: None,
) -> Simulation:
    """Simulate `suites[side]` gated suites for each side. All workloads of a suite have the slowdown of that side.

    If several sessions were recorded, the accepted processes and those of the run come from different ones.
    """
    noise = {k: p.noise() for k, p in recorded.items()}
    result = Simulation({k: {s: Tally() for s in suites} for k in recorded}, {s: SuiteTally() for s in suites})
    for side, count in suites.items():
        for number in range(count):
            if number % 10 == 0:
                progress(f"gating {side}, {number} of {count}")
            _gate_once(recorded, noise, side, rng, result)
    return result


@dataclass(frozen=True, slots=True)
class _Workload:
    """One workload of a simulated suite."""

    kind: str
    entry: Entry
    noise: Array
    """Noise of the session that the run's processes are drawn from."""


def _accepted(
    recorded: Mapping[str, Pool], noise: Mapping[str, tuple[Array, ...]], rng: np.random.Generator
) -> dict[str, _Workload]:
    """Return a suite with COPIES of each kind, accepted from processes drawn from one session."""
    suite: dict[str, _Workload] = {}
    for kind, pool in recorded.items():
        sessions = len(noise[kind])
        before = int(rng.integers(sessions))
        after = (before + 1 + int(rng.integers(sessions - 1))) % sessions if sessions > 1 else before
        for copy in range(COPIES):
            key = f"calibration::{kind}::speed[{copy}]"
            shift, blocks = pool.mean(OPTIMIZED), noise[kind][before].shape[1]
            processes = [_drawn(noise[kind][before], shift, blocks, rng) for _ in range(accept.PROCESSES)]
            suite[key] = _Workload(kind, _entry(key, pool.clock, processes), noise[kind][after])
    return suite


def _gate_once(
    recorded: Mapping[str, Pool],
    noise: Mapping[str, tuple[Array, ...]],
    side: str,
    rng: np.random.Generator,
    result: Simulation,
) -> None:
    suite = _accepted(recorded, noise, rng)
    entries = {k: w.entry for k, w in suite.items()}
    priors = suite_noise(entries)
    planned = {
        k: planning.blocks_of(e, estimates.margin_of(e, priors, selected=len(entries))) or BLOCKS
        for k, e in entries.items()
    }
    size = paired.sample_size(len(entries))
    sample = {str(k) for k in rng.choice(list(entries), size, replace=False)}
    runs: dict[str, tuple[Measurement, ...]] = dict.fromkeys(entries, ())
    left, rounds = list(entries), 0
    while left:
        for key in left:
            runs[key] += (_measured(suite[key], planned[key], recorded[suite[key].kind].mean(side), rng),)
        subjects = [
            estimates.Subject(id=k, runs=runs[k], entry=e, against="the accepted revision", sampled=k in sample)
            for k, e in entries.items()
        ]
        answers = decision.analyse(subjects, priors, selected=len(entries))
        left = [k for k, a in answers.items() if isinstance(a, decision.Undecided)]
        rounds += 1
    verdicts = {k: a for k, a in answers.items() if isinstance(a, Verdict)}
    result.suites[side].add(verdicts.values(), rounds)
    for key, verdict in verdicts.items():
        kind = suite[key].kind
        result.tallies[kind][side].add(
            verdict,
            slowdown=math.expm1(-recorded[kind].mean(side)),
            blocks=sum(len(m.log_ratios[ACCEPTED]) for m in runs[key]),
            sampled=key in sample,
            bounded=planned[key] > suite[key].noise.shape[1],
        )


def _measured(workload: _Workload, planned: int, mean: float, rng: np.random.Generator) -> Measurement:
    """Return a process of at most `planned` blocks of a workload, drawn around the mean."""
    blocks = min(planned, workload.noise.shape[1])
    drawn = _drawn(workload.noise, mean, blocks, rng)
    return replace(_MEASUREMENT, id=workload.entry.id, clock=workload.entry.clock, log_ratios={ACCEPTED: drawn})


def _drawn(noise: Array, mean: float, blocks: int, rng: np.random.Generator) -> tuple[float, ...]:
    """Return the block log-ratios of one process."""
    row = noise[rng.integers(len(noise))]
    return tuple((row[rng.integers(0, len(row), blocks)] + mean).tolist())


# The gate decides by ratios. Seconds show only which side moved, which does not matter here.
_SIDE = SideRecord(device_s=1e-4, wall_s=1e-4, blocks_s=(1e-4,), peak_bytes=None, host_syncs=None, launches=None)
_SUMMARY = SideSummary(seconds=1e-4, peak_bytes=None, host_syncs=None, launches=None)
_MEASUREMENT = Measurement(
    id="",
    pair="calibration",
    workload="calibration",
    device="calibration",
    clock="device",
    direction="forward",
    dtype="float32",
    sizes={},
    seed=0,
    sides={OPTIMIZED: _SIDE},
    log_ratios={},
)


def _entry(key: str, clock: str, processes: Sequence[tuple[float, ...]]) -> Entry:
    session = Session(
        date=DATE,
        driver=None,
        cuda=None,
        torch=None,
        triton=None,
        python="",
        processes=tuple(
            Process(log_ratios={REFERENCE: (0.0,), ACCEPTED: p}, seconds={OPTIMIZED: 1e-4, REFERENCE: 1e-4})
            for p in processes
        ),
    )
    return Entry(
        id=key,
        pair=_MEASUREMENT.pair,
        workload=_MEASUREMENT.workload,
        device=_MEASUREMENT.device,
        clock=clock,
        direction=_MEASUREMENT.direction,
        dtype=_MEASUREMENT.dtype,
        sizes={},
        revision="0" * 40,
        dirty=False,
        reason="calibration",
        accepted=DATE,
        promises=PromiseRecord(),
        sides={OPTIMIZED: _SUMMARY, REFERENCE: _SUMMARY},
        limit=None,
        few=(),
        sessions=(session,),
        blocks_s={OPTIMIZED: (1e-4,), REFERENCE: (1e-4,)},
    )
