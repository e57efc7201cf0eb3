"""Prove a workload ahead of the processes that time it → a `Proof`.

The proof calls the sides, so that later processes find in the compilers' caches what they compile, and counts what a
call of each costs.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from time import perf_counter

import torch

from perfsuite import execution, scrutiny
from perfsuite.bench import SLOW_TRUTH_S, Bench
from perfsuite.proving import NO_MEMORY, OutputCheck, prove_sides
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Counts, Evidence, Proof
from perfsuite.runner import LONG_S, Call, Clock, Runner
from perfsuite.sides import Side
from perfsuite.watching import drawn_anew, prove_new

NEW_VALUES_S = 2.0
"""Seconds above which a truth is established on one draw only."""
COLD_S = 2.0
"""Seconds of a reference's first call in a process that may be start-up: loading libraries, creating handles,
autotuning. They do not count where the call is stopped."""


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
    rivals, skipped = bench.rivals() if with_rivals else ({}, {})
    trusted = slow and same_code and not rivals
    with bench.phases.time("proof"):
        evidence, left_out = _prove_outputs(bench, check, rivals, slow=slow, trusted=trusted)
    # Alone on the device it may have the memory that it lacks beside other proofs.
    skipped |= {n: why for n, why in left_out.items() if why != NO_MEMORY}
    rivals = {n: s for n, s in rivals.items() if n not in left_out}
    # Establishing the truth has called the reference, too.
    with_reference = with_reference and check.seconds <= SLOW_TRUTH_S
    called = {n: s for n, s in bench.sides.items() if with_reference or n != REFERENCE} | rivals
    counts, once = _call(bench, check, called, uncounted, trusted=trusted, same_code=same_code, enough_s=enough_s)
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


def _prove_outputs(
    bench: Bench, check: OutputCheck, rivals: Mapping[str, Side], *, slow: bool, trusted: bool
) -> tuple[Evidence | None, dict[str, str]]:
    """Return (evidence, rivals that cannot be timed); no evidence where no output is compared with the truth."""
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
    """Warm the sides up, count their calls and prove new values; with `enough_s`, call the reference.

    Return (counts, the reference's call). The first outputs of a `trusted` optimized side are taken as proven.
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
    """Prove other values in the memory of the proven ones, unless the reference is slow or the inputs are constant."""
    if bench.pair.is_stateful or not 0 < check.seconds <= NEW_VALUES_S:
        return
    drawn = drawn_anew(bench.pair, bench.case, bench.device, bench.home, bench.peers)
    with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
        runner.refill(drawn.values)
        prove_new(check, runner, drawn)


def _until_enough(bench: Bench, clock: Clock, rng: random.Random, enough_s: float) -> Call:
    """Call the reference until it has done `enough_s` seconds of work; its start does not count as work."""
    compiled = scrutiny.compilations()
    call = bench.call_reference(clock, rng, COLD_S + enough_s)
    quick = not call.stopped and call.seconds <= COLD_S + LONG_S
    if quick or scrutiny.compilations() > compiled:  # most of it may have been its start
        return bench.call_reference(clock, rng, enough_s)
    return replace(call, seconds=call.seconds - COLD_S) if call.stopped else call
