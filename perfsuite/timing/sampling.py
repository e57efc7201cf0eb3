"""Time the sides of one workload against each other in one process: block medians and their log-ratios.

The unit is the *ABBA round*: all sides once in a random order, then once in the reverse order, so that a linear drift
of the device cancels in every ratio. A *block* is the median of up to ROUNDS rounds. Between blocks, the inputs are
allocated again, in another order and at other addresses, which removes most of the bias that depends on addresses. A
process has up to BLOCKS blocks. A side that is too slow to repeat is timed only in the first round of each block, or of
a few blocks.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch

from perfsuite.correctness import compilations, execution
from perfsuite.draws import inputs as make
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Condition, Counts
from perfsuite.system.garbage import uncollected
from perfsuite.system.machine import Monitor
from perfsuite.timing import timing_checks
from perfsuite.timing.clocks import QUEUE_DEPTH, CpuClock, CudaClock
from perfsuite.timing.runner import Clock, Runner

ROUNDS = 3
BLOCKS = 16
"""Most blocks of a process. For many kernels, the addresses of buffers change the time by more than two ABBA rounds
differ. So many short blocks are more precise than a few long ones of the same total time."""
BLOCKS_LEAST = 4
BUDGET_S = 4.0
"""Budget for timing in a process, in seconds. If it is too small, a block has fewer ABBA rounds, and then a process has
fewer blocks."""
ALLOCATE_BUDGET_S = 1.0
"""Budget in seconds for allocating inputs and building steps again between blocks. After that, they are kept."""
SAMPLE_S = {"device": 1e-3, "wall": 4e-3}
"""Approximate duration of a sample in seconds, by clock. Short calls are repeated. The host is noisier than the
device."""
MAX_CALLS = {"device": 32, "wall": 64}
HOST_S = 2e-3
"""Limit on the host's time to enqueue a sample on the device clock, in seconds. Beyond it, only the fewest calls are
made."""
FEWEST_CALLS = 4
"""Fewest calls with which the mean of the middle half leaves out the worst call. Half as many if the workload repeats
each call."""
FLUSH_S = 60e-6
SLOW_S = 8e-3
"""Seconds of a call above which a side is timed in only one ABBA round of each block. At 8 ms, all rounds would take
0.9 s."""
VERY_SLOW_S = 0.2
FEW_BLOCKS = 3
EXTRA_BLOCKS = 4
"""Most blocks that are measured again because the device throttled."""
OTHER_CLOCK_SAMPLES = 5
SMALL_BYTES = 1 << 20
"""Inputs up to this number of bytes are allocated again for every ABBA round, because the address of a small buffer
changes the time of a short kernel by 5%."""


class Sampler:
    """Sampler of the times of `runners` on the clock `kind`.

    `masters` are the inputs of each side. `sparse` maps a side to a number of blocks: it is timed only in the first
    ABBA round of these.
    """

    def __init__(
        self,
        runners: dict[str, Runner],
        masters: Mapping[str, Mapping[str, Any]],
        clock: Clock,
        kind: str,
        counts: Mapping[str, Counts],
        rng: random.Random,
        report: Callable[[str], None],
        *,
        repeat: int = 1,
        sparse: Mapping[str, int] | None = None,
    ) -> None:
        self.runners, self.masters, self.clock, self.kind, self.counts = runners, masters, clock, kind, counts
        self.rng, self.report, self.repeat = rng, report, repeat
        self.blocks_s: dict[str, list[float]] = {n: [] for n in runners}
        self.log_ratios: dict[str, list[float]] = {n: [] for n in runners if n != OPTIMIZED}
        self.calls = dict.fromkeys(runners, 1)
        self.few: dict[str, int] = dict(sparse or {})
        """Side → number of blocks in whose first ABBA round it is timed."""
        self.slow: set[str] = set()
        self.blocks, self.rounds = BLOCKS, ROUNDS
        once_s = sum(r.allocate_s + r.side.settle * (r.last.seconds if r.last else 0.0) for r in runners.values())
        (self.allocating_s,) = clock.peers.slowest([once_s])
        """Seconds to allocate the inputs of all sides once, including the calls that a side needs to settle."""
        self.allocated_s = 0.0
        self.small = make.bytes_in(dict(masters[OPTIMIZED])) <= SMALL_BYTES
        self.work: dict[str, list[float]] = {OPTIMIZED: [], REFERENCE: [], ACCEPTED: []}
        """Seconds of work of each timed call of these sides, in order, without calls that were interrupted."""
        self.timed_calls = 0
        self.between_s = 0.0
        """Seconds of the work between the blocks."""
        self.compiled: dict[str, int] = {}

    def run(self, between: Callable[[int], None] = lambda block: None) -> Condition:
        """Time the planned blocks. `between` is called with the number of each block after it."""
        blocks = self.blocks
        index = None if isinstance(self.clock, CpuClock) else torch.cuda.current_device()
        discarded = done = 0
        with uncollected(), Monitor(index) if index is not None else nullcontext() as monitor:
            while done < blocks:
                kept = (
                    {n: list(v) for n, v in self.blocks_s.items()},
                    {n: list(v) for n, v in self.log_ratios.items()},
                )
                self._block(done, self.rounds)
                if monitor is not None:
                    monitor.sample()
                    if self.clock.peers.any(monitor.throttled()) and discarded < EXTRA_BLOCKS:
                        self.blocks_s, self.log_ratios = kept
                        discarded += 1
                        continue
                began = perf_counter()
                between(done)
                self.between_s += perf_counter() - began
                done += 1
            return monitor.condition(set_aside=discarded * self.rounds) if monitor is not None else Condition()

    def add(self, other: Sampler) -> None:
        """Add the results of the sides that only `other` has timed."""
        for name in set(other.runners) - set(self.runners):
            self.runners[name] = other.runners[name]
            self.blocks_s[name] = other.blocks_s[name]
            self.log_ratios[name] = other.log_ratios[name]
            self.calls[name] = other.calls[name]
            self.few |= {n: v for n, v in other.few.items() if n == name}
            self.slow |= other.slow & {name}

    def plan(self, blocks: int = BLOCKS, rounds: int = ROUNDS) -> None:
        """Choose the number of calls per sample, the sides that are too slow to repeat, and the numbers of ABBA rounds
        and blocks, at most as many as given."""
        overhead = FLUSH_S if isinstance(self.clock, CudaClock) else 0.0
        round_s = once_s = 0.0  # seconds of every ABBA round, and of the sides that are timed in one round per block
        for name, runner in self.runners.items():
            self.report(name)
            t = self.sample(name) if runner.long is None else runner.long.seconds
            if t < SLOW_S:
                t = min(t, self.sample(name))
            timed = t * self.repeat + overhead
            calls = max(1, min(MAX_CALLS[self.kind], math.ceil(SAMPLE_S[self.kind] / timed)))
            if self.kind == "device" and isinstance(self.clock, CudaClock):
                fewest = FEWEST_CALLS if self.repeat == 1 else FEWEST_CALLS // 2
                host_s = max(self.clock.host_s(name), 1e-6)
                calls = min(calls, max(fewest, int(HOST_S / host_s)))
                calls = CudaClock.calls_within_queue(calls, self._launches(name))
            self.calls[name] = calls
            if name != OPTIMIZED and t * self.repeat > SLOW_S:
                self.slow.add(name)
            if name != OPTIMIZED and t * self.repeat > VERY_SLOW_S:
                self.few.setdefault(name, FEW_BLOCKS)
            if name in self.slow and name not in self.few:
                once_s += 2 * calls * timed
            elif name not in self.few:
                round_s += 2 * calls * timed
        # The first ABBA round of a block has every side. A further one with only the optimized side would be useless.
        partners = set(self.runners) - {OPTIMIZED} - self.slow - set(self.few)
        self.rounds = max(1, min(rounds, int(BUDGET_S / (blocks * round_s)))) if partners else 1
        fitting = int(BUDGET_S / (self.rounds * round_s + once_s))
        self.blocks = max(min(BLOCKS_LEAST, blocks), min(blocks, fitting))

    def _launches(self, name: str) -> int:
        launches = self.counts[name].launches if name in self.counts else None
        # A side whose launches are not counted must not be queued behind a spin, because it could fill the queue and
        # then wait for the spin.
        return (QUEUE_DEPTH + 1 if launches is None else launches) * self.repeat

    def sample(self, name: str, kind: str | None = None, calls: int | None = None) -> float:
        """Return the seconds per call of one side, over one sample."""
        runner = self.runners[name]
        call = runner.call if self.repeat == 1 else functools.partial(_in_a_row, runner.call, self.repeat)
        before = compilations.graphs()
        with torch.set_grad_enabled(runner.grad_mode):
            seconds = self.clock.sample(
                kind or self.kind, runner.reset, call, calls or self.calls[name], self._launches(name), name
            )
        self.compiled[name] = self.compiled.get(name, 0) + compilations.graphs() - before
        return timing_checks.positive(seconds / self.repeat, name)

    def compiling(self) -> dict[str, str]:
        """Return the sides, except the optimized one, that compiled inside timed calls, each with a message. Their
        times are not valid."""
        counts = self.clock.peers.slowest(list(self.compiled.values()))
        return {
            name: f"compiles inside timed calls ({count:.0f} times): its time is not that of the function"
            for name, count in zip(self.compiled, counts, strict=True)
            if count and name != OPTIMIZED
        }

    def _block(self, block: int, rounds: int) -> None:
        times: dict[str, list[float]] = {n: [] for n in self.runners}
        ratios: dict[str, list[float]] = {n: [] for n in self.log_ratios}
        for number in range(rounds):
            order = [n for n in self.runners if self._joins(n, block, number)]
            # The very first ABBA round uses the inputs that the warm-up has just allocated.
            due = (block, number) != (0, 0) and (number == 0 or self.small)
            if due and self.allocated_s + self.allocating_s <= ALLOCATE_BUDGET_S:
                self._allocate(order)
            self.report("timing")
            self.rng.shuffle(order)
            total = dict.fromkeys(order, 0.0)
            turns = [*order, *(n for n in reversed(order) if n not in self.few)]
            for name in turns:
                total[name] += self.sample(name)
                if name in self.work:
                    self.work[name] += self.clock.work
                self.timed_calls += self.calls[name] if name == OPTIMIZED else 0
            mean = {n: t / turns.count(n) for n, t in total.items()}
            for name, t in mean.items():
                times[name].append(t)
                if name != OPTIMIZED:
                    ratios[name].append(math.log(max(t, 1e-12) / max(mean[OPTIMIZED], 1e-12)))
        for name, values in times.items():
            if values:
                self.blocks_s[name].append(statistics.median(values))
        for name, values in ratios.items():
            if values:
                self.log_ratios[name].append(statistics.median(values))

    def once(self, name: str) -> float:
        """Return the seconds of a single call, without `repeat`."""
        runner = self.runners[name]
        with torch.set_grad_enabled(runner.grad_mode):
            return self.clock.sample(
                self.kind, runner.reset, runner.call, 1, self._launches(name) // self.repeat, f"{name}, once"
            )

    def _allocate(self, names: list[str]) -> None:
        """Allocate new inputs for these sides, in a random order, and make the calls that each needs to settle."""
        began = perf_counter()
        for name in self.rng.sample(names, len(names)):
            self.report(name)
            runner = self.runners[name]
            with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
                runner.allocate(self.masters[name], self.rng)
                if runner.long is not None:
                    continue
                for _ in range(runner.side.settle):
                    runner.reset()
                    runner.call()
        self.clock.synchronize()
        (took,) = self.clock.peers.slowest([perf_counter() - began])
        self.allocating_s, self.allocated_s = max(self.allocating_s, took), self.allocated_s + took

    def _joins(self, name: str, block: int, number: int) -> bool:
        if name in self.few:
            return number == 0 and block < self.few[name]
        return number == 0 or name not in self.slow

    def median(self, name: str) -> float | None:
        """Return the median seconds per call over the blocks; None if the side was not timed."""
        return statistics.median(self.blocks_s[name]) if self.blocks_s[name] else None

    def other_clock(self, name: str) -> float | None:
        """Return the seconds of a call on the other clock, to which the promise does not refer; None if that clock has
        no meaning for this side."""
        if isinstance(self.clock, CpuClock):
            return None
        kind = "wall" if self.kind == "device" else "device"
        if kind == "device" and name in self.counts and self.counts[name].host_syncs:
            return None
        long = self.runners[name].long
        if kind == "wall" and long is not None:
            return long.seconds
        self.report(name)
        calls = self.calls[name]
        if kind == "device":
            calls = CudaClock.calls_within_queue(calls, self._launches(name))
        repeats = 1 if name in self.slow else OTHER_CLOCK_SAMPLES
        return statistics.median(self.sample(name, kind, calls) for _ in range(repeats))


def _in_a_row(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()
