"""Prove and time one workload in this process, and return a `Measurement`.

Nothing is timed before the outputs of every side have been proven on the inputs that are timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from perfsuite.declare.pair import Pair
from perfsuite.declare.workload import Workload
from perfsuite.errors import PairError
from perfsuite.records import (
    OPTIMIZED,
    REFERENCE,
    Condition,
    Counts,
    Limit,
    Measurement,
    ProcessGroup,
    SideRecord,
    WorkloadProof,
)
from perfsuite.system import tamper
from perfsuite.timing import control_kernels, roofline, timing_checks
from perfsuite.timing.alternation import Alternation
from perfsuite.timing.bench import WAITING, Bench, Report
from perfsuite.timing.block_checks import Watch, check_timed, judge_copied
from perfsuite.timing.output_checks import OutputCheck
from perfsuite.timing.peers import ALONE, Peers
from perfsuite.timing.preparation import Preparation
from perfsuite.timing.runner import Runner
from perfsuite.timing.sampling import BLOCKS, Sampler

RIVAL_BLOCKS, RIVAL_ROUNDS = 2, 4
"""Blocks and ABBA rounds for rivals. They are timed against the optimized side afterwards, because the gated figures
must not depend on which rivals exist."""
ALONE_BLOCKS = 4
"""Blocks of a reference that is timed alone. A slowdown by a sixth is visible in fewer blocks than the gate's rule
needs."""
WAITS = "waits for the device within a call, in the driver perhaps, so that it has no time on the device clock"


def measure(
    pair: Pair,
    workload: Workload,
    *,
    workload_id: str,
    device: str,
    home: Path | None = None,
    accepted: Pair | None = None,
    proof: WorkloadProof | None = None,
    wait_for_proof: Callable[[], WorkloadProof] | None = None,
    reference: int | None = None,
    blocks: int = BLOCKS,
    thorough: bool = True,
    new_values: bool = True,
    seed: int | None = None,
    report: Report = lambda phase: None,
    alone: Callable[[], bool] = lambda: False,
    beside: Callable[[], bool] = lambda: False,
    peers: Peers = ALONE,
    checked_by: Callable[..., OutputCheck] = OutputCheck,
    turns: Alternation | None = None,
) -> Measurement:
    """Time one workload's sides against each other.

    proof           earlier proof, whose inputs are drawn again; only outputs that differ from its outputs are proven
                    again. Without one, every side is proven first, on inputs of `seed`, and calls are counted
    wait_for_proof  waits until another process has finished a proof on inputs of `seed`, and returns it; called after
                    the warm-up
    reference       limits the reference to one round in each of this number of blocks; 0 leaves it out
    blocks          most blocks
    thorough        time rivals and the other clock too. Without it, or with a limit by `reference`, the reference's
                    launches are not counted on the wall clock
    new_values      give the sides new values between the blocks. With it or `thorough`, the optimized side is compared
                    with the device's limit. A workload's first process does both
    seed            random unless given
    report          receives the name of the side that is about to run, so that a crash or a hang can be attributed
    alone           called before any side is timed; returns when no other process uses the device
    beside          called after all sides are timed, when other processes may use the device again. Both functions
                    return whether other processes may use it
    peers           processes that time the workload together with this one
    checked_by      makes the object that compares outputs with the truth
    turns           makes blocks alternate with those of a process in another environment

    Raises NotEquivalent if a side is not the same function, and PairError if the workload cannot be timed as declared.
    """
    began = perf_counter()
    chosen = proof.seed if proof else peers.bits(31) if seed is None else seed
    bench = Bench(
        pair=pair,
        workload=workload,
        device=device,
        home=home,
        seed=chosen,
        report=report,
        accepted=accepted,
        peers=peers,
        checked_by=checked_by,
    )
    prepared = Preparation(bench, proof, wait_for_proof, reference, thorough, new_values, alone)
    with bench.released():
        prepared.run(blocks)
        session = Session(prepared, beside, turns)
        session.run(blocks)
        return session.record(workload_id, perf_counter() - began - bench.phases.seconds.get(WAITING, 0.0))


class Session:
    """One measurement from the prepared sides to the record."""

    def __init__(self, prepared: Preparation, beside: Callable[[], bool], turns: Alternation | None) -> None:
        self.prepared, self.bench, self.beside, self.turns = prepared, prepared.bench, beside, turns
        self.condition = Condition()
        self.anchors: dict[str, float] = {}
        self.limit: Limit | None = None
        self.other: dict[str, float | None] = {}
        self.asked = False
        """Whether `_on_device` has been called before."""

    def run(self, blocks: int) -> None:
        """Time the sides, and check for faults that only the timed calls show."""
        prepared, bench, phases = self.prepared, self.bench, self.bench.phases
        gated = {n: r for n, r in prepared.runners.items() if n in prepared.timed}
        self.sampler = self._sampler(gated, sparse={REFERENCE: prepared.reference} if prepared.reference else None)
        with phases.time("timing"):
            self._plan(blocks)
            proven = prepared.proof is not None
            watch = Watch(self.sampler, prepared.check, bench.l2_bytes, values=prepared.values, proven_before=proven)
            self.condition = self._timed(watch.between)
        phases.part("timing", {"allocation": self.sampler.allocated_s, "checks": self.sampler.between_s})
        for name in sorted(set(prepared.clock.waiting) & set(gated)):
            where = f"{bench.pair.name}, workload {bench.workload.name!r}"
            raise PairError(f"{where}: the {name} side {WAITS}; say clock='wall'")
        watch.conclude()
        with phases.time("control kernels"):
            self.anchors = control_kernels.measure(bench.device)
        rivals = {n: r for n, r in prepared.runners.items() if n in prepared.rivals and n not in prepared.skipped}
        if rivals:
            with phases.time("rivals"):
                self._time_rivals(rivals)
        with phases.time("limit"):
            self._compare_with_limit()
        tamper.check()
        bench.waited(self.beside)
        with phases.time("checks"):
            bench.report(REFERENCE)
            judge_copied(prepared.check)
        tamper.check()

    def _sampler(self, runners: dict[str, Runner], sparse: Mapping[str, int] | None = None) -> Sampler:
        return Sampler(
            runners,
            {n: self.bench.master(n) for n in runners},
            self.prepared.clock,
            self.prepared.kind,
            self.prepared.counts,
            self.prepared.rng,
            self.bench.report,
            repeat=self.bench.workload.repeat,
            sparse=sparse,
        )

    def _plan(self, blocks: int) -> None:
        sampler = self.sampler

        def plan() -> int:
            sampler.plan(blocks)
            return sampler.blocks

        sampler.blocks = plan() if self.turns is None else self.turns.planned(plan)

    def _timed(self, between: Callable[[int], None]) -> Condition:
        turns, blocks = self.turns, self.sampler.blocks
        if turns is None:
            return self.sampler.run(between)

        def ended(block: int) -> None:
            between(block)
            turns.ended(block, last=block + 1 == blocks)

        turns.begin()
        return self.sampler.run(ended)

    def _time_rivals(self, rivals: dict[str, Runner]) -> None:
        prepared = self.prepared
        beside = self._sampler({OPTIMIZED: prepared.runners[OPTIMIZED], **rivals})
        beside.plan(RIVAL_BLOCKS, RIVAL_ROUNDS)
        beside.run()
        prepared.skipped |= beside.compiling()
        prepared.skipped |= dict.fromkeys(set(prepared.clock.waiting) & set(rivals), WAITS)
        self.sampler.add(beside)
        for name in prepared.skipped:
            self.sampler.runners.pop(name, None)
        if not self.bench.pair.is_stateful:
            still = {n: r for n, r in beside.runners.items() if n not in prepared.skipped}
            check_timed(prepared.check, still, beside)

    def _compare_with_limit(self) -> None:
        """Measure the sides on the other clock, and compare the optimized side with the device's limit."""
        if self.prepared.thorough:
            self.other = {n: self.sampler.other_clock(n) for n in self.sampler.runners}
        # Not in every process, because measuring the device's ceilings takes 0.1 s.
        self.limit = self._limit() if self.prepared.new_values or self.prepared.thorough else None
        if self.limit is not None:
            where = f"{self.bench.pair.name}: the optimized side"
            self.limit = timing_checks.floor(self.limit, self._limit_again, self._on_device, self.bench.device, where)

    def _limit(self) -> Limit | None:
        found = roofline.limit(self.bench.pair, self.bench.workload, self.bench.case.dtype, self.bench.device)
        return self.bench.peers.same(found)

    def _limit_again(self) -> Limit | None:
        roofline.forget()
        return self._limit()

    def _on_device(self) -> float:
        """Return the seconds of a call of the optimized side, on the device clock if they are known. From the second
        call on, sample them again."""
        known = self.other.get(OPTIMIZED) if self.prepared.kind == "wall" else None
        if self.asked:
            return (self.sampler.other_clock(OPTIMIZED) if known else None) or self.sampler.sample(OPTIMIZED)
        self.asked = True
        return known or self.sampler.median(OPTIMIZED) or math.inf

    def record(self, workload_id: str, seconds: float) -> Measurement:
        """Return the measurement."""
        prepared, bench, sampler = self.prepared, self.bench, self.sampler
        workload = bench.workload
        sides = {n: self._side(n, r) for n, r in sampler.runners.items()}
        ratios = {n: tuple(v) for n, v in sampler.log_ratios.items() if n in sampler.runners}
        few = {n for n in sampler.few if n in sampler.runners}
        if prepared.long is not None:
            took, ours = prepared.long.seconds, sampler.median(OPTIMIZED) or math.inf
            sides[REFERENCE] = SideRecord(
                device_s=None,
                wall_s=took,
                blocks_s=(took,),
                peak_bytes=prepared.long.peak_bytes,
                host_syncs=None,
                launches=None,
            )
            ratios[REFERENCE] = (math.log(took / ours),)
            few.add(REFERENCE)
        return Measurement(
            id=workload_id,
            pair=bench.pair.name,
            workload=workload.name,
            device=bench.device,
            clock=prepared.kind,
            direction=workload.direction,
            dtype=bench.case.dtype,
            sizes=workload.described,
            seed=bench.seed,
            sides=sides,
            log_ratios=ratios,
            few=tuple(sorted(few)),
            at_least=(REFERENCE,) if prepared.long is not None and prepared.long.stopped else (),
            skipped=prepared.skipped,
            limit=self.limit,
            items=bench.pair.cost.items_of(workload.sizes, workload.direction) if bench.pair.cost else 0.0,
            unit=bench.pair.cost.unit if bench.pair.cost else "items",
            condition=self.condition,
            anchors=self.anchors,
            seconds=seconds,
            phases=bench.phases.seconds,
            evidence=prepared.evidence,
            group=self._group(),
        )

    def _group(self) -> ProcessGroup | None:
        """Return the counts of a call of each side in this process, if several processes call the sides together; else
        None."""
        ranks = self.bench.workload.ranks
        if ranks == 1:
            return None
        here = {
            name: replace(
                self.bench.counted_here.get(name, Counts()), peak_bytes=runner.last.peak_bytes if runner.last else None
            )
            for name, runner in self.sampler.runners.items()
        }
        return ProcessGroup(ranks=ranks, backend="", by_rank=(here,))

    def _side(self, name: str, runner: Runner) -> SideRecord:
        counts = self.prepared.counts.get(name, Counts())
        median = self.sampler.median(name)
        return SideRecord(
            device_s=median if self.prepared.kind == "device" else self.other.get(name),
            wall_s=median if self.prepared.kind == "wall" else self.other.get(name),
            blocks_s=tuple(self.sampler.blocks_s[name]),
            peak_bytes=runner.last.peak_bytes if runner.last else None,
            host_syncs=counts.host_syncs,
            launches=counts.launches,
        )


def reference_alone(bench: Bench, kind: str, counts: Counts | None, alone: Callable[[], object]) -> tuple[float, ...]:
    """Return the seconds of a call of the reference in each block, without calls of other sides.

    `kind` is the clock. `counts` are the reference's own, which limit how many calls the clock may queue. `alone` is
    called before anything is timed, and waits until no other process uses the device.
    """
    clock, rng = bench.clock(), bench.rng()
    # The sampler compares with the optimized side, so the reference is passed under that name.
    runner = bench.runner(REFERENCE, bench.sides[REFERENCE])
    with bench.released():
        bench.warm_up({REFERENCE: runner}, clock, rng)
        alone()
        sampler = Sampler(
            {OPTIMIZED: runner},
            {OPTIMIZED: bench.master(REFERENCE)},
            clock,
            kind,
            {OPTIMIZED: counts} if counts is not None else {},
            rng,
            bench.report,
            repeat=bench.workload.repeat,
        )
        sampler.plan(ALONE_BLOCKS)
        sampler.run()
    return tuple(sampler.blocks_s[OPTIMIZED])
