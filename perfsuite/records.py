"""Frozen records that are passed between stages. They contain no tensors and serialise to JSON."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from perfsuite.declare.workload import Promises

REFERENCE, OPTIMIZED, ACCEPTED = "reference", "optimized", "accepted"
"""Names of the sides in every record."""


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
    """Most steps of a stateful pair; None for all steps that the pair declares."""


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
    """Largest error, as a fraction of its budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRecord:
    """Record of one side of one workload in one process. Times are median seconds per call over the process."""

    device_s: float | None
    wall_s: float | None
    blocks_s: tuple[float, ...]
    """Median seconds a call in each block, on the workload's clock."""
    peak_bytes: int | None
    host_syncs: int | None
    launches: int | None


COPY, MATMUL, LAUNCH = "copy", "matmul", "launch"
"""Names of the control kernels in a measurement."""


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
    """State of the device during a measurement."""

    sm_clock_mhz: float | None = None
    sm_clock_min_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttle: tuple[str, ...] = ()
    set_aside: int = 0
    """ABBA rounds discarded because the device throttled while they ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts of one call of a side; None if they cannot be counted."""

    host_syncs: int | None = None
    launches: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGroup:
    """Processes of torch.distributed that called a workload's sides together."""

    ranks: int
    backend: str
    """"nccl" or "gloo"."""
    version: str = ""
    """Version of NCCL; empty for gloo."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables that affect NCCL, gloo and torch's use of them."""
    links: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Connection of the devices of two ranks, as {"0-1": "NVLink"}."""
    by_rank: tuple[Mapping[str, Counts], ...] = ()
    """Counts of a call of each side, for each rank."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Measurement:
    """Measurement of one workload in one process.

    `log_ratios[other]` has one value per block: the median over its ABBA rounds of log(time of `other` / time of
    `optimized`). A positive value means that `optimized` is faster. Keys are "reference", each rival, and "accepted",
    the optimized side of the accepted revision.
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
    """Sides that are too slow to repeat and were sampled only a few times."""
    at_least: tuple[str, ...] = ()
    """Sides whose only call was stopped after a time limit, so that their seconds are a lower bound."""
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Rivals that were not timed, each with the reason."""
    limit: Limit | None = None
    items: float = 0.0
    """Items that a call processes, as declared by the pair's `Cost`; 0 if it declares none."""
    unit: str = "items"
    condition: Condition = Condition()
    anchors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of each control kernel (timing/control_kernels.py), timed with this workload."""
    seconds: float = 0.0
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of each phase of this measurement, by name: "inputs", "proof", "warm-up", "timing" and others."""
    evidence: Evidence | None = None
    group: ProcessGroup | None = None
    """Processes that called the sides together; None for one process."""

    @property
    def speedup(self) -> float | None:
        """Speedup of the optimized side over the reference: the median over blocks.

        None if the reference was not timed.
        """
        blocks = self.log_ratios.get(REFERENCE)
        return math.exp(statistics.median(blocks)) if blocks else None

    @property
    def throughput(self) -> float | None:
        """Items per second of the optimized side, by its median block; None if no items are declared."""
        ours = self.sides.get(OPTIMIZED)
        return self.items / statistics.median(ours.blocks_s) if self.items and ours and ours.blocks_s else None

    def __repr__(self) -> str:
        ours = self.sides.get(OPTIMIZED)
        seconds = f", {statistics.median(ours.blocks_s):.3g} s a call" if ours and ours.blocks_s else ""
        faster = f", {self.speedup:.3g} times as fast as the reference" if self.speedup is not None else ""
        return f"<{type(self).__name__} of {self.id} on {self.device}{seconds}{faster}>"


def complete(measurements: Iterable[Measurement], side: str) -> tuple[list[Measurement], bool]:
    """Return (measurements, whether all are lower bounds). The measurements are those in which the side ran to its end,
    or all that timed it if it did so in none."""
    timed = [m for m in measurements if side in m.sides]
    whole = [m for m in timed if side not in m.at_least]
    return whole or timed, bool(timed) and not whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """Digests of all code and data that a workload used (digests.py). Paths are relative to the repository's top
    folder, also those outside it."""

    sources: Mapping[str, str]
    data: Mapping[str, str] = dataclasses.field(default_factory=dict)
    surroundings: str = ""
    variables: Mapping[str, str] | None = None
    """Environment variables that are part of `surroundings`; None if they were not recorded."""
    packages: tuple[str, ...] | None = None
    """Packages that are part of `surroundings`, as `name==version` or `name==version#build`; None if they were not
    recorded."""
    settings: Mapping[str, str] | None = None
    """pytest's settings that may affect the run; None if they were not recorded."""
    launched: str = ""
    """Digest of what the workload launched on the device (timing/launch_digest.py); empty if it cannot be observed
    completely."""
    untraced: str = ""
    """Reason why `launched` is empty."""
    unknown: str = ""
    """Reason why it cannot be known what the workload ran; empty if it can."""


