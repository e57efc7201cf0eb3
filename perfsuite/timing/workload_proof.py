"""Prove a workload before other processes time it, and return a `WorkloadProof`.

The proof calls the sides, so that later processes find their compiled code in the compilers' caches. It also counts the
host syncs, launches and memory of a call.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from time import perf_counter

import torch

from perfsuite.correctness import compilations, execution, truth_summaries
from perfsuite.declare.sides import Side
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Counts, Evidence, WorkloadProof
from perfsuite.timing.bench import SLOW_TRUTH_S, Bench
from perfsuite.timing.block_checks import drawn_anew, prove_new
from perfsuite.timing.output_checks import NO_MEMORY, OutputCheck, prove_sides
from perfsuite.timing.runner import LONG_S, Call, Clock, Runner

NEW_VALUES_S = 2.0
"""If computing a truth takes more than this many seconds, it is computed on only one draw."""
COLD_S = 2.0
"""Seconds of a reference's first call in a process that may be start-up time: loading libraries, creating handles,
autotuning. They are subtracted if the call is stopped."""


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
    summarise: bool = False,
) -> WorkloadProof:
    """Prove the optimized side, and the accepted one, on the workload's inputs. Count the launches of a call of each.

    The calls also fill the compilers' caches for later processes.

    with_reference  call the reference too, to fill the caches
    slow            the reference is slow: outputs that are bitwise equal to the accepted side's count as proven
    same_code       the accepted side has the same code, so only the optimized side is needed: its counts are used for
                    both. If the reference is also slow, the outputs of its first call count as proven. The processes
                    that time compare both sides with these
    enough_s        call the reference while other processes run, and stop it after this number of seconds of work; 0
                    for no such call
    with_rivals     prove, call and count the rivals too
    uncounted       sides that are not counted
    summarise       summarise the inputs and the float64 truth

    Raises NotEquivalent if a side is not the same function.
    """
    began = perf_counter()
    check = bench.check()
    rivals, skipped = bench.rivals() if with_rivals else ({}, {})
    trusted = slow and same_code and not rivals
    with bench.phases.time("proof"):
        evidence, left_out = _prove_outputs(bench, check, rivals, slow=slow, trusted=trusted)
    # A rival that lacks memory is not skipped, because it may have enough when it is alone on the device.
    skipped |= {n: why for n, why in left_out.items() if why != NO_MEMORY}
    rivals = {n: s for n, s in rivals.items() if n not in left_out}
    # If the truth took long, its computation has already called the reference.
    with_reference = with_reference and check.seconds <= SLOW_TRUTH_S
    called = {n: s for n, s in bench.sides.items() if with_reference or n != REFERENCE} | rivals
    counts, once = _call(bench, check, called, uncounted, trusted=trusted, same_code=same_code, enough_s=enough_s)
    return WorkloadProof(
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
        summaries=truth_summaries.of(check.truth, check.master) if summarise else {},
        phases=dict(bench.phases.seconds),
        seconds=perf_counter() - began,
    )


def _prove_outputs(
    bench: Bench, check: OutputCheck, rivals: Mapping[str, Side], *, slow: bool, trusted: bool
) -> tuple[Evidence | None, dict[str, str]]:
    """Return (evidence, rivals that cannot be timed). The evidence is None if no output is compared with the truth."""
    bench.report(REFERENCE)
    proven = {n: s for n, s in bench.sides.items() if n != REFERENCE}
    both = {n: proven[n] for n in (ACCEPTED, OPTIMIZED) if n in proven}
    by_bits = slow and not rivals and len(both) > 1 and check.same(both, bench.report)
    if trusted or by_bits:
        return None, {}
    tally, left_out = prove_sides(check, proven, rivals, bench.report)
    return tally.evidence(bench.timed, bench.case.dtype, bench.device), left_out


def _call(
    bench: Bench,
    check: OutputCheck,
    called: Mapping[str, Side],
    uncounted: Collection[str],
    *,
    trusted: bool,
    same_code: bool,
    enough_s: float,
) -> tuple[dict[str, Counts], Call | None]:
    """Warm up the sides, count their launches, and prove new values. With `enough_s`, call the reference.

    Return (counts, the reference's call or None). The first outputs of a `trusted` optimized side count as proven.
    """

    def trust(runner: Runner) -> None:
        if runner.name == OPTIMIZED:
            check.trust(runner.leaves())

    clock, rng = bench.clock(), bench.rng()
    once: Call | None = None
    with bench.released():
        runners = {n: bench.runner(n, s) for n, s in called.items()}
        with bench.phases.time("warm-up"):
            bench.warm_up(runners, clock, rng, trust if trusted else None)
        with bench.phases.time("counting"):
            counts = bench.count({n: r for n, r in runners.items() if n not in uncounted}, clock)
            if same_code and OPTIMIZED in counts:
                counts[ACCEPTED] = counts[OPTIMIZED]
        with bench.phases.time("new values"):
            _prove_new_values(bench, check, runners[OPTIMIZED])
        if enough_s:
            with bench.phases.time("reference"):
                once = _until_enough(bench, clock, rng, enough_s)
    return counts, once


def _prove_new_values(bench: Bench, check: OutputCheck, runner: Runner) -> None:
    """Prove the optimized side on other values in the memory of the proven ones. Do nothing for a stateful pair, if no
    truth was computed, or if the truth takes long."""
    if bench.pair.is_stateful or not 0 < check.seconds <= NEW_VALUES_S:
        return
    drawn = drawn_anew(bench.pair, bench.case, bench.device, bench.home, bench.peers)
    with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
        runner.refill(drawn.values)
        prove_new(check, runner, drawn)


def _until_enough(bench: Bench, clock: Clock, rng: random.Random, enough_s: float) -> Call:
    """Call the reference, and stop it after `enough_s` seconds of work. Its start-up time does not count as work."""
    compiled = compilations.graphs()
    call = bench.call_reference(clock, rng, COLD_S + enough_s)
    quick = not call.stopped and call.seconds <= COLD_S + LONG_S
    if quick or compilations.graphs() > compiled:  # most of the time may have been start-up
        return bench.call_reference(clock, rng, enough_s)
    return replace(call, seconds=call.seconds - COLD_S) if call.stopped else call
