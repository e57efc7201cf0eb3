"""Prove and time one workload in this process → a `Measurement`; or prove it ahead of the processes that time it.

Nothing is timed before the outputs of every side, on the very inputs timed, have been proven.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from perfsuite import anchors, ceilings, execution, guard, launches, scrutiny
from perfsuite import inputs as make
from perfsuite.alternation import Alternation
from perfsuite.clocks import CudaClock, clock_for
from perfsuite.counting import COUNTED_S, count_calls
from perfsuite.cutoff import cut_off
from perfsuite.errors import NotEquivalent, PairError, RevisionError
from perfsuite.pair import Pair, Side, Workload, as_side
from perfsuite.peers import ALONE, Peers
from perfsuite.proving import COPIED_BYTES, NO_MEMORY, OutputCheck, digest, prove_sides, unequal
from perfsuite.records import (
    ACCEPTED,
    OPTIMIZED,
    REFERENCE,
    Case,
    Condition,
    Counts,
    Evidence,
    Limit,
    Measurement,
    ProcessGroup,
    Proof,
    SideRecord,
)
from perfsuite.runner import LONG_S, Call, Clock, Runner
from perfsuite.sampling import BLOCKS, Sampler
from perfsuite.watching import FRESH_BLOCKS, NewValues, Watch, check_timed, drawn_anew, judge_copied, prove_new

RIVAL_BLOCKS, RIVAL_ROUNDS = 2, 4
"""Blocks and ABBA rounds for rivals. They are timed against the optimized side afterwards, because what is gated must
not depend on which rivals there are."""
ALONE_BLOCKS = 4
"""Blocks of a reference that is timed alone: one that is slowed by a sixth shows in fewer blocks than the rule
needs."""
NEW_VALUES_S = 2.0
"""Seconds above which a truth is established on one draw only."""
SLOW_TRUTH_S = 5.0
"""Seconds of establishing a truth above which the reference may take more than LONG_S a call."""
COLD_S = 2.0
"""Seconds of a reference's first call in a process that may be start-up: loading libraries, creating handles,
autotuning. They do not count where the call is stopped."""
RECOUNTS = 3
"""Most further counts of both sides. More syncs or launches than accepted are red, but some calls differ by chance: one
may have to wait for the call before it. The gate compares the fewest of the optimized side with the most of the
accepted one."""
WAITING = "waiting"
"""The phase in which other processes have the device; the seconds of a measurement exclude it."""
WAITS = "waits for the device within a call, in the driver perhaps, so that it has no time on the device clock"

Report = Callable[[str], None]


@dataclass(slots=True)
class Phases:
    """Seconds of each phase of a measurement."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to the phase `name`."""
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - began

    def part(self, whole: str, parts: Mapping[str, float]) -> None:
        """Subtract these parts, which were measured inside a phase, from it."""
        self.seconds[whole] -= sum(parts.values())
        self.seconds |= parts


