"""The gate run again and again on recorded processes: pure, no torch.

Nothing here decides. Each run draws a baseline, a first and a second look from the recording, builds the records
that the gate takes, and asks `gate.first_look` and `gate.second_look`.

A process is drawn with replacement, then its blocks within it. Block noise would so be counted twice, once in the
means of the recorded processes; these are therefore moved toward their session's mean until the drawn process means
vary as the recorded ones do (Davison and Hinkley, Bootstrap Methods, 3.8). The noise is drawn from all sides alike,
planted or not: a few per cent of work do not change it, and a side that was quiet by chance would make every copy of
its kind in the suite quiet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from perfsuite import gate
from perfsuite.baseline import Entry, Process, Session, SideSummary
from perfsuite.calibration.record import ACCEPTED, OPTIMIZED, REFERENCE, KindRecord, Recording, side_name
from perfsuite.records import Measurement, PromiseRecord, SideRecord, Status, Verdict
from perfsuite.statistics import SESSION_SD

Array = NDArray[np.float64]

ACCEPT_PROCESSES = 5
"""What `perfsuite accept` measures unless told otherwise."""
COPIES = 5
"""The suite that is gated holds each kind so many times: enough workloads that it supplies its own prior."""
DATE = "2000-01-01T00:00:00+00:00"


def block_ratios(kind: KindRecord, other: str, side: str) -> Array:
    """A process's block log-ratios as the gate has them: medians over quads of log(time of other / time of side)."""
    ratios = np.log(np.array(kind.quads_s[other]) / np.array(kind.quads_s[side]))
    return np.asarray(np.median(ratios, axis=1), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Truth:
    """What intervals are to cover: the speedup over the reference, and the slowdown as each look compares it."""

    speedup: float
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class Pool:
    """One kind's processes: side → the log-ratio of the reference, and of the accepted side, to it.

    By session; each array has a row a process, of block log-ratios.
    """

    reference: Mapping[str, tuple[Array, ...]]
    accepted: Mapping[str, tuple[Array, ...]]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(a) for a in self.reference[OPTIMIZED])

    def known(self, ratios: Mapping[str, tuple[Array, ...]], side: str) -> float:
        """The value over all that was recorded: the mean over sessions of their means."""
        return float(np.mean([a.mean() for a in ratios[side]]))

    def planted(self, side: str) -> float:
        """Log slowdown of the side against the accepted one, over all that was recorded."""
        return -self.known(self.accepted, side)

    def truth(self, side: str) -> Truth:
        """The known values of that side, over all that was recorded."""
        ratio = self.known(self.reference, side)
        slower = self.known(self.reference, OPTIMIZED) - ratio
        return Truth(math.exp(ratio), math.expm1(slower), math.expm1(self.planted(side)))

    def again(self, rng: np.random.Generator) -> Pool:
        """Another recording that might have been: processes of each session drawn with replacement."""
        rows = [rng.integers(0, n, n) for n in self.sizes]

        def drawn(ratios: Mapping[str, tuple[Array, ...]]) -> dict[str, tuple[Array, ...]]:
            return {s: tuple(a[r] for a, r in zip(arrays, rows, strict=True)) for s, arrays in ratios.items()}

        return Pool(drawn(self.reference), drawn(self.accepted))

    def source(self) -> Source:
        """What is drawn from."""
        return Source(
            {s: tuple(float(a.mean()) for a in arrays) for s, arrays in self.reference.items()},
            {s: tuple(float(a.mean()) for a in arrays) for s, arrays in self.accepted.items()},
            _residuals(self.reference),
            _residuals(self.accepted),
        )


@dataclass(frozen=True, slots=True)
class Source:
    """Each side's mean by session, and the noise around it: by session, a row a process and side."""

    reference: Mapping[str, tuple[float, ...]]
    accepted: Mapping[str, tuple[float, ...]]
    reference_noise: tuple[Array, ...]
    accepted_noise: tuple[Array, ...]

    @property
    def sessions(self) -> int:
        return len(self.reference_noise)


def pools(recording: Recording) -> dict[str, Pool]:
    """Each kind's pool; sessions in which a kind has fewer than two processes are left out for it."""
    found = {}
    sides = [side_name(x) for x in recording.extras]
    for name in recording.kinds:
        sessions = [[p.kinds[name] for p in s.processes if name in p.kinds] for s in recording.sessions]
        sessions = [s for s in sessions if len(s) > 1]
        if sessions:
            found[name] = Pool(
                {s: tuple(np.array([block_ratios(k, REFERENCE, s) for k in p]) for p in sessions) for s in sides},
                {s: tuple(np.array([block_ratios(k, ACCEPTED, s) for k in p]) for p in sessions) for s in sides},
            )
    return found