INPUT = "input "
"""Prefix of the names of inputs among a proof's summaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadProof:
    """Proof that one workload's sides are equal on the inputs of `seed`. Later processes need not prove it again."""

    id: str
    seed: int
    evidence: Evidence | None = None
    digests: tuple[str, ...] = ()
    """Digests of the bits of the proven outputs."""
    counts: Mapping[str, Counts] = dataclasses.field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    """Rivals whose outputs were proven too."""
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Rivals that cannot be timed, each with the reason."""
    unloaded: str = ""
    """Reason why the accepted side cannot be compared; empty if it can, or if there is none."""
    ran: Ran | None = None
    """Record of what the optimized side ran, if it was requested."""
    same_launches: bool = False
    """Whether a trace showed that the optimized side launches what was accepted. Then nothing was proven."""
    truth_s: float = 0.0
    """Seconds of computing the float64 truth, while other processes ran; 0 if it was not needed."""
    reference_s: float | None = None
    """Seconds of one call of the reference, while other processes ran; None if it was not requested."""
    reference_stopped: bool = False
    """Whether that call was stopped, because it had already taken long enough to show the promise."""
    summaries: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    """Summaries of the inputs and of the float64 truth (`truth_summaries`), if they were requested."""
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """Times of a workload's sides in separate processes: the reference in a process where no code of the optimized side
    has run, the optimized side in one where no test is running."""

    id: str
    blocks_s: tuple[float, ...]
    """Median seconds a call of the reference, by block."""
    outside_s: float | None = None
    """Wall-clock seconds of a call of the optimized side; None if they were not requested or cannot be measured."""
    seconds: float = 0.0


PromiseRecord: TypeAlias = Promises
"""Promises of a workload, as declared when it was collected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Description of a machine. Some fields must agree with a baseline; the others are reported if they differ
    (`baseline.compare_machines`)."""

    device: str
    """Slug of the device, e.g. "nvidia-h200", which is also the baseline's file name."""
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
    """Kind of verdict on a workload."""

    PASS = "PASS"
    UNCHANGED = "UNCHANGED"
    IMPROVED = "IMPROVED"
    NOT_EQUIVALENT = "NOT_EQUIVALENT"
    NOT_PROVEN = "NOT_PROVEN"
    """A proof of the pair failed, so its times are meaningless."""
    NOT_TIMED = "NOT_TIMED"
    """The time is not that of the function's work, or code under test has tampered with the measurement."""
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
        """True if the code under test is at fault, and not the machine, the baseline or the measurement."""
        return self in (
            Status.NOT_EQUIVALENT,
            Status.NOT_PROVEN,
            Status.NOT_TIMED,
            Status.BELOW_FLOOR,
            Status.REGRESSED,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Excuse:
    """Waiver that makes a verdict WAIVED, with the status that the verdict would have without it."""

    status: Status
    owner: str
    """Person or team that is responsible for ending it."""
    until: str
    """Last day, ISO 8601."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeChange:
    """Changes of the code, data and software of a workload since it was accepted."""

    since: str
    """The accepted revision, shortened."""
    files: tuple[str, ...] = ()
    """Sources that differ, relative to the repository's top folder."""
    commits: tuple[str, ...] = ()
    """Commits since the acceptance that changed one of these files, newest first: short hash and subject."""
    uncommitted: tuple[str, ...] = ()
    """Files among these that also differ from the last commit."""
    other: str = ""
    """First difference of another kind: software, environment, data, or a new file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The gate's verdict on one workload, in one line (`message`) and in figures.

    `slowdown` is the estimated relative slowdown of the optimized side against the accepted one (0.03 = 3% slower), and
    `low` and `high` are its 95% interval. `moved` is the cause of a change: "optimized", "reference", "device",
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
    """Revision with which the optimized side was compared, e.g. "the accepted revision 1a2b3c4"; empty if none."""
    processes: int = 0
    same_code: bool = False
    """Whether the workload runs exactly the accepted code, so that a slowdown has another cause."""
    excuse: Excuse | None = None
    """Waiver that applies to the verdict; None unless the status is WAIVED."""
