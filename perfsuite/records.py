"""Frozen records that pass from stage to stage. They hold no tensors and serialise to JSON."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar

from perfsuite.errors import PerfsuiteError
from perfsuite.workload import Promises

R = TypeVar("R")
REFERENCE, OPTIMIZED, ACCEPTED = "reference", "optimized", "accepted"
"""The names of the sides in every record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputCase:
    """Construction of one tensor input: its memory layout and the regime of its values."""

    layout: str = "contiguous"
    regime: str = "normal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One draw of a pair's inputs: everything needed to build the same tensors again."""

    dtype: str
    sizes: Mapping[str, Any]
    inputs: Mapping[str, InputCase]
    seed: int
    steps: int | None = None
    """Most steps of a stateful pair that are taken; None for all that the pair declares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Result of an equivalence check."""

    pair: str
    dtype: str
    device: str
    draws: int
    discarded: int
    elements: int
    excused: int
    worst: float
    """The largest error seen, as a fraction of its budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRecord:
    """One side of one workload in one process. Times are seconds a call, medians over the process."""

    device_s: float | None
    wall_s: float | None
    blocks_s: tuple[float, ...]
    """Median seconds a call in each block, on the workload's clock."""
    peak_bytes: int | None
    host_syncs: int | None
    launches: int | None


COPY, MATMUL, LAUNCH = "copy", "matmul", "launch"
"""The anchor kernels, as a measurement names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The device's limit for a workload, from its cost and the ceilings measured in the same process."""

    seconds: float
    by: str
    """"memory" or "compute"."""
    bytes: float
    flops: float
    ceiling: float
    """Bytes a second or operations a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """The state of the device over a measurement."""

    sm_clock_mhz: float | None = None
    sm_clock_min_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttle: tuple[str, ...] = ()
    set_aside: int = 0
    """ABBA rounds discarded because the device throttled while they ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The cost of one call of a side besides time; None where it cannot be counted."""

    host_syncs: int | None = None
    launches: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGroup:
    """The processes of torch.distributed that called a workload's sides together."""

    ranks: int
    backend: str
    """"nccl" or "gloo"."""
    version: str = ""
    """Version of NCCL; empty for gloo."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The environment variables of NCCL, gloo and torch's use of them."""
    links: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Connection of the devices of two ranks, as {"0-1": "NVLink"}."""
    by_rank: tuple[Mapping[str, Counts], ...] = ()
    """The cost of a call of each side in each rank."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Measurement:
    """One workload timed in one process.

    `log_ratios[other]` holds one value a block: the median over its ABBA rounds of log(time of `other` / time of
    `optimized`), so that a positive value means that `optimized` is faster. Keys are "reference", each rival,
    and "accepted", the optimized side of the accepted revision.
    """

    id: str
    pair: str
    workload: str
    device: str
    clock: str
    direction: str
    dtype: str
    sizes: Mapping[str, Any]
    seed: int
    sides: Mapping[str, SideRecord]
    log_ratios: Mapping[str, tuple[float, ...]]
    few: tuple[str, ...] = ()
    """Sides too slow to repeat: sampled a few times only."""
    at_least: tuple[str, ...] = ()
    """Sides whose only call was stopped once it had taken long enough: their seconds are a lower bound."""
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Rivals that were not timed, each with the reason."""
    limit: Limit | None = None
    items: float = 0.0
    """Items that a call processes, as the pair's `Cost` counts them; 0 where it does not."""
    unit: str = "items"
    condition: Condition = Condition()
    anchors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of each anchor kernel beside this workload."""
    seconds: float = 0.0
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of each phase of this measurement, by name: "inputs", "proof", "warm-up", "timing" and others."""
    evidence: Evidence | None = None
    group: ProcessGroup | None = None
    """The processes that called the sides together; None for one process."""

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the reference the optimized side is: the median over blocks.

        None where the reference was not timed.
        """
        blocks = self.log_ratios.get(REFERENCE)
        return math.exp(statistics.median(blocks)) if blocks else None

    @property
    def throughput(self) -> float | None:
        """Items a second of the optimized side: of its median block. None where no items are counted."""
        ours = self.sides.get(OPTIMIZED)
        return self.items / statistics.median(ours.blocks_s) if self.items and ours and ours.blocks_s else None

    def __repr__(self) -> str:
        ours = self.sides.get(OPTIMIZED)
        seconds = f", {statistics.median(ours.blocks_s):.3g} s a call" if ours and ours.blocks_s else ""
        faster = f", {self.speedup:.3g} times as fast as the reference" if self.speedup is not None else ""
        return f"<{type(self).__name__} of {self.id} on {self.device}{seconds}{faster}>"


def complete(measurements: Iterable[Measurement], side: str) -> tuple[list[Measurement], bool]:
    """Return (measurements in which the side ran to its end, or all if it did in none; whether all are lower
    bounds)."""
    timed = [m for m in measurements if side in m.sides]
    whole = [m for m in timed if side not in m.at_least]
    return whole or timed, bool(timed) and not whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """Everything that a workload ran, in digests (digests.py). Paths are relative to the repository's top folder."""

    sources: Mapping[str, str]
    data: Mapping[str, str] = dataclasses.field(default_factory=dict)
    surroundings: str = ""
    variables: Mapping[str, str] | None = None
    """The environment variables among the surroundings; None where they were not noted."""
    packages: tuple[str, ...] | None = None
    """The packages among the surroundings, as `name==version`; None where they were not noted."""
    launched: str = ""
    """Digest of what the workload launched on the device (launches.py); empty where that cannot be known in full."""
    untraced: str = ""
    """Why there is no such digest."""
    unknown: str = ""
    """Why it cannot be known what the workload ran; empty where it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """One workload's sides, proven equal on the inputs of `seed`, so that a later process need not prove it again."""

    id: str
    seed: int
    evidence: Evidence | None = None
    digests: tuple[str, ...] = ()
    """Digests of the outputs that were proven right, bit for bit."""
    counts: Mapping[str, Counts] = dataclasses.field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    """Rivals whose outputs were proven right, too."""
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Rivals that cannot be timed, each with the reason."""
    unloaded: str = ""
    """Why the accepted side cannot be compared with; empty where it can, or where there is none."""
    ran: Ran | None = None
    """Record of what the optimized side ran, where that was asked for."""
    same_launches: bool = False
    """Whether a trace showed that the optimized side launches what was accepted. Then nothing was proven."""
    truth_s: float = 0.0
    """Seconds that it took to establish the float64 truth, beside whatever else ran; 0 where that was not needed."""
    reference_s: float | None = None
    """Seconds of one call of the reference, beside whatever else ran; None where it was not asked for."""
    reference_stopped: bool = False
    """Whether that call was stopped, because it had taken long enough for its promise."""
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """A workload's sides, each timed apart from the other: the reference in a process where nothing of the optimized
    side has run, the optimized side in one where no test is running."""

    id: str
    blocks_s: tuple[float, ...]
    """Median seconds a call of the reference, by block."""
    outside_s: float | None = None
    """Seconds of a call of the optimized side on the wall clock; None where it was not asked for or cannot be had."""
    seconds: float = 0.0


PromiseRecord: TypeAlias = Promises
"""Promises of a workload, as declared when it was collected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine: what must agree with a baseline (`device`), and what is reported when it differs."""

    device: str
    """Slug of the device, e.g. "nvidia-h200"; the baseline's file name."""
    device_name: str
    count: int
    cpu: str
    cores: int
    memory_bytes: int
    driver: str | None
    cuda: str | None
    power_limit_w: float | None
    python: str
    torch: str | None
    triton: str | None
    platform: str