@dataclass(slots=True)
class Bench:
    """One workload, ready to be proven and timed: its sides with the inputs of each.

    `accepted` is the same pair as another revision declares it; its optimized side joins the two.
    """

    pair: Pair
    workload: Workload
    device: str
    home: Path | None
    seed: int
    report: Report
    accepted: Pair | None = None
    phases: Phases = field(default_factory=Phases)
    peers: Peers = ALONE
    """The other processes that time the workload with this one."""
    checked_by: Callable[..., OutputCheck] = OutputCheck
    l2_bytes: int | None = None
    case: Case = field(init=False)
    timed: Pair = field(init=False)
    sides: dict[str, Side] = field(init=False)
    masters: dict[str, dict[str, Any]] = field(init=False)
    step_master: dict[str, Any] = field(default_factory=dict, init=False)
    counted_here: dict[str, Counts] = field(default_factory=dict, init=False)
    """The cost of a call of each side in this process."""
    made: list[Runner] = field(default_factory=list, init=False)
    """The runners since the last `released`."""

    def __post_init__(self) -> None:
        guard.check()
        self.l2_bytes = scrutiny.persisting_l2_bytes()  # before any side has run
        execution.forget_compiled()
        gc.collect()  # an earlier workload's tensors may hang in reference cycles
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()
        pair = self.pair
        self.case = make.workload_case(self.workload, self.workload.dtype or pair.dtypes[0], self.seed)
        self.timed = replace(pair, steps=(1, 2)) if pair.is_stateful else pair
        self.sides = {REFERENCE: as_side(pair.reference), OPTIMIZED: as_side(pair.optimized)}
        with self.phases.time("inputs"):
            master = self.peers.part(pair.inputs, make.build(pair, self.case, self.device, home=self.home))
            if pair.is_stateful:
                whole = make.build_step(pair, self.case, self.device, 1)
                self.step_master = self.peers.part(pair.step_inputs, whole)
            self.masters = {REFERENCE: master, OPTIMIZED: master}
            if self.accepted is not None:
                self.sides[ACCEPTED] = as_side(self.accepted.optimized)
                self.masters[ACCEPTED] = self._inputs_of(self.accepted, master)

    def _inputs_of(self, accepted: Pair, master: dict[str, Any]) -> dict[str, Any]:
        now = [*self.pair.inputs, *self.pair.step_inputs]
        before = [*accepted.inputs, *accepted.step_inputs]
        if now != before:
            raise RevisionError(f"its inputs were {', '.join(before)} at that revision, now {', '.join(now)}")
        return make.with_objects_of(accepted, master, self.case, self.device, home=self.home)

    @property
    def gradients(self) -> bool:
        return self.workload.direction != "forward"

    def rivals(self) -> tuple[dict[str, Side], dict[str, str]]:
        """Return (the pair's rivals that this machine can run, the others with the reason)."""
        every = {n: as_side(s) for n, s in self.pair.rivals.items()}
        skipped = {n: r for n, s in every.items() if (r := execution.unavailable(s, self.device))}
        return {n: s for n, s in every.items() if n not in skipped}, skipped

    def check(self) -> OutputCheck:
        """Return a check of the sides' outputs against the float64 truth."""
        return self.checked_by(
            self.timed,
            self.case,
            self.masters[OPTIMIZED],
            self.device,
            gradients=self.gradients,
            home=self.home,
        )

    def clock(self) -> Clock:
        """Return a new clock of the device."""
        return clock_for(self.device, self.peers)

    def rng(self) -> random.Random:
        """Return a new source of random orders, the same in all processes that time the workload together."""
        return random.Random(self.peers.bits(64))

    def runner(self, name: str, side: Side) -> Runner:
        """Return a runner of the side on its own copy of the inputs."""
        made = Runner(
            name=name,
            side=side,
            pair=self.pair,
            case=self.case,
            direction=self.workload.direction,
            device=self.device,
            step_master=self.step_master,
        )
        self.made.append(made)
        return made

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the runners made in the block at its end."""
        try:
            yield
        finally:
            while self.made:
                self.made.pop().release()

    def master(self, name: str) -> dict[str, Any]:
        """Return the inputs of which a side gets copies; a rival gets the reference's."""
        return self.masters.get(name, self.masters[REFERENCE])


