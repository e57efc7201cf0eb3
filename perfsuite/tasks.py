"""Tasks of worker processes, and their outcomes, as records."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

from perfsuite.records import Alone, Measurement, Proof, Status
from perfsuite.revision import Tree

PROVE, TIME, ITEMS, ALONE = "prove", "time", "items", "alone"
OUTSIDE = "outside"
"""The name of the items that need a child process, which takes seconds to start."""
OUTSIDE_CHILDREN = 3
"""Groups of the `outside` items. For 46 pairs on an H200, one lane does these items in 185 s, and twelve lanes do all
other items together in 90 s."""
START_LIMIT_S = 300.0
"""Seconds from a worker's start to its first task: importing torch and the test modules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a task has no result, in one line."""

    status: Status
    message: str
    skipped: bool = False
    case: str = ""
    """The draw that a proof was at when its process ended."""
    crowded: bool = False
    """Whether the task lacked memory while other processes held much of it: it is to be done again once none of them
    runs."""


NEVER_REACHED = Failure(status=Status.UNMEASURED, message="its measuring process never reached it")
"""The failure of a task that has no outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """Outcome of a correctness item: pytest's own reports of its phases, as JSON."""

    reports: tuple[Any, ...]

    @property
    def seconds(self) -> float:
        """Seconds that its phases took."""
        return sum(float(report["duration"]) for report in self.reports)

    @property
    def has_failed(self) -> bool:
        """Whether a phase of it failed."""
        return any(report["outcome"] == "failed" for report in self.reports)


Outcome: TypeAlias = Measurement | Proof | Reported | Alone | Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One thing that a worker is to do with one item: prove a workload, time it or its reference alone, or run a
    correctness item."""

    id: str
    kind: str = TIME
    limit_s: float = START_LIMIT_S
    accepted: Tree | None = None
    """The tree of the revision whose optimized side joins."""
    seed: int | None = None
    """The seed of the inputs. None: the proof has it, or the worker draws one."""
    proof: Proof | None = None
    awaits_proof: bool = False
    """The process prepares on inputs of `seed`. It gets its proof later, as another line."""
    reference: int | None = None
    """Number of blocks in which the reference joins one round; None for all rounds."""
    blocks: int | None = None
    """Most blocks; None for as many as usual."""
    note_ran: bool = False
    """While proving, note everything that the optimized side runs."""
    launched: str = ""
    """Digest of what the optimized side launched when it was accepted. With one, the worker traces the side first, and
    proves nothing if it launches the same."""
    changed: tuple[str, ...] = ()
    """The sources that differ from the accepted ones. Each must be one that only the optimized side runs, or the
    workload is proven whatever it launches."""
    same_code: tuple[str, ...] = ()
    """The sources of a workload whose current code is the accepted one. If the process that proves has loaded these
    files, it leaves the accepted side out."""
    enough_s: float = 0.0
    """While proving, call the reference once, until it has taken this many seconds; 0 if it is not called for that."""
    thorough: bool = True
    """Prove or time rivals, too, and time on the other clock."""
    new_values: bool = True
    """Between the blocks, time calls on new values."""
    slow: bool = False
    """The reference is slow: outputs that are the accepted side's, bit for bit, are proven by that."""
    case: str = ""
    """Prove this draw alone."""
    side: str = ""
    """Only call this side, "reference" or "optimized", on the draw."""
    left_out: tuple[str, ...] = ()
    """Draws on which the reference faults."""
    crowded: bool = True
    """Other processes of this run may hold much of the memory."""
    clock: str = ""
    """The clock that the reference is timed on alone: that of its measurements."""
    alternates: str = ""
    """Time block by block, in turns with a process of another environment, over a socket at this path."""
    second: bool = False
    """Then that process times the first block first."""
    outside: bool = False
    """Then also time the optimized side where no test is running."""

    @property
    def group(self) -> str:
        """Tasks of one group share what is made once a process: the correctness items of a pair, their truths; a part
        of the items that call a side where no test is running, the child that does it."""
        if self.kind != ITEMS:
            return self.id
        pair = self.id.rpartition("::")[0]
        return f"{OUTSIDE} {zlib.crc32(pair.encode()) % OUTSIDE_CHILDREN}" if self.needs_child else pair

    @property
    def needs_child(self) -> bool:
        """Whether the task calls a side where no test is running."""
        return self.kind == ITEMS and self.id.endswith(f"::{OUTSIDE}")
