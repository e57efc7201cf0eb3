"""Prove or time a workload in one rank, in step with the other ranks."""

from __future__ import annotations

import functools
import secrets
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from perfsuite.correctness import convolutions
from perfsuite.correctness.ranks.group import Phase
from perfsuite.correctness.ranks.process import pair_of, send
from perfsuite.declare.pair import Pair
from perfsuite.records import REFERENCE, Measurement, WorkloadProof
from perfsuite.revisions import revision
from perfsuite.session.rank_timing.check import Judge, Judged, RankCheck
from perfsuite.session.rank_timing.peers import RankPeers
from perfsuite.session.tasks import ALONE, PROVE, Task
from perfsuite.state import process_state
from perfsuite.timing import measuring, sampling, workload_proof
from perfsuite.timing.bench import Bench

FIRST = 0
"""The rank that reports the phases."""


@dataclass(frozen=True, slots=True)
class TimeRequest:
    """Request that all ranks do a task on a workload together."""

    module: str
    path: str
    pair: str
    workload: str
    task: Task
    sys_path: list[str]
    settings: Mapping[str, Any]

    def outcome(self, connection: Connection, rank: int, ranks: int, device: str) -> Any:
        """Do the task in this rank. Return a Proof, a Measurement, or the seconds of the reference in each block."""
        sys.path[:] = self.sys_path
        process_state.take(self.settings)
        return _Timing(self, connection, rank, ranks, device).outcome()


class _Timing:
    def __init__(self, request: TimeRequest, connection: Connection, rank: int, ranks: int, device: str) -> None:
        self.task, self.connection, self.rank, self.device = request.task, connection, rank, device
        found, self.module = pair_of(request.module, request.path, request.pair)
        self.pair, self.home = found.at(ranks), Path(request.path).parent
        self.workload = next(w for w in self.pair.workloads if w.name == request.workload)
        self.peers = RankPeers(rank, ranks, device)
        self.checked_by = functools.partial(RankCheck, ask=self._ask, peers=self.peers)

    def outcome(self) -> Any:
        # A warning inside a timed call concerns the user's code, and must not become an error here.
        with warnings.catch_warnings(), convolutions.exact(self.pair.precision):
            warnings.simplefilter("ignore")
            if self.task.kind == PROVE:
                return self._prove()
            return self._reference_alone() if self.task.kind == ALONE else self._time()

    def _ask(self, judge: Judge) -> Judged:
        send(self.connection, judge)
        answer: Judged = self.connection.recv()
        return answer

    def _report(self, name: str) -> None:
        if self.rank == FIRST:
            send(self.connection, Phase(name))

    def _accepted(self) -> Pair | None:
        if self.task.accepted is None:
            return None
        return revision.load_pair(self.pair, self.module, self.task.accepted).at(self.pair.at_ranks)

    def _bench(self, seed: int | None, accepted: Pair | None) -> Bench:
        return Bench(
            pair=self.pair,
            workload=self.workload,
            device=self.device,
            home=self.home,
            seed=self.peers.same(secrets.randbits(31) if seed is None else seed),
            report=self._report,
            accepted=accepted,
            peers=self.peers,
            checked_by=self.checked_by,
        )

    def _prove(self) -> WorkloadProof:
        task = self.task
        bench = self._bench(task.seed, None if task.same_code else self._accepted())
        return workload_proof.prove(
            bench,
            task.id,
            with_reference=task.reference not in (0, 1),
            same_code=bool(task.same_code),
            with_rivals=task.thorough,
            uncounted=() if task.reference is None or self.workload.clock == "device" else (REFERENCE,),
        )

    def _time(self) -> Measurement:
        task = self.task
        return measuring.measure(
            self.pair,
            self.workload,
            workload_id=task.id,
            device=self.device,
            home=self.home,
            accepted=self._accepted(),
            proof=self._own(task.proof),
            seed=task.seed,
            reference=task.reference,
            blocks=task.blocks or sampling.BLOCKS,
            thorough=task.thorough,
            new_values=task.new_values,
            report=self._report,
            peers=self.peers,
            checked_by=self.checked_by,
        )

    def _own(self, proof: WorkloadProof | None) -> WorkloadProof | None:
        """Return the proof with the digests of this rank only, and without counts if rivals are timed: each rank then
        counts again."""
        if proof is None:
            return None
        own = f"{self.rank} "
        digests = tuple(d.removeprefix(own) for d in proof.digests if d.startswith(own))
        return replace(proof, digests=digests, counts={} if self.task.thorough else proof.counts)

    def _reference_alone(self) -> tuple[float, ...]:
        self._report(REFERENCE)
        counts = self.task.proof.counts.get(REFERENCE) if self.task.proof else None
        return measuring.reference_alone(self._bench(None, None), self.task.clock, counts, lambda: None)