def _residuals(ratios: Mapping[str, tuple[Array, ...]]) -> tuple[Array, ...]:
    """By session: every side's blocks around its mean, so that drawn process means vary as the recorded."""
    return tuple(_around(list(arrays)) for arrays in zip(*ratios.values(), strict=True))


def _around(sides: Sequence[Array]) -> Array:
    processes, blocks = sides[0].shape
    means = [a.mean(axis=1, keepdims=True) for a in sides]
    recorded = float(np.mean([m.var(ddof=1) for m in means]))
    # What drawing blocks adds to a process mean.
    added = float(np.mean([a.var(axis=1).mean() for a in sides])) / blocks
    drawn = recorded * (processes - 1) / processes
    share = math.sqrt(max(recorded - added, 0.0) / drawn) if drawn > 0 else 0.0
    return np.concatenate([a - m + share * (m - m.mean()) for a, m in zip(sides, means, strict=True)])


@dataclass(slots=True)
class Tally:
    """What the gate said of one kind at one planted share, over all runs."""

    statuses: dict[Status, int] = field(default_factory=dict)
    opened: int = 0
    """How often the first look left it open."""
    stages: list[int] = field(default_factory=lambda: [0] * len(gate.STAGES))
    """How often each stage of the second look was reached."""
    covered: dict[str, list[int]] = field(default_factory=dict)
    """Interval → [how often it covered the known value, how often it was given]."""
    margins: list[float] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return sum(self.statuses.values())

    def count(self, *statuses: Status) -> int:
        return sum(self.statuses.get(s, 0) for s in statuses)

    @property
    def red(self) -> int:
        return sum(n for s, n in self.statuses.items() if not s.green)

    def cover(self, interval: str, low: float | None, high: float | None, known: float) -> None:
        if low is not None and high is not None:
            seen = self.covered.setdefault(interval, [0, 0])
            seen[0] += low <= known <= high
            seen[1] += 1


@dataclass(slots=True)
class Suite:
    """What the gate said of whole suites at one planted share."""

    runs: int = 0
    alarms: int = 0
    """Runs with at least one REGRESSED."""
    red: int = 0
    """Runs with at least one red verdict of any kind."""


@dataclass(slots=True)
class Simulation:
    """Kind → side → tally, and side → suite."""

    tallies: dict[str, dict[str, Tally]] = field(default_factory=dict)
    suites: dict[str, Suite] = field(default_factory=dict)


