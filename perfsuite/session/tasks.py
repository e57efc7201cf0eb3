"""Records of the tasks of worker processes, and of their outcomes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

from perfsuite.records import Alone, Measurement, Status, WorkloadProof
from perfsuite.revisions.revision import Tree

PROVE, TIME, ITEMS, ALONE = "prove", "time", "items", "alone"
OUTSIDE = "outside"
"""Name of the items that need a child process, which takes seconds to start."""
OUTSIDE_CHILDREN = 3
"""Number of groups of the `outside` items. For 46 pairs on an H200, one lane runs these items in 185 s, and twelve
lanes run all other items in 90 s."""
START_LIMIT_S = 300.0
"""Time limit in seconds from a worker's start to its first task, for importing torch and the test modules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Outcome of a task without a result, with a one-line reason."""

    status: Status
    message: str
    skipped: bool = False
    case: str = ""
    """The draw on which a proof worked when its process ended."""
    crowded: bool = False
    """Whether the task lacked memory while other processes held much of it. It must be repeated when none of them
    runs."""


NEVER_REACHED = Failure(status=Status.UNMEASURED, message="its measuring process never reached it")
"""Failure of a task that has no outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """Outcome of a correctness item: pytest's own reports of its phases, as JSON."""

    reports: tuple[Any, ...]

    @property
    def seconds(self) -> float:
        """Total seconds of the item's phases."""
        return sum(float(report["duration"]) for report in self.reports)

    @property
    def has_failed(self) -> bool:
        """True if one of the item's phases failed."""
        return any(report["outcome"] == "failed" for report in self.reports)


Outcome: TypeAlias = Measurement | WorkloadProof | Reported | Alone | Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One task of a worker for one item: prove a workload, time it, time its reference alone, or run a correctness
    item."""

    id: str
    kind: str = TIME
    limit_s: float = START_LIMIT_S
    accepted: Tree | None = None
    """Tree of another revision, whose optimized side is timed too."""
    seed: int | None = None
    """Seed of the inputs. None if the proof has it, or if the worker draws one."""
    proof: WorkloadProof | None = None
    awaits_proof: bool = False
    """Whether the process prepares on inputs of `seed` and gets its proof later, as another line."""
    reference: int | None = None
    """Number of blocks in which the reference is timed in one round; None for all rounds."""
    blocks: int | None = None
    """Most blocks; None for the default."""
    note_ran: bool = False
    """Whether a proof records all code and data that the optimized side uses."""
    launched: str = ""
    """Digest of what the optimized side launched when it was accepted. If it is not empty, the worker first traces the
    side, and proves nothing if it launches the same."""
    changed: tuple[str, ...] = ()
    """Sources that differ from the accepted ones. If one is not run only by the optimized side, the workload is proven,
    whatever it launches."""
    same_code: tuple[str, ...] = ()
    """Sources of a workload whose current code is the accepted one. If the proving process has loaded these files, it
    leaves out the accepted side."""
    enough_s: float = 0.0
    """Seconds after which a proof stops a call of the reference that it makes to measure its time; 0 for no such
    call."""
    thorough: bool = True
    """Whether rivals are proven or timed too, and the other clock is used too."""
    new_values: bool = True
    """Whether calls on new values are timed between the blocks."""
    slow: bool = False
    """Whether the reference is slow, so that outputs that are bitwise equal to the accepted side's count as proven."""
    case: str = ""
    """The only draw to prove; empty for all."""
    side: str = ""
    """The only side to call on that draw, "reference" or "optimized"; empty for a proof."""
    left_out: tuple[str, ...] = ()
    """Draws on which the reference faults."""
    crowded: bool = True
    """Whether other processes of this run may hold much of the memory."""
    clock: str = ""
    """Clock on which the reference is timed alone: that of its measurements."""
    alternates: str = ""
    """Path of a socket, over which this process and one of another environment take turns in timing blocks."""
    second: bool = False
    """Whether the other process times first in the first block."""
    summarise: bool = False
    """Whether a proof contains summaries of the inputs and of the float64 truth."""
    outside: bool = False
    """Whether the optimized side is also timed where no test is running."""

    @property
    def group(self) -> str:
        """Group of the task. The tasks of a group share objects that are made once per process: the correctness items
        of a pair share truths, and some of the items that need a child process share the child."""
        if self.kind != ITEMS:
            return self.id
        pair = self.id.rpartition("::")[0]
        return f"{OUTSIDE} {zlib.crc32(pair.encode()) % OUTSIDE_CHILDREN}" if self.needs_child else pair

    @property
    def needs_child(self) -> bool:
        """True if the task calls a side where no test is running."""
        return self.kind == ITEMS and self.id.endswith(f"::{OUTSIDE}")
