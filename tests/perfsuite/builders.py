"""Synthetic records with the noise of real ones: quads in blocks, blocks in processes, processes in sessions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perfsuite.baseline import Entry, entry_from
from perfsuite.baseline import merge as merge_baseline
from perfsuite.records import Machine, Measurement, PromiseRecord, SideRecord

MACHINE = Machine(
    device="nvidia-h200",
    device_name="NVIDIA H200",
    count=1,
    cpu="Intel Xeon",
    cores=16,
    memory_bytes=150_000_000_000,
    driver="580.1",
    cuda="13.0",
    power_limit_w=700.0,
    python="3.11.9",
    torch="2.11.0",
    triton="3.6.0",
    platform="Linux-6.1-x86_64",
)
REVISION = "1a2b3c4d5e6f7a8b9c0d1e2f3a4b5c6d7e8f9a0b"
BLOCKS = 8


def workload_id(number: int) -> str:
    return f"tests/domain/test_pair{number:03d}.py::pair{number:03d}::speed[w]"


def measurement(
    key: str = workload_id(0),
    *,
    ratio: Sequence[float] | float = math.log(20.0),
    accepted: Sequence[float] | float | None = None,
    optimized_s: float = 1e-4,
    reference_s: float | None = None,
    **fields: Any,
) -> Measurement:
    """One process. `ratio` and `accepted` are block log-ratios, or one value for all blocks."""

    def blocks(value: Sequence[float] | float) -> tuple[float, ...]:
        return (float(value),) * BLOCKS if isinstance(value, (int, float)) else tuple(float(v) for v in value)

    ratios = {"reference": blocks(ratio)}
    if accepted is not None:
        ratios["accepted"] = blocks(accepted)
    if reference_s is None:
        reference_s = optimized_s * math.exp(float(np.mean(ratio)))
    values: dict[str, Any] = {
        "id": key,
        "pair": key.split("::")[1] if "::" in key else key,
        "workload": "w",
        "device": "nvidia-h200",
        "clock": "device",
        "direction": "forward",
        "dtype": "float32",
        "sizes": {"n": 4096},
        "seed": 0,
        "sides": {"optimized": side(optimized_s), "reference": side(reference_s)},
        "log_ratios": ratios,
    }
    return Measurement(**{**values, **fields})


def side(seconds: float, **counts: int | None) -> SideRecord:
    known: dict[str, int | None] = {"peak_bytes": 1024, "host_syncs": 0, "launches": 1, **counts}
    return SideRecord(device_s=seconds, wall_s=seconds, blocks_s=(seconds,) * BLOCKS, **known)


def counting(m: Measurement, **counts: int | None) -> Measurement:
    """The measurement with other counts of its optimized side."""
    return replace(m, sides={**m.sides, "optimized": replace(m.sides["optimized"], **counts)})


def few(m: Measurement) -> Measurement:
    return replace(m, few=("reference",))


def entry(
    measurements: Sequence[Measurement] | Sequence[Sequence[Measurement]],
    *,
    promises: PromiseRecord | None = None,
    revision: str | None = REVISION,
) -> Entry:
    """An entry of one session, or of several if given a list for each."""
    sessions = [measurements] if isinstance(measurements[0], Measurement) else measurements
    baseline = None
    for number, session in enumerate(sessions):
        made = entry_from(
            list(session),  # type: ignore[arg-type]
            machine=MACHINE,
            promises=promises or PromiseRecord(),
            revision=revision,
            dirty=False,
            reason="first acceptance",
            accepted=f"2026-11-{number + 1:02d}T12:00:00+00:00",
        )
        baseline = merge_baseline(baseline, [made], machine=MACHINE, more=number > 0)
    assert baseline is not None
    return next(iter(baseline.entries.values()))


@dataclass(frozen=True)
class Noise:
    """Standard deviations of one workload's log-ratios."""

    quad: float
    block: float
    process: float
    session: float
    bias: float = 0.0005
    """Between two imports of one revision; fixed for a workload's second look."""


def mixed(rng: np.random.Generator) -> Noise:
    return Noise(
        quad=rng.uniform(0.001, 0.01),
        block=rng.uniform(0.002, 0.006),
        process=float(np.exp(rng.uniform(np.log(0.0005), np.log(0.006)))),
        session=rng.uniform(0.001, 0.003),
    )


PESSIMISTIC = Noise(quad=0.01, block=0.006, process=0.006, session=0.003)


def processes(
    rng: np.random.Generator, noise: Noise, count: int, *, truth: float, shift: float, quads: int = 7
) -> np.ndarray:
    """Block log-ratios, a row a process: quads with 2% outliers, of which a block takes the median."""
    values = rng.normal(0, noise.quad, (count, BLOCKS, quads))
    outlier = rng.random(values.shape) < 0.02
    values = np.where(outlier, values + rng.exponential(0.1, values.shape), values)
    blocks = np.median(values, axis=2) + rng.normal(0, noise.block, (count, BLOCKS))
    return blocks + rng.normal(0, noise.process, (count, 1)) + truth + shift


@dataclass
class Suite:
    """Simulated workloads with their baselines; `run` and `again` are what the first and the second look get."""

    rng: np.random.Generator
    noises: Mapping[str, Noise]
    entries: Mapping[str, Entry]
    truth: float = math.log(20.0)

    @classmethod
    def make(
        cls,
        rng: np.random.Generator,
        *,
        workloads: int,
        sessions: int,
        per_session: int,
        pessimistic: bool = False,
    ) -> Suite:
        noises = {workload_id(i): PESSIMISTIC if pessimistic else mixed(rng) for i in range(workloads)}
        suite = cls(rng, noises, {})
        suite.entries = {key: suite._entry(key, sessions, per_session) for key in noises}
        return suite

    def _entry(self, key: str, sessions: int, per_session: int) -> Entry:
        one = entry(self._session(key, 1))
        (process,) = one.sessions[0].processes
        made = []
        for _ in range(sessions):
            ratios = [m.log_ratios for m in self._session(key, per_session)]
            made.append(replace(one.sessions[0], processes=tuple(replace(process, log_ratios=r) for r in ratios)))
        return replace(one, sessions=tuple(made))

    def _session(self, key: str, count: int, slower: float = 0.0, scale: float = 1.0) -> list[Measurement]:
        noise = self.noises[key]
        noise = Noise(*(s * scale for s in (noise.quad, noise.block, noise.process)), session=noise.session)
        shift = self.rng.normal(0, noise.session)
        rows = processes(self.rng, noise, count, truth=self.truth - slower, shift=shift)
        return [measurement(key, ratio=row.tolist()) for row in rows]

    def run(self, slower: float = 0.0, count: int = 3, scale: float = 1.0) -> dict[str, list[Measurement]]:
        """`count` processes of each workload, the optimized side slower by `slower` (log)."""
        return {key: self._session(key, count, slower, scale) for key in self.noises}

    def again(self, keys: Sequence[str], slower: float = 0.0, scale: float = 1.0) -> dict[str, list[Measurement]]:
        """Six processes of the accepted side interleaved with the current one."""
        result = {}
        for key in keys:
            noise = self.noises[key]
            bias = self.rng.normal(0, noise.bias)
            noise = Noise(*(s * scale for s in (noise.quad, noise.block, noise.process)), session=noise.session)
            rows = processes(self.rng, noise, 12, truth=-slower, shift=bias)
            reference = self._session(key, 12, slower, scale)
            result[key] = [
                replace(m, log_ratios={**m.log_ratios, "accepted": tuple(row.tolist())})
                for m, row in zip(reference, rows, strict=True)
            ]
        return result
