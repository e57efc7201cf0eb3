"""Start ranks for a task, compare their outputs with the truth, and combine their results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import torch

from perfsuite.correctness import rule, truths
from perfsuite.correctness.ranks import group, parts
from perfsuite.correctness.ranks import proof as ranks_proof
from perfsuite.correctness.tally import Tally
from perfsuite.declare.pair import Pair
from perfsuite.declare.workload import Workload
from perfsuite.errors import MachineError, NotEquivalent, PairError
from perfsuite.records import OPTIMIZED, Alone, Case, Evidence, Measurement, ProcessGroup, SideRecord, WorkloadProof
from perfsuite.session.rank_timing.check import Judge, Judged
from perfsuite.session.rank_timing.request import TimeRequest
from perfsuite.session.tasks import Task
from perfsuite.state import process_state
from perfsuite.system import machine

VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "TORCH_SYMM_MEM_")
"""Prefixes of environment variables that affect how ranks communicate."""


class RankTiming:
    """One task on one workload, done by a group of ranks that is started for it alone."""

    def __init__(
        self, pair: Pair, workload: Workload, module: ModuleType, device: str, report: Callable[[str], None]
    ) -> None:
        self.pair, self.workload, self.module, self.device = pair.at(workload.ranks), workload, module, device
        self.home = Path(str(module.__file__)).parent
        self.report = report
        self.timed = replace(self.pair, steps=(1, 2)) if pair.is_stateful else self.pair
        self.tally: Tally | None = Tally(draws=1)
        """Tally of the errors of the optimized side's first outputs; None once they are counted."""
        self.evidence: Evidence | None = None
        self.seed: int | None = None
        """Seed of the workload's own case; None: that of the first case to compare."""
        self.own: truths.TruthFunction | None = None

    def prove(self, task: Task) -> WorkloadProof:
        """Return the proof of the outputs of all ranks."""
        proofs: list[WorkloadProof] = self._in_ranks(task)
        digests = tuple(f"{rank} {d}" for rank, proof in enumerate(proofs) for d in proof.digests)
        return replace(proofs[0], digests=digests, evidence=self.evidence)

    def measure(self, task: Task) -> Measurement:
        """Return the measurement. The time of a call is that of the slowest rank."""
        found: list[Measurement] = self._in_ranks(task)
        return replace(
            found[0],
            sides={name: _most([m.sides[name] for m in found]) for name in found[0].sides},
            evidence=task.proof.evidence if task.proof else self.evidence,
            group=self._group(found),
        )

    def reference_alone(self, task: Task, seconds: Callable[[], float]) -> Alone:
        """Return the reference's times, without calling another side. `seconds` returns how long the task took."""
        blocks: list[tuple[float, ...]] = self._in_ranks(task)
        return Alone(id=task.id, blocks_s=blocks[0], seconds=seconds())

    def _in_ranks(self, task: Task) -> list[Any]:
        """Do the task in all ranks, and return their results. Raises MachineError if this machine cannot run them."""
        lacking = group.lacking(self.workload.ranks, self.device)
        if lacking:
            raise MachineError(lacking)
        self.seed = task.proof.seed if task.proof else task.seed
        request = TimeRequest(
            module=self.module.__name__,
            path=str(self.module.__file__),
            pair=str(self.pair.name),
            workload=self.workload.name,
            task=task,
            sys_path=list(sys.path),
            settings=process_state.sendable_settings(),
        )
        ranks = group.Group(self.workload.ranks, self.device, blocking=False)
        ranks.on_phase = self.report
        try:
            return ranks.converse(request, self._judged, task.limit_s)
        finally:
            ranks.close()

    def _judged(self, asked: Sequence[Judge]) -> Judged:
        """Compare the outputs of all ranks with the truth of the case."""
        judge = asked[0]
        began = perf_counter()
        known = self._known(judge.case)
        try:
            truth = known(rule.NONE)
        except truths.Discard:
            if judge.case.seed != self.seed:  # only the new values overflow: skip them
                return Judged(text="", truth_s=0.0)
            raise PairError(truths.overflows(self.pair)) from None
        took = perf_counter() - began
        tally = self.tally if judge.name == OPTIMIZED else None
        outputs = [parts.placed_as(one.leaves, truth.leaves, self.device) for one in asked]
        try:
            ranks_proof.hold(self.timed, known, outputs, truth, judge.name, tally)
        except NotEquivalent as error:
            return Judged(text=str(error), truth_s=took)
        if tally is not None:
            self.tally = None
            self.evidence = tally.evidence(self.timed, judge.case.dtype, self.device)
        return Judged(text="", truth_s=took)

    def _known(self, case: Case) -> truths.TruthFunction:
        """Return the truth of the case. That of the workload's own case is kept."""
        self.seed = case.seed if self.seed is None else self.seed
        if case.seed != self.seed:
            return truths.by_replicas(self.timed, case, self.device, most=rule.FEW, gradients=False, home=self.home)
        if self.own is None:
            self.own = truths.by_replicas(self.timed, case, self.device, gradients=False, home=self.home)
        return self.own

    def _group(self, found: Sequence[Measurement]) -> ProcessGroup:
        nccl = self.device == "cuda"
        return ProcessGroup(
            ranks=self.workload.ranks,
            backend="nccl" if nccl else "gloo",
            version=".".join(map(str, torch.cuda.nccl.version())) if nccl else "",
            variables={k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
            links=machine.links(self.workload.ranks) if nccl else {},
            by_rank=tuple(counts for m in found if m.group is not None for counts in m.group.by_rank),
        )


def _most(sides: Sequence[SideRecord]) -> SideRecord:
    """Return the record of rank 0, with the peak memory of the rank that used most."""
    peaks = [side.peak_bytes for side in sides if side.peak_bytes is not None]
    return replace(sides[0], peak_bytes=max(peaks, default=None))
