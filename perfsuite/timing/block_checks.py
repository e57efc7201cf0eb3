"""Check between the timed blocks for faults that a side has only while it is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from perfsuite.correctness import execution, forms
from perfsuite.declare.pair import Pair
from perfsuite.draws import inputs as make
from perfsuite.errors import NotEquivalent, PairError
from perfsuite.records import ACCEPTED, OPTIMIZED, REFERENCE, Case
from perfsuite.system import tamper
from perfsuite.timing import timing_checks
from perfsuite.timing.clocks import CpuClock
from perfsuite.timing.output_checks import DrawnInputs, OutputCheck
from perfsuite.timing.peers import ALONE, Peers
from perfsuite.timing.runner import Runner
from perfsuite.timing.sampling import Sampler

SETTLES = "; if a new step's first calls warm up, compile or capture, say how many: stateful(…, settle=calls)"
FRESH_S = 1.0
"""Seconds after which no further values are drawn in advance."""
FRESH_BYTES = 1 << 30
"""Bytes of values after which no further values are drawn in advance."""
FRESH_BLOCKS = {True: 4, False: 8}
"""Number of blocks after which calls on new values are timed, by whether the inputs were proven before. `timing_checks`
needs at least four."""
REPLAY_PAIRS = 8
"""Number of further calls on new values that must confirm a replay before it is reported."""


class NewValues:
    """Inputs that no side can have seen. Some may be drawn in advance, within limits of time and memory."""

    def __init__(self, pair: Pair, case: Case, device: str, home: Path | None, peers: Peers = ALONE) -> None:
        self.pair, self.case, self.device, self.home, self.peers = pair, case, device, home, peers
        self._ahead: list[DrawnInputs] = []

    def draw_ahead(self, count: int) -> None:
        """Draw `count` sets of inputs in advance. Stop earlier, but not before the second set, when FRESH_S or
        FRESH_BYTES is reached."""
        began = perf_counter()
        while len(self._ahead) < count:
            self._ahead.append(self._draw())
            held = make.bytes_in([drawn.values for drawn in self._ahead])
            full = held >= FRESH_BYTES or perf_counter() - began >= FRESH_S
            if self.peers.any(full) and len(self._ahead) > 1:
                break

    @property
    def left(self) -> int:
        """Number of sets drawn in advance that are not used yet."""
        return len(self._ahead)

    def take(self) -> DrawnInputs:
        """Return a set drawn in advance, or else a new one."""
        return self._ahead.pop() if self._ahead else self._draw()

    def _draw(self) -> DrawnInputs:
        return drawn_anew(self.pair, self.case, self.device, self.home, self.peers)


def drawn_anew(pair: Pair, case: Case, device: str, home: Path | None, peers: Peers) -> DrawnInputs:
    """Return values of the case with another seed; for a stateful pair, those of a step's inputs."""
    case = replace(case, seed=peers.bits(31))
    if pair.is_stateful:
        return DrawnInputs(case, peers.part(pair.step_inputs, make.build_step(pair, case, device, 1)))
    return DrawnInputs(case, peers.part(pair.inputs, make.build(pair, case, device, home=home)))