def prove(
    bench: Bench,
    workload_id: str,
    *,
    with_reference: bool = False,
    slow: bool = False,
    same_code: bool = False,
    enough_s: float = 0.0,
    with_rivals: bool = False,
    uncounted: Collection[str] = (),
) -> Proof:
    """Prove the optimized side, and the accepted one, on the workload's inputs; count what a call of each costs.

    Calling them compiles what they compile, so that a later process finds it in the compilers' caches; `with_reference`
    calls the reference for that, too, and `with_rivals` proves, calls and counts the rivals. Where the reference is
    `slow`, outputs that are those of the accepted side, bit for bit, are proven by that. Of the `same_code` as the
    accepted side's only the optimized side is needed: the accepted one counts what it counts, and where the reference
    is slow the outputs of its first call are taken as proven. A process that times compares both sides with them. With
    `enough_s` the reference is called, beside whatever else runs, and stopped after this many seconds of work; the
    sides in `uncounted` are not counted. NotEquivalent where a side is not the same function.
    """
    began = perf_counter()
    check = bench.check()
    proven = {n: s for n, s in bench.sides.items() if n != REFERENCE}
    rivals, skipped = bench.rivals() if with_rivals else ({}, {})
    accepted_bits = slow and same_code and not rivals
    evidence = None

    def trust(runner: Runner) -> None:
        if runner.name == OPTIMIZED:
            check.trust(runner.leaves())

    with bench.phases.time("proof"):
        bench.report(REFERENCE)
        both = {n: proven[n] for n in (ACCEPTED, OPTIMIZED) if n in proven}
        by_bits = slow and not rivals and len(both) > 1 and check.same(both, bench.report)
        if not accepted_bits and not by_bits:
            tally, left_out = prove_sides(check, proven, rivals, bench.report)
            # Alone on the device it may have the memory that it lacks beside other proofs.
            skipped |= {n: why for n, why in left_out.items() if why != NO_MEMORY}
            rivals = {n: s for n, s in rivals.items() if n not in left_out}
            evidence = tally.evidence(bench.timed, bench.case.dtype, bench.device)
    clock, rng = bench.clock(), bench.rng()
    # Establishing the truth has called the reference, too.
    with_reference = with_reference and check.seconds <= SLOW_TRUTH_S
    called = {n: s for n, s in bench.sides.items() if with_reference or n != REFERENCE} | rivals
    once: Call | None = None
    with bench.released():
        runners = {n: bench.runner(n, s) for n, s in called.items()}
        with bench.phases.time("warm-up"):
            _warm_up(runners, bench, clock, rng, trust if accepted_bits else None)
        with bench.phases.time("counting"):
            counts = _counted({n: r for n, r in runners.items() if n not in uncounted}, clock, bench)
            if same_code and OPTIMIZED in counts:
                counts[ACCEPTED] = counts[OPTIMIZED]
        with bench.phases.time("new values"):
            _prove_new_values(bench, check, runners[OPTIMIZED])
        if enough_s:
            with bench.phases.time("reference"):
                once = _until_enough(bench, clock, rng, enough_s)
    return Proof(
        id=workload_id,
        seed=bench.seed,
        evidence=evidence,
        digests=tuple(sorted(check.known)),
        counts=counts,
        rivals=tuple(rivals),
        skipped=skipped,
        truth_s=check.seconds,
        reference_s=once.seconds if once else None,
        reference_stopped=once is not None and once.stopped,
        phases=dict(bench.phases.seconds),
        seconds=perf_counter() - began,
    )


def launched(bench: Bench, top: Path) -> tuple[str, str]:
    """Return (digest of what the optimized side launches, ""), or ("", why there is none); see launches.py."""
    if torch.device(bench.device).type != "cuda" or bench.workload.clock != "device":
        return "", "its host code is timed, too"
    clock, rng = bench.clock(), random.Random(0)
    runner = bench.runner(OPTIMIZED, bench.sides[OPTIMIZED])
    before = scrutiny.compilations()
    with bench.released(), bench.phases.time("launches"):
        _warm_up({OPTIMIZED: runner}, bench, clock, rng)
        if scrutiny.compilations() > before:
            return "", "it runs compiled code, whose launches' arguments are not seen"
        return launches.digest(runner, clock, top)


def reference_alone(bench: Bench, kind: str, counts: Counts | None, alone: Callable[[], object]) -> tuple[float, ...]:
    """Return the seconds of a call of the reference in each block, where no other side is called.

    `kind` is the clock; `counts` are the reference's own, by which the clock knows how many calls it may queue. `alone`
    is called before anything is timed, and waits until no other process uses the device.
    """
    clock, rng = bench.clock(), bench.rng()
    # The sampler compares with the optimized side: here the reference stands in its place.
    runner = bench.runner(REFERENCE, bench.sides[REFERENCE])
    with bench.released():
        _warm_up({REFERENCE: runner}, bench, clock, rng)
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


def _until_enough(bench: Bench, clock: Clock, rng: random.Random, enough_s: float) -> Call:
    """Call the reference until it has done `enough_s` seconds of work; its start does not count as work."""
    compiled = scrutiny.compilations()
    call = _once(bench, clock, rng, COLD_S + enough_s)
    quick = not call.stopped and call.seconds <= COLD_S + LONG_S
    if quick or scrutiny.compilations() > compiled:  # most of it may have been its start
        return _once(bench, clock, rng, enough_s)
    return replace(call, seconds=call.seconds - COLD_S) if call.stopped else call


