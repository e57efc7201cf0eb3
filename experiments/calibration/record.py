"""Records of a calibration, and their JSON file. Imports no torch.

A process times, for each kind of pair, every side in the same ABBA rounds: the reference, the optimized side of a
second import ("accepted"), the optimized side, and the optimized side with planted work ("+1.0%"). The last two also
have runs of pytest-benchmark, and of `triton.testing.do_bench` if that is available.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfsuite.baseline.storage import laid_out
from perfsuite.codec import from_json, to_json
from perfsuite.errors import PerfsuiteError
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Condition, Machine
from perfsuite.report import files

SCHEMA = 2
RENAMED = {"quads": "rounds", "quads_s": "rounds_s"}
"""Fields of schema 1 → their names in schema 2. `ToolRun.rounds` has the same name in both."""
EXTRAS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05)
"""Planted shares of work; 0 is the unchanged code."""
KINDS: Mapping[str, str] = {
    "memory": "an elementwise pass over a large vector; planted: more elements",
    "matmul": "a square matrix product, of a millisecond or more on a GPU; planted: a wait behind it",
    "launch": "20 tiny kernels on the wall clock, bound by their launches; planted: a busy wait of the host",
    "kernels": "200 small kernels a call; planted: more kernels",
}
"""The kinds of pair, and how work is planted in each."""
BLOCKS, ROUNDS = 16, 3
"""Blocks of a process and ABBA rounds of a block, equal to the gate's in `perfsuite.timing.sampling`. That module needs
torch."""
SECONDS_DIGITS = 6
"""Significant digits of a stored time: a relative error of 1e-6 is a hundredth of the smallest noise seen."""
AGAIN = "record it anew with `perfsuite calibrate`"


def side_name(extra: float) -> str:
    """Return the name of the optimized side with the share `extra` of planted work."""
    return OPTIMIZED if extra == 0 else f"+{extra:.1%}"


def side_names(extras: Sequence[float]) -> tuple[str, ...]:
    """Return the names of all sides of a kind, which are timed interleaved."""
    return (REFERENCE, ACCEPTED, *(side_name(x) for x in extras))


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRun:
    """One run of one side by another tool. Seconds a call."""

    median: float
    min: float
    rounds: int
    iterations: int
    seconds: float
    """Seconds that the run took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindRecord:
    """One kind of pair in one process."""

    clock: str
    rounds_s: Mapping[str, tuple[tuple[float, ...], ...]]
    """Side → block → ABBA round: seconds a call, the mean of the round's two turns."""
    side_s: Mapping[str, float]
    """Seconds spent on each side: its samples and its fresh inputs."""
    seconds: float
    condition: Condition = field(default_factory=Condition)
    benchmark: Mapping[str, ToolRun] = field(default_factory=dict)
    do_bench: Mapping[str, ToolRun] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRecord:
    """One measuring process. An interrupted one contains the kinds that it finished."""

    kinds: Mapping[str, KindRecord]
    start_s: float
    """Seconds from its start to its first measurement: imports and the device's context."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """Processes that ran on one machine within about an hour, one after another."""

    date: str
    """ISO date-time."""
    driver: str | None
    cuda: str | None
    torch: str | None
    triton: str | None
    python: str
    benchmark_version: str | None
    benchmark_max_time: float
    """pytest-benchmark's --benchmark-max-time; 0 if pytest-benchmark was left out."""
    processes: tuple[ProcessRecord, ...]
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()
    """Measurements that were planned but not made, each with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Everything recorded on one device with one design."""

    machine: Machine
    blocks: int
    rounds: int
    extras: tuple[float, ...]
    planting: Mapping[str, Mapping[str, float]]
    """Kind → the calibration of its planted work, done once for all processes and sessions."""
    sessions: tuple[SessionRecord, ...]
    schema: int = SCHEMA

    @property
    def kinds(self) -> tuple[str, ...]:
        """Recorded kinds, in the order of measuring."""
        return tuple(dict.fromkeys(k for s in self.sessions for p in s.processes for k in p.kinds))

    @property
    def processes(self) -> int:
        return sum(len(s.processes) for s in self.sessions)


def save(path: Path, recording: Recording) -> Path:
    """Write the file atomically. Raises PerfsuiteError in one line if that fails."""
    return files.write(path, laid_out(to_json(recording), "", step=1) + "\n")


def load(path: Path) -> Recording:
    """Read and check a recording. Raises PerfsuiteError in one line if it is missing, damaged or of another schema."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PerfsuiteError(
            f"{path}: {error.strerror or error}; name a file that `perfsuite calibrate` wrote"
        ) from None
    except (ValueError, RecursionError) as error:
        raise PerfsuiteError(f"{path}: not JSON ({error}); {AGAIN}") from None
    if not isinstance(data, dict) or "sessions" not in data:
        raise PerfsuiteError(f"{path}: not a recording of `perfsuite calibrate`; {AGAIN}")
    if data.get("schema") == 1:
        data = {**_renamed(data), "schema": SCHEMA}
    if data.get("schema") != SCHEMA:
        raise PerfsuiteError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA}; {AGAIN}")
    try:
        recording = from_json(Recording, data)
    except PerfsuiteError as error:
        raise PerfsuiteError(f"{path}: {error}; {AGAIN}") from None
    for session in recording.sessions:
        for process in session.processes:
            for kind, found in process.kinds.items():
                problem = _problem(found, recording)
                if problem:
                    raise PerfsuiteError(f"{path}: kind {kind!r} {problem}; {AGAIN}")
    return recording


def _renamed(value: Any) -> Any:
    match value:
        case dict():
            return {RENAMED.get(name, name): _renamed(held) for name, held in value.items()}
        case list():
            return [_renamed(held) for held in value]
    return value


def _problem(kind: KindRecord, recording: Recording) -> str | None:
    for side in side_names(recording.extras):
        blocks = kind.rounds_s.get(side, ())
        if len(blocks) != recording.blocks or any(len(b) != recording.rounds for b in blocks):
            return f"lacks rounds of the {side} side"
        if not all(math.isfinite(t) and t > 0 for b in blocks for t in b):
            return f"has a time of the {side} side that is not above 0"
        if not 0 < kind.side_s.get(side, 0.0) < math.inf:
            return f"lacks the seconds that were spent on the {side} side"
    return None


def joined(first: Recording, other: Recording, *, name: str) -> Recording:
    """Return a recording with the sessions of both, without duplicates. Raises PerfsuiteError if their designs
    differ; its message names `other` by `name`."""
    for what, one, two in (
        ("device", first.machine.device, other.machine.device),
        ("number of blocks", first.blocks, other.blocks),
        ("number of rounds", first.rounds, other.rounds),
        ("planted shares", first.extras, other.extras),
    ):
        if one != two:
            raise PerfsuiteError(f"{name}: its {what} is {two}, not {one}; sessions of one design can be joined only")
    new = tuple(s for s in other.sessions if s not in first.sessions)
    return replace(first, sessions=(*first.sessions, *new))


def rounded(seconds: float) -> float:
    """Return a time rounded to the digits that are stored."""
    return float(f"{seconds:.{SECONDS_DIGITS}g}")