class Watch:
    """Checks after every block, which raise NotEquivalent if a side behaves differently while it is timed.

    With `proven_before`, another process has proven these inputs. Outputs on new values are then not proven here, and
    only values that were drawn in advance are used. Without `values`, no calls on new values are timed.
    """

    def __init__(
        self,
        sampler: Sampler,
        check: OutputCheck,
        l2_bytes: int | None,
        *,
        values: NewValues | None,
        proven_before: bool = False,
    ) -> None:
        self.sampler, self.output, self.l2_bytes, self.proven_before = sampler, check, l2_bytes, proven_before
        self.values = values
        self.pair = check.pair
        self.fresh: list[tuple[float, float]] = []
        self.warm = values.take().values if values else {}
        """New values for calls whose times are discarded."""
        self.where = f"{self.pair.name}: the optimized side"
        self.judged = sampler.rng.randrange(min(sampler.blocks, FRESH_BLOCKS[proven_before]))
        """Number of the block whose outputs are compared with the truth. It is random, so no side can know it."""

    def between(self, block: int) -> None:
        """Run the checks after the given block."""
        tamper.check()
        timing_checks.keeps_l2(self.l2_bytes, self.where)
        runner = self.sampler.runners[OPTIMIZED]
        timing_checks.plain(runner.returned, self.where)
        if block in (self.judged, self.sampler.blocks - 1) and not self.pair.is_stateful:
            check_timed(self.output, self.sampler.runners, self.sampler)
            if not self.proven_before:  # the truth is already computed, so the comparison is fast
                judge_copied(self.output)
        if self.values and block < FRESH_BLOCKS[self.proven_before] and (self.values.left or not self.proven_before):
            self._time_new_values(runner, self.values.take(), block)
        if block == 0:
            self._first(runner)

    def _time_new_values(self, runner: Runner, drawn: DrawnInputs, block: int | None = None) -> None:
        """Time a call on values that the side cannot have seen, and the same call again."""
        values = drawn.values
        stateful = self.pair.is_stateful
        old = runner.step_master if stateful else dict(self.sampler.masters[OPTIMIZED])
        pairs = zip(make.tensors_in(values), make.tensors_in(old), strict=True)
        if all(forms.identical(new, known) for (_, new), (_, known) in pairs):
            return  # constant or recorded inputs, which have no other values
        times = []
        with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
            # The times of the first calls are discarded, because the CPU caches are still full of the harness's data.
            # Their number is random, because the time of a side may vary from call to call in a fixed cycle. Nothing is
            # written before the last call, so that a replay is possible.
            for given in (*[self.warm] * self.sampler.rng.randint(1, 3), values, None):
                if given is not None:
                    runner.refill(given)
                times.append(self.sampler.once(OPTIMIZED))
            self.fresh.append((times[-2], times[-1]))
            prove = not self.proven_before and block == self.judged and REFERENCE not in self.sampler.few
            if prove and not stateful:
                prove_new(self.output, runner, drawn)
            runner.refill(old)
        if stateful:
            self._keep_in_step(len(times))

    def _keep_in_step(self, calls: int) -> None:
        """Call the other sides as many times as the optimized side was called here, without recording times.

        Steps may vary in a fixed cycle, such as an evaluation in every eighth, so sides must be compared at the same
        step.
        """
        for name, runner in self.sampler.runners.items():
            if name == OPTIMIZED or name in self.sampler.few:
                continue
            with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
                for _ in range(calls):
                    self.sampler.once(name)

    def _first(self, runner: Runner) -> None:
        with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
            if not self.pair.is_stateful:
                runner.reset()
                self.sampler.clock.synchronize()
                runner.call()
                timing_checks.settled(runner.leaves(), self.where)
            if self.sampler.kind == "device":
                seen = self.sampler.once(OPTIMIZED)
                unseen = timing_checks.unseen_seconds(self.sampler.clock, runner.reset, runner.call)
                timing_checks.hidden(unseen, seen, self.where)

    def _beside(self, typical: float) -> Sequence[float]:
        """Return the work of other calls on the same machine. If these have bursts too, the machine is the cause."""
        other = max((self.sampler.work[name] for name in (REFERENCE, ACCEPTED)), key=len)
        on_cpu = isinstance(self.sampler.clock, CpuClock)
        if len(other) >= timing_checks.BURST_CALLS and not on_cpu:
            return other
        even = self.sampler.clock.even_work(typical, 4 * timing_checks.BURST_CALLS)
        # On a CPU, short calls have relatively larger disturbances than long ones, such as page faults.
        return max(other, even, key=timing_checks.burst_share) if on_cpu else even

    def _prove_replay(self) -> None:
        """Time further calls on new values. Raises NotTimed if they confirm that the side replays earlier answers."""
        assert self.values is not None  # calls on new values have been timed
        self.fresh.clear()
        for _ in range(REPLAY_PAIRS):
            self._time_new_values(self.sampler.runners[OPTIMIZED], self.values.take())
        timing_checks.replayed(self.fresh, self.sampler.kind, self.where)

    def conclude(self) -> None:
        """Check for faults that can only be detected in all blocks together."""
        work = self.sampler.work[OPTIMIZED]
        if timing_checks.is_quiet(work, self.sampler.timed_calls):
            if timing_checks.replays(self.fresh, self.sampler.kind):
                self._prove_replay()
            remedy = SETTLES if self.pair.is_stateful else ""
            least_s = timing_checks.CPU_BURST_S if isinstance(self.sampler.clock, CpuClock) else 0.0
            timing_checks.bursts(work, self.where, self._beside, remedy, least_s)
        for name in (REFERENCE, OPTIMIZED, ACCEPTED):
            count = self.sampler.compiled.get(name)
            if count:
                text = f"{self.pair.name}: the {name} side compiles inside timed calls ({count} times)"
                if name == REFERENCE:
                    raise PairError(f"{text}: a slow straw man; give it static shapes, or compile it beforehand")
                raise NotEquivalent(f"{text}: its time is not that of the function")


def prove_new(output: OutputCheck, runner: Runner, drawn: DrawnInputs) -> None:
    """Check that the side is also right on new values, which were written into the memory of the proven ones."""
    runner.reset()
    runner.call()
    try:
        output.hold_new(runner.leaves(), drawn)
    except NotEquivalent as error:
        raise NotEquivalent(
            f"{error}; it was right on the values it was proven with, and is not on new ones in the same memory"
        ) from None


def check_timed(output: OutputCheck, runners: dict[str, Runner], sampler: Sampler) -> None:
    """Check that the outputs of the last timed call are right, not only those of a separate run, and that its inputs
    did not change.

    Outputs that are not known to be right are copied. `judge_copied` compares them later, when no other process waits
    for the device.
    """
    pair = output.pair
    for name, runner in runners.items():
        master = sampler.masters[name]
        given = {name_: runner.inputs[name_] for name_ in master}
        for (path, after), (_, before) in zip(make.unchanging(pair, given), make.unchanging(pair, master), strict=True):
            if not forms.identical(after, before):
                words = make.undeclared_change(pair, path, after, when=" while it is timed")
                raise NotEquivalent(f"{pair.name}: the {name} side {words}")
        if name == REFERENCE:
            continue
        if sampler.repeat > 1 and pair.changed:
            # Repeated calls in place start from the previous result, so one more call from the start is compared.
            with torch.set_grad_enabled(runner.grad_mode):
                runner.reset()
                runner.call()
        with _was_right():
            output.check_later(runner.leaves(), f"timed {name}")


def judge_copied(output: OutputCheck) -> None:
    """Compare the outputs that `check_timed` has copied with the truth."""
    with _was_right():
        output.check_copied()


@contextmanager
def _was_right() -> Iterator[None]:
    try:
        yield
    except NotEquivalent as error:
        raise NotEquivalent(f"{error}; it was right before it was timed") from None