def simulate(
    recorded: Mapping[str, Pool],
    sides: Sequence[str],
    *,
    suites: int,
    rng: np.random.Generator,
    known: Mapping[str, Pool] | None = None,
    copies: int = COPIES,
    into: Simulation | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Simulation:
    """Gate `suites` suites at each of `sides`, every workload of a suite planted alike.

    With one recorded session the shifts between sessions are drawn with the gate's own SESSION_SD; with several,
    baseline and run come from different ones. `known` has the values to be covered, where not `recorded` itself;
    `into` is a simulation to go on with.
    """
    known = known or recorded
    drawn_from = {k: p.source() for k, p in recorded.items()}
    truths = {(k, s): p.truth(s) for k, p in known.items() for s in sides}
    result = into or Simulation({k: {s: Tally() for s in sides} for k in recorded}, {s: Suite() for s in sides})
    for side in sides:
        for number in range(suites):
            if number % 10 == 0:
                progress(f"gating {side}, {number} of {suites}")
            _gate_once(drawn_from, truths, side, rng, copies, result)
    return result


def _gate_once(
    recorded: Mapping[str, Source],
    truths: Mapping[tuple[str, str], Truth],
    side: str,
    rng: np.random.Generator,
    copies: int,
    result: Simulation,
) -> None:
    entries: dict[str, Entry] = {}
    first: dict[str, list[Measurement]] = {}
    second: dict[str, list[Measurement]] = {}
    for kind, source in recorded.items():
        sessions = source.sessions
        then = int(rng.integers(sessions))
        now = (then + 1 + int(rng.integers(sessions - 1))) % sessions if sessions > 1 else then
        for copy in range(copies):
            key = f"calibration::{kind}::speed[{copy}]"
            shifts = rng.normal(0, SESSION_SD, 2) if sessions == 1 else (0.0, 0.0)
            accepted = _drawn(source, OPTIMIZED, then, ACCEPT_PROCESSES, rng, float(shifts[0]))
            count = gate.FIRST_PROCESSES + gate.STAGES[-1].processes
            run = _drawn(source, side, now, count, rng, float(shifts[1]))
            entries[key] = _entry(key, kind, accepted)
            made = [_measurement(key, kind, *r) for r in run]
            first[key], second[key] = made[: gate.FIRST_PROCESSES], made[gate.FIRST_PROCESSES :]
    promises = {key: PromiseRecord() for key in entries}
    looked = gate.first_look(entries, first, promises, selected=len(entries))
    plain = gate.promises_look(first, promises, selected=len(entries), processes=gate.FIRST_PROCESSES)
    opened = {k: a for k, a in looked.items() if isinstance(a, gate.Open)}
    again: dict[str, Verdict] = {}
    for number, stage in enumerate(gate.STAGES):
        left = {k: a for k, a in opened.items() if k not in again}
        for key in left:
            result.tallies[key.split("::")[1]][side].stages[number] += 1
        again |= gate.second_look(left, {k: second[k][: stage.processes] for k in left}, stage=number)
    verdicts: dict[str, Verdict] = {k: a for k, a in looked.items() if isinstance(a, Verdict)} | again
    suite = result.suites[side]
    suite.runs += 1
    suite.alarms += any(v.status is Status.REGRESSED for v in verdicts.values())
    suite.red += any(not v.status.green for v in verdicts.values())
    for key, verdict in verdicts.items():
        kind = key.split("::")[1]
        tally, truth, answer = result.tallies[kind][side], truths[kind, side], looked[key]
        tally.statuses[verdict.status] = tally.statuses.get(verdict.status, 0) + 1
        tally.opened += key in opened
        if verdict.margin is not None:
            tally.margins.append(verdict.margin)
        tally.cover("speedup", plain[key].speedup_low, plain[key].speedup_high, truth.speedup)
        tally.cover("slowdown, first look", answer.low, answer.high, truth.first)
        if key in again:
            tally.cover("slowdown, second look", again[key].low, again[key].high, truth.second)


def _drawn(
    source: Source, side: str, session: int, count: int, rng: np.random.Generator, shift: float
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """So many processes: block log-ratios to the reference and to the accepted side, of the same blocks."""
    reference, accepted = source.reference_noise[session], source.accepted_noise[session]
    rows = rng.integers(0, len(reference), (count, 1))
    blocks = rng.integers(0, reference.shape[1], (count, reference.shape[1]))
    ratios = (reference[rows, blocks] + source.reference[side][session] + shift).tolist()
    twins = (accepted[rows, blocks] + source.accepted[side][session]).tolist()
    return [(tuple(r), tuple(a)) for r, a in zip(ratios, twins, strict=True)]


_SIDE = SideRecord(device_s=1.0, wall_s=1.0, blocks_s=(1.0,), peak_bytes=None, host_syncs=None, launches=None)
_SUMMARY = SideSummary(seconds=1.0, peak_bytes=None, host_syncs=None, launches=None)
# The gate decides by ratios; seconds only tell which side moved, which nobody asks here.


def _measurement(key: str, kind: str, reference: tuple[float, ...], accepted: tuple[float, ...]) -> Measurement:
    return Measurement(
        id=key,
        pair=kind,
        workload=kind,
        device="calibration",
        clock="device",
        direction="forward",
        dtype="float32",
        sizes={},
        seed=0,
        sides={OPTIMIZED: _SIDE, REFERENCE: _SIDE},
        log_ratios={REFERENCE: reference, ACCEPTED: accepted},
    )


def _entry(key: str, kind: str, processes: Sequence[tuple[tuple[float, ...], tuple[float, ...]]]) -> Entry:
    session = Session(
        date=DATE,
        driver=None,
        cuda=None,
        torch=None,
        triton=None,
        python="",
        processes=tuple(
            Process(log_ratios={REFERENCE: r, ACCEPTED: a}, seconds={OPTIMIZED: 1.0, REFERENCE: 1.0})
            for r, a in processes
        ),
    )
    return Entry(
        id=key,
        pair=kind,
        workload=kind,
        device="calibration",
        clock="device",
        direction="forward",
        dtype="float32",
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
        blocks_s={OPTIMIZED: (1.0,), REFERENCE: (1.0,)},
    )
