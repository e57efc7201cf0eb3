"""Synthetic histories of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from builders import MACHINE

from perfsuite.history import store
from perfsuite.history.records import Figures, Run
from perfsuite.records import Counts, Status
from perfsuite.report.workload_rows import Comparison

DOTS = "tests/linear/test_dots.py::dots::speed[large]"
BEGAN = datetime(2026, 11, 1, 12, tzinfo=UTC)


def figures(seconds: float | None = 1e-5, **fields: Any) -> Figures:
    """Return one workload's figures, those of a gate that passed unless `fields` differ."""
    known: dict[str, Any] = {
        "verdict": Status.PASS,
        "clock": "device",
        "direction": "forward",
        "dtype": "float32",
        "sizes": {"n": 64},
        "optimized_s": seconds,
        "reference_s": 1e-4,
        "accepted_s": 1e-5 if "slowdown" in fields else None,
        "speedup": Comparison(value=1e-4 / seconds) if seconds else None,
        "costs": Counts(host_syncs=0, launches=2, peak_bytes=1024),
    }
    return Figures(**{**known, **fields})


def run(number: int = 0, *ids: str, seconds: float | None = 1e-5, machine: Any = None, **fields: Any) -> Run:
    """Return a run `number` days after BEGAN; `machine` has the fields in which its machine differs from MACHINE."""
    known: dict[str, Any] = {
        "kind": "gate",
        "started": (BEGAN + timedelta(days=number)).isoformat(timespec="seconds"),
        "seconds": 60.0,
        "machine": replace(MACHINE, **(machine or {})),
        "host": "gpu-1",
        "revision": f"{number:07x}" + "0" * 33,
        "workloads": {id: figures(seconds) for id in ids or (DOTS,)},
    }
    return Run(**{**known, **fields})


def written(root: Path, *runs: Run) -> list[Path]:
    """Write the runs into a project's history, and return their files."""
    return [store.write(one, store.folder_of(root)) for one in runs]


def with_levels(*levels: tuple[int, float], noise: Sequence[float] = (0.0, 0.004, -0.004, 0.002)) -> list[Run]:
    """Return runs of DOTS: for each (count, seconds), `count` runs of about `seconds`."""
    times = [seconds for count, seconds in levels for _ in range(count)]
    return [run(n, seconds=s * math.exp(noise[n % len(noise)])) for n, s in enumerate(times)]