def _once(bench: Bench, clock: Clock, rng: random.Random, stop_s: float = 0.0) -> Call:
    """Call the reference once on fresh inputs; with `stop_s` the call is stopped after this many seconds."""
    reference = bench.sides[REFERENCE]
    runner = bench.runner(REFERENCE, reference)
    runner.called_once = True
    stopped = False
    with execution.quiet(reference), torch.set_grad_enabled(runner.grad_mode):
        bench.report(REFERENCE)
        runner.allocate(bench.master(REFERENCE), rng)
        call = runner.call

        def until_stopped() -> None:
            nonlocal stopped
            with cut_off(stop_s) as timer:
                try:
                    with execution.settings_kept():
                        call()
                except (KeyboardInterrupt, torch.OutOfMemoryError):
                    raise
                except BaseException:  # what it made of CutOff
                    if not timer.up:
                        raise
            stopped = timer.up

        if stop_s:
            runner.call = until_stopped
        took = runner.once(clock)
    return replace(took, stopped=stopped)


def _prove_new_values(bench: Bench, check: OutputCheck, runner: Runner) -> None:
    """Prove other values in the memory of the proven ones, unless the reference is slow or the inputs are constant."""
    if bench.pair.is_stateful or not 0 < check.seconds <= NEW_VALUES_S:
        return
    drawn = drawn_anew(bench.pair, bench.case, bench.device, bench.home, bench.peers)
    with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
        runner.refill(drawn.values)
        prove_new(check, runner, drawn)


