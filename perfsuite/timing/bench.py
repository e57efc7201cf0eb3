"""A workload that is ready to be proven and timed: prepare its sides and inputs, warm up, call once, and count."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from perfsuite.correctness import execution
from perfsuite.declare.pair import Pair
from perfsuite.declare.sides import Side, as_side
from perfsuite.declare.workload import Workload
from perfsuite.draws import inputs as make
from perfsuite.draws.cases import workload_case
from perfsuite.errors import RevisionError
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Case, Counts
from perfsuite.system import tamper
from perfsuite.system.time_limit import cut_off
from perfsuite.timing import timing_checks
from perfsuite.timing.clocks import CudaClock, clock_for
from perfsuite.timing.output_checks import OutputCheck
from perfsuite.timing.peers import ALONE, Peers
from perfsuite.timing.profiler_counts import COUNTED_S, count_calls
from perfsuite.timing.runner import Call, Clock, Runner

SLOW_TRUTH_S = 5.0
"""If the truth takes more than this many seconds to compute, the reference may take more than LONG_S a call."""
RECOUNTS = 3
"""Most repetitions of a count of both sides. More syncs or launches than accepted are red, but some calls differ by
chance: a call may have to wait for the one before it. The gate compares the fewest of the optimized side with the most
of the accepted one."""
WAITING = "waiting"
"""Name of the phase in which other processes use the device. The seconds of a measurement exclude it."""

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
        """Record these parts of the phase `whole` as phases of their own, and subtract their seconds from it."""
        self.seconds[whole] -= sum(parts.values())
        self.seconds |= parts


@dataclass(slots=True)
class Bench:
    """One workload, ready to be proven and timed: its sides with the inputs of each.

    `accepted` is the same pair as another revision declares it. Its optimized side becomes a third side.
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
    """The processes that time the workload together with this one."""
    checked_by: Callable[..., OutputCheck] = OutputCheck
    l2_bytes: int | None = None
    case: Case = field(init=False)
    timed: Pair = field(init=False)
    sides: dict[str, Side] = field(init=False)
    masters: dict[str, dict[str, Any]] = field(init=False)
    step_master: dict[str, Any] = field(default_factory=dict, init=False)
    counted_here: dict[str, Counts] = field(default_factory=dict, init=False)
    """Host syncs and launches of a call of each side in this process."""
    made: list[Runner] = field(default_factory=list, init=False)
    """Runners that were made and not yet released."""

    def __post_init__(self) -> None:
        tamper.check()
        self.l2_bytes = timing_checks.persisting_l2_bytes()  # before any side has run
        execution.forget_compiled()
        gc.collect()  # reference cycles may hold tensors of an earlier workload
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()
        pair = self.pair
        self.case = workload_case(self.workload, self.workload.dtype or pair.dtypes[0], self.seed)
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
        """Return (rivals of the pair that this machine can run, name → reason for each of the others)."""
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
        """Return a new random generator for orders, with the same seed in all processes that time the workload
        together."""
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
        """Release all runners at the end of the block."""
        try:
            yield
        finally:
            while self.made:
                self.made.pop().release()

    def master(self, name: str) -> dict[str, Any]:
        """Return the inputs from which a side's copies are made. A rival uses the reference's."""
        return self.masters.get(name, self.masters[REFERENCE])

    def warm_up(
        self,
        runners: Mapping[str, Runner],
        clock: Clock,
        rng: random.Random,
        after_first: Callable[[Runner], None] | None = None,
    ) -> None:
        """Allocate the inputs of each runner and warm it up. `after_first` is called after a runner's first call."""
        for name, runner in runners.items():
            self.report(name)
            with torch.set_grad_enabled(runner.grad_mode):
                runner.allocate(self.master(name), rng)
            runner.warm_up(clock, after_first or (lambda runner: None))

    def call_reference(self, clock: Clock, rng: random.Random, stop_s: float = 0.0) -> Call:
        """Call the reference once on fresh inputs. With `stop_s`, stop the call after this number of seconds."""
        reference = self.sides[REFERENCE]
        runner = self.runner(REFERENCE, reference)
        runner.called_once = True
        stopped = False
        with execution.quiet(reference), torch.set_grad_enabled(runner.grad_mode):
            self.report(REFERENCE)
            runner.allocate(self.master(REFERENCE), rng)
            call = runner.call

            def until_stopped() -> None:
                nonlocal stopped
                with cut_off(stop_s) as timer:
                    try:
                        with execution.settings_kept():
                            call()
                    except (KeyboardInterrupt, torch.OutOfMemoryError):
                        raise
                    except BaseException:  # the call may have converted CutOff into another exception
                        if not timer.up:
                            raise
                stopped = timer.up

            if stop_s:
                runner.call = until_stopped
            took = runner.once(clock)
        return replace(took, stopped=stopped)

    def count(self, runners: Mapping[str, Runner], clock: Clock) -> dict[str, Counts]:
        """Return the host syncs and launches of one call of each side. They are empty where a call takes too long for
        the profiler.

        With several processes, each count is the largest over the processes.
        """
        if not isinstance(clock, CudaClock):
            return {}
        self.report("profiler")
        quick = {n: r for n, r in runners.items() if n == OPTIMIZED or (r.last and r.last.seconds <= COUNTED_S)}

        def counted(some: Mapping[str, Runner]) -> dict[str, tuple[int, int]]:
            with torch.set_grad_enabled(any(r.grad_mode for r in some.values())):
                return count_calls({n: (r.reset, r.call) for n, r in some.items()}, self.peers.any)

        found = counted(quick)
        both = {n: quick[n] for n in (ACCEPTED, OPTIMIZED) if n in quick}
        for _ in range(RECOUNTS):
            more = len(both) > 1 and counts_more(*(Counts(host_syncs=found[n][0], launches=found[n][1]) for n in both))
            if not self.peers.any(more):
                break
            again = counted(both)
            for name, of in ((ACCEPTED, max), (OPTIMIZED, min)):
                found[name] = (of(found[name][0], again[name][0]), of(found[name][1], again[name][1]))
        self.counted_here |= {n: Counts(host_syncs=c[0], launches=c[1]) for n, c in found.items()}
        most = {n: [int(count) for count in self.peers.slowest(c)] for n, c in found.items()}
        return {n: Counts(host_syncs=most[n][0], launches=most[n][1]) if n in most else Counts() for n in runners}

    def waited(self, wait: Callable[[], bool]) -> bool:
        """Call `wait` and return its result: whether other processes use the device too. If so, record how long it
        waited."""
        began = perf_counter()
        shared = wait()
        if shared:
            known = self.phases.seconds
            known[WAITING] = known.get(WAITING, 0.0) + perf_counter() - began
        return shared


def counts_more(accepted: Counts, optimized: Counts) -> bool:
    """Return whether the optimized side syncs or launches more often."""
    return any(
        before is not None and now is not None and now > before
        for before, now in (
            (accepted.host_syncs, optimized.host_syncs),
            (accepted.launches, optimized.launches),
        )
    )
