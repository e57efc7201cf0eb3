"""Prepare a workload's sides to be timed: prove them or compare with a proof, warm them up, and wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from perfsuite.declare.sides import Side
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Counts, Evidence, WorkloadProof
from perfsuite.timing import timing_checks
from perfsuite.timing.bench import SLOW_TRUTH_S, WAITING, Bench, counts_more
from perfsuite.timing.block_checks import FRESH_BLOCKS, NewValues
from perfsuite.timing.clocks import CudaClock
from perfsuite.timing.output_checks import COPIED_BYTES, digest, prove_sides, unequal
from perfsuite.timing.runner import LONG_S, Call, Runner


class Preparation:
    """Preparation of a workload's sides for timing. The parameters are those of `measuring.measure`."""

    def __init__(
        self,
        bench: Bench,
        proof: WorkloadProof | None,
        wait_for_proof: Callable[[], WorkloadProof] | None,
        reference: int | None,
        thorough: bool,
        new_values: bool,
        alone: Callable[[], bool],
    ) -> None:
        self.bench, self.reference, self.thorough = bench, reference, thorough
        self.new_values, self.alone = new_values, alone
        self.rivals, self.skipped = bench.rivals() if thorough else ({}, {})
        self.check = bench.check()
        self.wait_for_proof = wait_for_proof
        self.first_calls: list[tuple[str, Side, str]] = []
        """(Digest of the first call's outputs, side, its name), to be compared when the proof has arrived."""
        self.long: Call | None = None
        """The only call of a reference that takes so long that one call is enough."""
        self.rng = bench.rng()
        self.evidence: Evidence | None = None
        self.counts: dict[str, Counts] = {}
        self.proof: WorkloadProof | None = None
        if proof:
            self._take(proof)
        self.values: NewValues | None = None
        """New input values for the sides between blocks."""
        self.first_s = 0.0
        """Seconds spent on comparing first outputs with the proven ones, and on proving those that differ."""

    def run(self, blocks: int) -> None:
        """Prove, warm up, count, wait until nothing else uses the device, and choose the clock."""
        bench, phases = self.bench, self.bench.phases
        if not self.wait_for_proof:
            with phases.time("proof"):
                self._prove()
        self.clock = bench.clock()
        self.timed = {n: s for n, s in bench.sides.items() if not (n == REFERENCE and self.reference == 0)}
        deferred = self._defers_reference()
        self._warm_up(deferred)
        if self.wait_for_proof:
            with phases.time(WAITING):
                self._take(self.wait_for_proof())
            with phases.time("first outputs"):
                self._check_noted()
        for name in set(self.skipped) & set(self.runners):
            del self.runners[name]
        timing_checks.keeps_l2(bench.l2_bytes, f"{bench.pair.name}: the optimized side")
        self._count()
        self.values = self._new_values_for(blocks) if self.new_values else None
        if bench.waited(self.alone):
            self._call_long_again()
        if deferred:
            self._call_reference()
        self.kind = self._clock_kind()

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

    def _take(self, proof: WorkloadProof) -> None:
        """Use the proof, the digests and the counts of another process."""
        self.proof, self.evidence, self.counts = proof, proof.evidence, dict(proof.counts)
        self.check.known.update(proof.digests)
        if ACCEPTED in self.counts and counts_more(self.counts[ACCEPTED], self.counts[OPTIMIZED]):
            # Other proofs ran meanwhile, so each timing process counts these two sides again.
            del self.counts[ACCEPTED], self.counts[OPTIMIZED]
        if self.reference == 0 and proof.reference_s:
            self.long = Call(proof.reference_s, None, proof.reference_stopped)

    def _defers_reference(self) -> bool:
        """Return whether the reference may take long, so that it is called after everything else is ready."""
        slow_truth = self.proof is not None and self.proof.truth_s > SLOW_TRUTH_S
        return REFERENCE in self.timed and (self.reference == 1 or slow_truth)

    def _warm_up(self, deferred: bool) -> None:
        """Warm up all sides that can be timed, except a `deferred` reference, and check their first outputs."""
        bench = self.bench
        live = {n: s for n, s in {**self.timed, **self.rivals}.items() if n not in self.skipped}
        if deferred:
            del live[REFERENCE]
        self.runners = {n: bench.runner(n, s) for n, s in live.items()}
        # The first ABBA round is timed with the inputs that this warm-up allocates, so its order is random.
        shuffled = dict(self.rng.sample(list(self.runners.items()), len(self.runners)))
        with bench.phases.time("warm-up"):
            bench.warm_up(
                shuffled, self.clock, self.rng, self._check_first if self.proof or self.wait_for_proof else None
            )
        bench.phases.part("warm-up", {"first outputs": self.first_s})

    def _check_first(self, runner: Runner) -> None:
        """Check that the first call's outputs are equal to the proven ones, or prove them."""
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
        """Keep the first call's outputs until the proof arrives, or their digest if a copy would be large."""
        leaves = runner.leaves()
        if self.bench.pair.is_stateful or make.bytes_in([leaves]) > COPIED_BYTES:
            self.first_calls.append((digest(leaves), runner.side, runner.name))
        else:
            self.check.check_later(leaves, runner.name)

    def _check_noted(self) -> None:
        """Check the outputs that were kept. If only a digest was kept and is not known, call the side again to prove
        it."""
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
                self.counts |= self.bench.count(uncounted, self.clock)

    def _new_values_for(self, blocks: int) -> NewValues:
        """Return new input values for the sides between blocks. With a proof, they are drawn in advance."""
        bench = self.bench
        values = NewValues(bench.timed, bench.case, bench.device, bench.home, bench.peers)
        if self.proof is not None:
            with bench.phases.time("new values"):
                values.draw_ahead(1 + min(blocks, FRESH_BLOCKS[True]))
        return values

    def _call_long_again(self) -> None:
        """Warm up long sides again, because their warm-up calls are their samples, and the first ones ran while other
        processes used the device."""
        with self.bench.phases.time("warm-up"):
            for runner in self.runners.values():
                if runner.long is not None:
                    runner.long = None
                    runner.warm_up(self.clock)

    def _call_reference(self) -> None:
        """Call the reference once. If that takes long, it is the only sample. Otherwise prepare the reference like the
        other sides."""
        bench = self.bench
        with bench.phases.time("reference"):
            call = bench.call_reference(self.clock, self.rng)
        if call.seconds > LONG_S:
            self.long = call
            return
        self.runners[REFERENCE] = runner = bench.runner(REFERENCE, bench.sides[REFERENCE])
        with bench.phases.time("warm-up"):
            bench.warm_up({REFERENCE: runner}, self.clock, self.rng)
        self._count()

    def _clock_kind(self) -> str:
        """Return the clock for timing. A rival that cannot be timed on it is left out."""
        pair, workload = self.bench.pair, self.bench.workload
        if not isinstance(self.clock, CudaClock):
            return "wall"
        if workload.clock == "device":
            for name in list(self.runners):
                syncs = self.counts[name].host_syncs if name in self.counts else None
                if not syncs:
                    continue
                if name in (REFERENCE, OPTIMIZED, ACCEPTED):
                    raise PairError(
                        f"{pair.name}, workload {workload.name!r}: the {name} side makes {syncs} host sync"
                        f"{'s' * (syncs > 1)} a call, so that the device clock has no meaning; say clock='wall'"
                    )
                self.skipped[name] = f"makes {syncs} host syncs a call: it has no time on the device clock"
                del self.runners[name]
        return workload.clock