def measure(
    pair: Pair,
    workload: Workload,
    *,
    workload_id: str,
    device: str,
    home: Path | None = None,
    accepted: Pair | None = None,
    proof: Proof | None = None,
    wait_for_proof: Callable[[], Proof] | None = None,
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

    Without `proof` every side is proven first, on inputs of `seed` (random unless given), and calls are counted. With
    one, its inputs are drawn again, and only outputs that are not those proven are proven anew. `wait_for_proof`
    returns such a proof, on inputs of `seed`, once another process has ended it; it is called after the warm-up. There
    are at most `blocks`; `reference` limits the reference to one round in each of this many blocks, and 0 leaves it
    out. `thorough` times rivals and the other clock, too; with such a limit, or not thorough, the reference's launches
    are not counted on the wall clock. Without `new_values` the sides get none between the blocks, and unless `thorough`
    the optimized side is not compared with the device's limit: a workload's first process does both. `report` gets the
    name of the side that is about to run, so that a crash or a hang can be attributed. `alone` is called before any is
    timed, and returns once nothing else uses the device; `beside` is called when all is timed, and others may use it
    again. Both tell whether there may be others. `peers` are the processes that time the workload with this one, and
    `checked_by` makes what holds outputs against the truth. With `turns`, blocks alternate with those of a process in
    another environment.

    NotEquivalent where a side is not the same function; PairError where the workload cannot be timed as declared.
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
    session = Session(bench, proof, wait_for_proof, reference, thorough, new_values, alone, beside, turns)
    with bench.released():
        session.run(blocks)
        return session.record(workload_id, perf_counter() - began - bench.phases.seconds.get(WAITING, 0.0))


class Session:
    """One measurement from the proof to the record."""

    def __init__(
        self,
        bench: Bench,
        proof: Proof | None,
        wait_for_proof: Callable[[], Proof] | None,
        reference: int | None,
        thorough: bool,
        new_values: bool,
        alone: Callable[[], bool],
        beside: Callable[[], bool],
        turns: Alternation | None = None,
    ) -> None:
        self.bench, self.reference, self.thorough = bench, reference, thorough
        self.turns = turns
        self.new_values, self.alone, self.beside = new_values, alone, beside
        self.rivals, self.skipped = bench.rivals() if thorough else ({}, {})
        self.check = bench.check()
        self.wait_for_proof = wait_for_proof
        self.first_calls: list[tuple[str, Side, str]] = []
        """(digest of what the first call gave, side, its name): they are compared once the proof is there."""
        self.long: Call | None = None
        """The only call of a reference that is so long that one is enough."""
        self.rng = bench.rng()
        self.evidence: Evidence | None = None
        self.counts: dict[str, Counts] = {}
        self.proof: Proof | None = None
        if proof:
            self._take(proof)
        self.condition = Condition()
        self.anchors: dict[str, float] = {}
        self.limit: Limit | None = None
        self.other: dict[str, float | None] = {}
        self.first_s = 0.0
        """Seconds in which first outputs were compared with the proven ones, and those that differ proven."""
        self.asked = False
        """Whether the seconds on the device have been asked for before."""

    def _take(self, proof: Proof) -> None:
        """Take over what another process has proven and counted."""
        self.proof, self.evidence, self.counts = proof, proof.evidence, dict(proof.counts)
        self.check.known.update(proof.digests)
        if ACCEPTED in self.counts and _more(self.counts[ACCEPTED], self.counts[OPTIMIZED]):
            # Other proofs ran meanwhile, so each timing process counts these two sides again.
            del self.counts[ACCEPTED], self.counts[OPTIMIZED]
        if self.reference == 0 and proof.reference_s:
            self.long = Call(proof.reference_s, None, proof.reference_stopped)

    def run(self, blocks: int) -> None:
        """Prove, warm up, count, time, and look for faults that only the timed calls show."""
        bench, phases = self.bench, self.bench.phases
        if not self.wait_for_proof:
            with phases.time("proof"):
                self._prove()
        self.clock = bench.clock()
        timed = {n: s for n, s in bench.sides.items() if not (n == REFERENCE and self.reference == 0)}
        slow_truth = self.proof is not None and self.proof.truth_s > SLOW_TRUTH_S
        deferred = REFERENCE in timed and (self.reference == 1 or slow_truth)
        live = {n: s for n, s in {**timed, **self.rivals}.items() if n not in self.skipped}
        if deferred:
            del live[REFERENCE]
        self.runners = {n: bench.runner(n, s) for n, s in live.items()}
        # The first ABBA round is timed with the inputs that this warm-up allocates, so its order is random.
        shuffled = dict(self.rng.sample(list(self.runners.items()), len(self.runners)))
        with phases.time("warm-up"):
            _warm_up(
                shuffled, bench, self.clock, self.rng, self._check_first if self.proof or self.wait_for_proof else None
            )
        phases.part("warm-up", {"first outputs": self.first_s})
        if self.wait_for_proof:
            with phases.time(WAITING):
                self._take(self.wait_for_proof())
            with phases.time("first outputs"):
                self._check_noted()
        for name in set(self.skipped) & set(self.runners):
            del self.runners[name]
        scrutiny.keeps_l2(bench.l2_bytes, f"{bench.pair.name}: the optimized side")
        self._count()
        values = self._new_values_for(blocks) if self.new_values else None
        if self._waited(self.alone):
            self._call_long_again()
        if deferred:
            self._call_reference()
        self.kind = _clock_kind(bench.pair, bench.workload, self.clock, self.counts, self.runners, self.skipped)
        gated = {n: r for n, r in self.runners.items() if n in timed}
        self.sampler = self._sampler(gated, sparse={REFERENCE: self.reference} if self.reference else None)
        with phases.time("timing"):
            self._plan(blocks)
            proven = self.proof is not None
            watch = Watch(self.sampler, self.check, bench.l2_bytes, values=values, proven_before=proven)
            self.condition = self._timed(watch.between)
        phases.part("timing", {"allocation": self.sampler.allocated_s, "checks": self.sampler.between_s})
        for name in sorted(_waiting(self.clock) & set(gated)):
            raise PairError(f"{_where(bench)}: the {name} side {WAITS}; say clock='wall'")
        watch.conclude()
        with phases.time("anchors"):
            self.anchors = anchors.measure(bench.device)
        if rivals := {n: r for n, r in self.runners.items() if n in self.rivals and n not in self.skipped}:
            with phases.time("rivals"):
                self._time_rivals(rivals)
        with phases.time("limit"):
            if self.thorough:
                self.other = {n: self.sampler.other_clock(n) for n in self.sampler.runners}
            # To measure the device's ceilings takes a tenth of a second of every process.
            self.limit = self._limit() if self.new_values or self.thorough else None
            if self.limit is not None:
                where = f"{bench.pair.name}: the optimized side"
                self.limit = scrutiny.floor(self.limit, self._limit_again, self._on_device, bench.device, where)
        guard.check()
        self._waited(self.beside)
        with phases.time("checks"):
            bench.report(REFERENCE)
            judge_copied(self.check)
        guard.check()

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

    def _prove(self) -> None:
        bench = self.bench
        bench.report(REFERENCE)
        proven = {n: s for n, s in bench.sides.items() if n != REFERENCE and self.proof is None}
        if self.thorough and self.proof is not None:
            self.skipped |= self.proof.skipped
        before = self.proof.rivals if self.proof is not None else ()
        rivals = {n: s for n, s in self.rivals.items() if n not in self.skipped and n not in before}
        tally, left_out = prove_sides(self.check, proven, rivals, bench.report)
        self.skipped |= left_out
        if self.proof is None:
            self.evidence = tally.evidence(bench.timed, bench.case.dtype, bench.device)

    def _check_first(self, runner: Runner) -> None:
        """Check that the first call's outputs are those that were proven."""
        if runner.name == REFERENCE:
            return
        began = perf_counter()
        try:
            if self.proof is None:
                self._note_first(runner)
            else:
                self.check.first(runner.leaves(), runner.name, runner.side)
        except NotEquivalent as error:
            if runner.name not in self.rivals:
                raise
            self.skipped[runner.name] = unequal(error)
        self.first_s += perf_counter() - began

    def _note_first(self, runner: Runner) -> None:
        """Keep the first call's outputs until the proof is there, or their digest where a copy would be large."""
        leaves = runner.leaves()
        if self.bench.pair.is_stateful or make.bytes_in([leaves]) > COPIED_BYTES:
            self.first_calls.append((digest(leaves), runner.side, runner.name))
        else:
            self.check.check_later(leaves, runner.name)

    def _check_noted(self) -> None:
        """Make the same check of the outputs that were kept. A side that gave something else is called again."""
        for key, side, name in self.first_calls:
            if key not in self.check.known:
                self.bench.report(name)
                self.check.prove(side, name)
        self.bench.report(REFERENCE)
        self.check.check_copied()

    def _count(self) -> None:
        """Count syncs and launches of the sides whose counts are not known."""
        uncounted = {n: r for n, r in self.runners.items() if n not in self.counts}
        if self.bench.workload.clock == "wall" and (self.reference is not None or not self.thorough):
            uncounted.pop(REFERENCE, None)
        if uncounted:
            with self.bench.phases.time("counting"):
                self.counts |= _counted(uncounted, self.clock, self.bench)

    def _call_reference(self) -> None:
        """Call the reference once. If that takes long, it is its only sample; if not, prepare it like the others."""
        bench = self.bench
        with bench.phases.time("reference"):
            call = _once(bench, self.clock, self.rng)
        if call.seconds > LONG_S:
            self.long = call
            return
        self.runners[REFERENCE] = runner = bench.runner(REFERENCE, bench.sides[REFERENCE])
        with bench.phases.time("warm-up"):
            _warm_up({REFERENCE: runner}, bench, self.clock, self.rng)
        self._count()

    def _waited(self, wait: Callable[[], bool]) -> bool:
        """Call `alone` or `beside` and note how long it waited. Return whether other processes use the device, too."""
        began = perf_counter()
        shared = wait()
        if shared:
            known = self.bench.phases.seconds
            known[WAITING] = known.get(WAITING, 0.0) + perf_counter() - began
        return shared

    def _call_long_again(self) -> None:
        """Warm up long sides anew: their warm-up calls are their samples, and the first ones ran beside other work."""
        with self.bench.phases.time("warm-up"):
            for runner in self.runners.values():
                if runner.long is not None:
                    runner.long = None
                    runner.warm_up(self.clock)

    def _new_values_for(self, blocks: int) -> NewValues:
        """Return new inputs for the calls that are timed between blocks; with a proof they are drawn in advance."""
        bench = self.bench
        values = NewValues(bench.timed, bench.case, bench.device, bench.home, bench.peers)
        if self.proof is not None:
            with bench.phases.time("new values"):
                values.draw_ahead(1 + min(blocks, FRESH_BLOCKS[True]))
        return values

    def _sampler(self, runners: dict[str, Runner], sparse: Mapping[str, int] | None = None) -> Sampler:
        return Sampler(
            runners,
            {n: self.bench.master(n) for n in runners},
            self.clock,
            self.kind,
            self.counts,
            self.rng,
            self.bench.report,
            repeat=self.bench.workload.repeat,
            sparse=sparse,
        )

    def _time_rivals(self, rivals: dict[str, Runner]) -> None:
        beside = self._sampler({OPTIMIZED: self.runners[OPTIMIZED], **rivals})
        beside.plan(RIVAL_BLOCKS, RIVAL_ROUNDS)
        beside.run()
        self.skipped |= beside.compiling()
        self.skipped |= dict.fromkeys(_waiting(self.clock) & set(rivals), WAITS)
        self.sampler.add(beside)
        for name in self.skipped:
            self.sampler.runners.pop(name, None)
        if not self.bench.pair.is_stateful:
            still = {n: r for n, r in beside.runners.items() if n not in self.skipped}
            check_timed(self.check, still, beside)

    def _limit(self) -> Limit | None:
        found = _limit(self.bench.pair, self.bench.workload, self.bench.case.dtype, self.bench.device)
        return self.bench.peers.same(found)

    def _limit_again(self) -> Limit | None:
        ceilings.forget()
        return self._limit()

    def _on_device(self) -> float:
        """Return the seconds of a call of the optimized side, on the device where they are known; sampled anew the next
        time."""
        known = self.other.get(OPTIMIZED) if self.kind == "wall" else None
        if self.asked:
            return (self.sampler.other_clock(OPTIMIZED) if known else None) or self.sampler.sample(OPTIMIZED)
        self.asked = True
        return known or self.sampler.median(OPTIMIZED) or math.inf

    def record(self, workload_id: str, seconds: float) -> Measurement:
        """Return the measurement."""
        bench, sampler, kind = self.bench, self.sampler, self.kind
        workload = bench.workload
        sides = {n: self._side(n, r) for n, r in sampler.runners.items()}
        ratios = {n: tuple(v) for n, v in sampler.log_ratios.items() if n in sampler.runners}
        few = {n for n in sampler.few if n in sampler.runners}
        if self.long is not None:
            took, ours = self.long.seconds, sampler.median(OPTIMIZED) or math.inf
            sides[REFERENCE] = SideRecord(
                device_s=None,
                wall_s=took,
                blocks_s=(took,),
                peak_bytes=self.long.peak_bytes,
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
            clock=kind,
            direction=workload.direction,
            dtype=bench.case.dtype,
            sizes=workload.described,
            seed=bench.seed,
            sides=sides,
            log_ratios=ratios,
            few=tuple(sorted(few)),
            at_least=(REFERENCE,) if self.long is not None and self.long.stopped else (),
            skipped=self.skipped,
            limit=self.limit,
            condition=self.condition,
            anchors=self.anchors,
            seconds=seconds,
            phases=bench.phases.seconds,
            evidence=self.evidence,
            group=self._group(),
        )

    def _group(self) -> ProcessGroup | None:
        """Return the cost of a call of each side in this process, where several call the sides together."""
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
        counts = self.counts.get(name, Counts())
        median = self.sampler.median(name)
        return SideRecord(
            device_s=median if self.kind == "device" else self.other.get(name),
            wall_s=median if self.kind == "wall" else self.other.get(name),
            blocks_s=tuple(self.sampler.blocks_s[name]),
            peak_bytes=runner.last.peak_bytes if runner.last else None,
            host_syncs=counts.host_syncs,
            launches=counts.launches,
        )


# --- steps ----------------------------------------------------------------------------------------------------------


def _warm_up(
    runners: Mapping[str, Runner],
    bench: Bench,
    clock: Clock,
    rng: random.Random,
    after_first: Callable[[Runner], None] | None = None,
) -> None:
    for name, runner in runners.items():
        bench.report(name)
        with torch.set_grad_enabled(runner.grad_mode):
            runner.allocate(bench.master(name), rng)
        runner.warm_up(clock, after_first or (lambda runner: None))


def _counted(runners: Mapping[str, Runner], clock: Clock, bench: Bench) -> dict[str, Counts]:
    """Return the host syncs and launches of one call of each side; empty counts where a call takes too long for the
    profiler.

    With several processes, they are the most that one of them makes.
    """
    if not isinstance(clock, CudaClock):
        return {}
    bench.report("profiler")
    quick = {n: r for n, r in runners.items() if n == OPTIMIZED or (r.last and r.last.seconds <= COUNTED_S)}

    def counted(some: Mapping[str, Runner]) -> dict[str, tuple[int, int]]:
        with torch.set_grad_enabled(any(r.grad_mode for r in some.values())):
            return count_calls({n: (r.reset, r.call) for n, r in some.items()}, bench.peers.any)

    found = counted(quick)
    both = {n: quick[n] for n in (ACCEPTED, OPTIMIZED) if n in quick}
    for _ in range(RECOUNTS):
        more = len(both) > 1 and _more(*(Counts(host_syncs=found[n][0], launches=found[n][1]) for n in both))
        if not bench.peers.any(more):
            break
        again = counted(both)
        for name, of in ((ACCEPTED, max), (OPTIMIZED, min)):
            found[name] = (of(found[name][0], again[name][0]), of(found[name][1], again[name][1]))
    bench.counted_here |= {n: Counts(host_syncs=c[0], launches=c[1]) for n, c in found.items()}
    most = {n: [int(count) for count in bench.peers.slowest(c)] for n, c in found.items()}
    return {n: Counts(host_syncs=most[n][0], launches=most[n][1]) if n in most else Counts() for n in runners}


def _more(accepted: Counts, optimized: Counts) -> bool:
    """Return whether the optimized side syncs or launches more often."""
    return any(
        before is not None and now is not None and now > before
        for before, now in (
            (accepted.host_syncs, optimized.host_syncs),
            (accepted.launches, optimized.launches),
        )
    )


def _clock_kind(
    pair: Pair,
    workload: Workload,
    clock: Clock,
    counts: Mapping[str, Counts],
    runners: dict[str, Runner],
    skipped: dict[str, str],
) -> str:
    """Return the clock that is timed on. A rival that cannot be timed on it is removed from `runners`."""
    if not isinstance(clock, CudaClock):
        return "wall"
    if workload.clock == "device":
        for name in list(runners):
            syncs = counts[name].host_syncs if name in counts else None
            if not syncs:
                continue
            if name in (REFERENCE, OPTIMIZED, ACCEPTED):
                raise PairError(
                    f"{pair.name}, workload {workload.name!r}: the {name} side makes {syncs} host sync"
                    f"{'s' * (syncs > 1)} a call, so that the device clock has no meaning; say clock='wall'"
                )
            skipped[name] = f"makes {syncs} host syncs a call: it has no time on the device clock"
            del runners[name]
    return workload.clock


def _limit(pair: Pair, workload: Workload, dtype: str, device: str) -> Limit | None:
    if pair.cost is None:
        return None
    moved, operations = pair.cost.of(workload.sizes, workload.direction)
    bounds = []
    if moved:
        rate = ceilings.copy_bytes_per_s(device)
        bounds.append((moved / rate, "memory", rate))
    if operations:
        precisions = {pair.cost.precision_in(dtype)}
        if device == "cpu":  # a CPU's own products in half precision may be far slower than those of widened inputs
            precisions.add(pair.cost.precision)
        rate = max(ceilings.matmul_flops_per_s(device, precision) for precision in precisions)
        bounds.append((operations / rate, "compute", rate))
    if not bounds:
        return None
    seconds, by, rate = max(bounds)
    return Limit(seconds=seconds, by=by, bytes=moved, flops=operations, ceiling=rate)


def _waiting(clock: Clock) -> set[str]:
    return set(clock.waiting)


def _where(bench: Bench) -> str:
    return f"{bench.pair.name}, workload {bench.workload.name!r}"