class Status(enum.StrEnum):
    """The verdict on one workload."""

    PASS = "PASS"
    UNCHANGED = "UNCHANGED"
    IMPROVED = "IMPROVED"
    NOT_EQUIVALENT = "NOT_EQUIVALENT"
    NOT_PROVEN = "NOT_PROVEN"
    """A proof of the pair failed, so that no time of it means anything."""
    NOT_TIMED = "NOT_TIMED"
    """Its time is not that of its work, or code under test has changed what measures it."""
    BELOW_FLOOR = "BELOW_FLOOR"
    REGRESSED = "REGRESSED"
    NOISY = "NOISY"
    NO_BASELINE = "NO_BASELINE"
    WRONG_MACHINE = "WRONG_MACHINE"
    UNMEASURED = "UNMEASURED"
    WAIVED = "WAIVED"

    @property
    def green(self) -> bool:
        return self in (Status.PASS, Status.UNCHANGED, Status.IMPROVED, Status.WAIVED)

    @property
    def blames_code(self) -> bool:
        """Whether the code under test is at fault, and not the machine, the baseline or the measurement."""
        return self in (
            Status.NOT_EQUIVALENT,
            Status.NOT_PROVEN,
            Status.NOT_TIMED,
            Status.BELOW_FLOOR,
            Status.REGRESSED,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Excuse:
    """The waiver that makes a verdict WAIVED, and the verdict that there would be without it."""

    status: Status
    owner: str
    """Person or team that is responsible for ending it."""
    until: str
    """Last day, ISO 8601."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeChange:
    """Differences in everything that a workload runs since it was accepted."""

    since: str
    """The accepted revision, shortened."""
    files: tuple[str, ...] = ()
    """Its sources that differ, relative to the repository's top folder."""
    commits: tuple[str, ...] = ()
    """Commits since then that changed one of these files, the newest first: short hash and subject."""
    uncommitted: tuple[str, ...] = ()
    """Files of these that differ from the last commit, too."""
    other: str = ""
    """The first difference of another kind: software, environment, data, or a new file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The gate's answer for one workload, in one line (`message`) and in figures.

    `slowdown` is the estimated relative slowdown of the optimized side against what was accepted (0.03 = 3%
    slower), `low` and `high` its 95% interval. `moved` names what moved: "optimized", "reference", "device",
    "software" (both sides, and not the device) or None.
    """

    id: str
    status: Status
    message: str
    slowdown: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    accepted_speedup: float | None = None
    moved: str | None = None
    compared: str = ""
    """Side that the optimized side was compared with, e.g. "the accepted revision 1a2b3c4"; empty where there was
    none."""
    processes: int = 0
    same_code: bool = False
    """Whether it runs exactly the accepted code, so that a slowdown of it has another cause."""
    excuse: Excuse | None = None
    """The waiver that covers it; None unless it is WAIVED."""


PLAIN = frozenset({str, int, float, bool, type(None)})
"""Types of most values of a record, which JSON has, too."""


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def to_json(value: Any) -> Any:
    """Return a record as plain JSON values."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if dataclasses.is_dataclass(kind):
        return {name: to_json(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, enum.Enum):
        return value.value
    return value


def from_json(kind: type[R], data: Any) -> R:
    """Return the record of type `kind` that `to_json` gave. A PerfsuiteError names a field that is missing or wrong."""
    known: Any = kind  # for mypy, a type variable's type is not hashable
    result: R = _reader(known)(data, kind.__name__)
    return result


Reader: TypeAlias = Callable[[Any, str], Any]
"""(JSON value, its name in messages) → the value of a record."""


@cache
def _reader(kind: Any) -> Reader:
    """Return what reads values of a type. It is made once a type, since a history has a hundred thousand records."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return lambda data, where: data
    if origin in (typing.Union, types.UnionType):
        return _optional(typing.get_args(kind))
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind))
    if origin is tuple:
        return _tuple(_reader(typing.get_args(kind)[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _table(_reader(typing.get_args(kind)[1]))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum(kind)
    return _plain(kind)


def _optional(options: tuple[Any, ...]) -> Reader:
    inner = _reader(next(o for o in options if o is not type(None)))
    if type(None) not in options:
        return inner
    return lambda data, where: None if data is None else inner(data, where)


def _tuple(inner: Reader) -> Reader:
    def read(data: Any, where: str) -> Any:
        if not isinstance(data, list):
            raise PerfsuiteError(f"{where} is not a list")
        return tuple([inner(v, where) for v in data])

    return read


def _table(inner: Reader) -> Reader:
    def read(data: Any, where: str) -> Any:
        if not isinstance(data, Mapping):
            raise PerfsuiteError(f"{where} is not a table")
        return {k: inner(v, f"{where}.{k}") for k, v in data.items()}

    return read


def _enum(kind: type[enum.Enum]) -> Reader:
    def read(data: Any, where: str) -> Any:
        try:
            return kind(data)
        except ValueError:
            raise PerfsuiteError(f"{where}: {data!r} is not a {kind.__name__}") from None

    return read


def _plain(kind: Any) -> Reader:
    def read(data: Any, where: str) -> Any:
        if type(data) is kind:
            return data
        if kind is float and isinstance(data, int) and not isinstance(data, bool):
            try:
                return float(data)
            except OverflowError:
                raise PerfsuiteError(f"{where} is an integer too large for a float") from None
        if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
            raise PerfsuiteError(f"{where} is {data!r}, not {kind.__name__}")
        return data

    return read


def _record(kind: type) -> Reader:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    readers = [
        (name, _reader(hints[name]), f.default is missing and f.default_factory is missing)
        for name, f in fields.items()
    ]

    def read(data: Any, where: str) -> Any:
        if not isinstance(data, Mapping):
            raise PerfsuiteError(f"{where} is not a table")
        unknown = data.keys() - fields.keys()
        if unknown:
            raise PerfsuiteError(f"{where} has an unknown field {min(unknown)!r}")
        values = {}
        for name, reader, is_required in readers:
            if name in data:
                values[name] = reader(data[name], f"{where}.{name}")
            elif is_required:
                raise PerfsuiteError(f"{where} lacks {name!r}")
        return kind(**values)

    return read
