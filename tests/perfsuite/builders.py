"""Synthetic records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perfsuite.baseline.accepted_entries import Entry, entry_from
from perfsuite.baseline.accepted_entries import merge as merge_baseline
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
    """Build one process's measurement; `ratio` and `accepted` are block log-ratios, or one value for all blocks."""

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
    """Return the measurement with other counts of its optimized side."""
    return replace(m, sides={**m.sides, "optimized": replace(m.sides["optimized"], **counts)})


def few(m: Measurement) -> Measurement:
    return replace(m, few=("reference",))


def entry(
    measurements: Sequence[Measurement] | Sequence[Sequence[Measurement]],
    *,
    promises: PromiseRecord | None = None,
    revision: str | None = REVISION,
) -> Entry:
    """Build an entry of one session, or of several if a list is given for each."""
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
