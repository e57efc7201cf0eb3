"""Time the sides of one workload against each other in one process: a `Measurement`.

The unit is the *quad*: all sides once in a random order, then once in the reverse order, so that a linear drift of
the device cancels in every ratio. The median of QUADS quads is a *block*; between blocks the inputs are allocated
afresh, in another order and at other addresses, which removes most of the bias that lasts a buffer's life. BLOCKS
blocks are a process. A side too slow to repeat joins the first quad of each block only, or of a few.

Nothing is timed before every side's outputs on the very inputs timed have been proven equal.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import secrets
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from perfsuite import anchors, ceilings, equivalence, execution, guard, scrutiny
from perfsuite import inputs as make
from perfsuite.clocks import QUEUE_DEPTH, CpuClock, CudaClock, clock_for
from perfsuite.counting import COUNTED_S, count_calls
from perfsuite.errors import PairError
from perfsuite.integrity.calls import comes_late, late_message
from perfsuite.machine import Monitor
from perfsuite.pair import Pair, Side, Workload, as_side
from perfsuite.records import Case, Condition, Evidence, Limit, Measurement, SideRecord

QUADS = 7
BLOCKS = 8
WARMUP_CALLS = 3
SAMPLE_S = {"device": 1e-3, "wall": 4e-3}
"""A sample repeats a short call until it spans about this long; the host is noisier than the device."""
MAX_CALLS = {"device": 32, "wall": 64}
HOST_S = 2e-3
"""On the device clock a sample lasts as long as the host needs to enqueue it: past this, only the fewest calls."""
FEWEST_CALLS = 4
"""Enough for the mean of the middle half to leave out the worst; half of it where each call repeats by itself."""
FLUSH_S = 60e-6
SLOW_S = 8e-3
"""A side slower than this a call joins one quad a block; at 8 ms a full share would take 0.9 s."""
VERY_SLOW_S = 0.2
FEW_BLOCKS = 3
RIVAL_BLOCKS, RIVAL_QUADS = 2, 4
"""Rivals are timed against the optimized side afterwards: what is gated must not depend on which rivals there are."""
LONG_S = 1.0
"""A call that takes longer, again on the same inputs too, is made for as few purposes as will do."""
UNCOUNTED = (0, QUEUE_DEPTH + 1)
"""No sync is known, and its launches are not put behind a spin."""
EXTRA_BLOCKS = 4
"""Blocks measured again at most, for those set aside because the device throttled."""
OTHER_CLOCK_SAMPLES = 5
SMALL_BYTES = 1 << 20
"""Inputs up to this size are allocated afresh for every quad: where a small buffer lies moves a short kernel by 5%."""
REPLICAS_UP_TO = 1 << 16
"""Above this many elements the reference's error is well known from one draw."""
SETTLES = "; if a new step's first calls warm up, compile or capture, say how many: stateful(…, settle=calls)"
WAITS = "waits for the device within a call, in the driver perhaps, so that it has no time on the device clock"
OPTIMIZED, REFERENCE, ACCEPTED = "optimized", "reference", "accepted"


@dataclass(frozen=True, slots=True)
class _Call:
    seconds: float
    """On the wall clock."""
    peak_bytes: int | None


@dataclass(slots=True)
class Runner:
    """One side on its own copy of the inputs, ready to be called again and again."""

    name: str
    side: Side
    pair: Pair
    case: Case
    direction: str
    device: str
    step_master: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    call: Callable[[], object] = lambda: None
    reset: Callable[[], None] = lambda: None
    returned: Any = None
    gradients: Any = None
    marked: dict[str, torch.Tensor] = field(default_factory=dict)
    padding: Any = None
    arguments: tuple[Any, ...] = ()
    restored: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(input that a call changes, what it is set back to before the next)."""
    incoming: list[torch.Tensor] | None = None
    """The gradients of its outputs."""
    long: _Call | None = None
    """The last call while warming up, if all took more than LONG_S: it tells what others would be made for."""

    def allocate(self, master: Mapping[str, Any], rng: random.Random) -> None:
        """Fresh copies of the inputs, at other addresses than before."""
        before = self.inputs
        self.returned = self.gradients = None
        self.padding = torch.empty(512 * rng.randint(1, 4096), dtype=torch.uint8, device=self.device)
        self.inputs = make.clone(dict(master))
        del before
        self._bind(master)

    def _bind(self, master: Mapping[str, Any]) -> None:
        function = execution.callable_of(self.side)
        if self.pair.is_stateful:
            step = function(*self.inputs.values())
            arguments = self.arguments = tuple(make.clone(self.step_master).values())
            self.call, self.reset = lambda: step(*arguments), lambda: None
            return
        arguments = tuple(self.inputs.values())
        self._restore_from(master)
        if self.direction == "forward":
            self.call, self.reset = self._forward(function, arguments), self._restore
            return
        self.marked = execution.require_gradients(self.pair, self.inputs)
        leaves = list(self.marked.values())
        if self.long is None or self.incoming is None:
            sample = dict(execution.flatten(function(*arguments)))
            outputs, self.incoming = execution.incoming(sample, self.case.seed)
            if not outputs or not leaves:
                raise PairError(
                    f"{self.pair.name}: direction={self.direction!r}, but no output depends on an input's gradient"
                )
            del sample, outputs
        weights = self.incoming

        def forward() -> list[torch.Tensor]:
            self.returned = function(*arguments)
            return [o for _, o in execution.flatten(self.returned) if isinstance(o, torch.Tensor) and o.requires_grad]

        if self.direction == "both":

            def both() -> object:
                self.gradients = torch.autograd.grad(forward(), leaves, weights, allow_unused=True)
                return self.gradients

            self.call, self.reset = both, self._restore
            return
        pending: list[torch.Tensor] = []

        def before() -> None:
            self._restore()
            pending[:] = forward()

        def backward() -> object:
            self.gradients = torch.autograd.grad(pending, leaves, weights, allow_unused=True)
            return self.gradients

        self.call, self.reset = backward, before

    def _forward(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], object]:
        def forward() -> object:
            self.returned = function(*arguments)
            return self.returned

        return forward

    def _restore(self) -> None:
        self.returned = self.gradients = None
        for tensor, original in self.restored:
            tensor.detach().copy_(original)

    def _restore_from(self, values: Mapping[str, Any]) -> None:
        self.restored = [
            (tensor, original)
            for name in sorted({*self.pair.mutates, *self.pair.writes})
            for (_, tensor), (_, original) in zip(
                make.tensors_in(self.inputs[name]), make.tensors_in(values[name]), strict=True
            )
        ]

    def refill(self, values: Mapping[str, Any]) -> None:
        """Other values in the same memory: the next call finds all but the values as the last one did."""
        self.returned = self.gradients = None
        if self.pair.is_stateful:
            make.copy_values(self.arguments, tuple(values.values()))
            return
        self._restore_from(values)
        make.copy_values(self.inputs, dict(values))

    def leaves(self) -> execution.Leaves:
        """What the last timed call produced, to be held against the truth."""
        leaves = execution._with_changed(self.pair, self.inputs, self.returned)
        if self.gradients is not None:
            leaves |= {f"gradient of {p}": g for p, g in zip(self.marked, self.gradients, strict=True)}
        return {n: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for n, leaf in leaves.items()}

    @property
    def grad_mode(self) -> bool:
        return self.direction != "forward"


def measure(
    pair: Pair,
    workload: Workload,
    *,
    workload_id: str,
    device: str,
    home: Path | None = None,
    accepted: Side | None = None,
    with_rivals: bool = True,
    counts: Mapping[str, tuple[int, int]] | None = None,
    seed: int | None = None,
    report: Callable[[str], None] = lambda phase: None,
) -> Measurement:
    """Prove and time one workload. `accepted`, the accepted revision's optimized side, joins the two; then no rivals.

    Host syncs and launches are counted unless `counts` has them from an earlier process; then peak memory, the limit
    and the other clock are left to that process too. `report` is told which side is about to run, so that a crash or a
    hang can be laid at its door. NotEquivalent where the optimized side is not the same function; PairError where the
    workload cannot be timed as declared.
    """
    began = perf_counter()
    guard.check()
    l2_bytes = scrutiny.persisting_l2_bytes()  # before any side has run
    seed = secrets.randbits(31) if seed is None else seed
    dtype = workload.dtype or pair.dtypes[0]
    case = make.workload_case(workload, dtype, seed)
    execution.forget_compiled()
    gc.collect()  # an earlier workload's tensors may hang in reference cycles
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    rivals = {n: as_side(s) for n, s in pair.rivals.items()} if with_rivals else {}
    sides = {REFERENCE: as_side(pair.reference), OPTIMIZED: as_side(pair.optimized)}
    sides |= rivals if accepted is None else {ACCEPTED: accepted, **rivals}
    skipped: dict[str, str] = {}
    for name in rivals:
        reason = execution.unavailable(sides[name], device)
        if reason is not None:
            skipped[name] = reason
    master = make.build(pair, case, device, home=home)
    step_master = make.build_step(pair, case, device, 1) if pair.is_stateful else {}
    report(REFERENCE)
    gradients = workload.direction != "forward"
    timed = replace(pair, steps=(1, 2)) if pair.is_stateful else pair
    truth = _truth(timed, case, master, device, gradients, home)
    evidence = _prove(timed, sides, skipped, truth, case, device, gradients, home, report)
    live = {n: s for n, s in sides.items() if n not in skipped}
    rng = random.Random(secrets.randbits(64))
    runners = {
        name: Runner(
            name=name,
            side=side,
            pair=pair,
            case=case,
            direction=workload.direction,
            device=device,
            step_master=step_master,
        )
        for name, side in live.items()
    }
    clock = clock_for(device)
    first = counts is None
    seconds = _warm_up(runners, master, rng, clock, report)
    scrutiny.keeps_l2(l2_bytes, f"{pair.name}: the optimized side")
    if counts is None and isinstance(clock, CudaClock):
        report("profiler")
        counts = _counted(runners, seconds)
    elif counts is not None:
        # The accepted side is another optimized one; what else is missing has not been counted then either.
        counts = {n: counts.get(n, counts[OPTIMIZED] if n == ACCEPTED else UNCOUNTED) for n in runners}
    kind = _clock_kind(pair, workload, clock, counts, runners, skipped)
    runners = {n: r for n, r in runners.items() if n not in skipped}
    peaks = {n: _peak_bytes(r, clock, report) if first else None for n, r in runners.items()}
    gated = {n: r for n, r in runners.items() if n not in rivals}
    sampler = _Sampler(gated, master, clock, kind, counts, rng, workload.repeat, report)
    watch = _Watch(timed, workload, case, sampler, truth, home, l2_bytes)
    condition = sampler.run(BLOCKS, watch.between)
    for name in sorted(clock.waiting & set(gated)):
        raise PairError(f"{pair.name}, workload {workload.name!r}: the {name} side {WAITS}; say clock='wall'")
    watch.conclude()
    beside_it = anchors.measure(device)
    if len(runners) > len(gated):
        others = {n: r for n, r in runners.items() if n in rivals or n == OPTIMIZED}
        beside = _Sampler(others, master, clock, kind, counts, rng, workload.repeat, report)
        beside.run(RIVAL_BLOCKS, quads=RIVAL_QUADS)
        skipped |= beside.compiling()
        skipped |= dict.fromkeys(clock.waiting & set(rivals), WAITS)
        sampler.add(beside)
        runners = {n: r for n, r in runners.items() if n not in skipped}
        if not pair.is_stateful:
            _judge_timed(timed, {n: runners[n] for n in others if n in runners}, truth, master, workload.repeat)
    del truth
    other = {n: sampler.other_clock(n) if first else None for n in runners}
    limit = _limit(pair, workload, dtype, device) if first else None
    if limit is not None:
        on_device = sampler.median(OPTIMIZED) if kind == "device" else other[OPTIMIZED] or sampler.median(OPTIMIZED)
        scrutiny.floor(limit, on_device or math.inf, device, f"{pair.name}: the optimized side")
    guard.check()
    return Measurement(
        id=workload_id,
        pair=pair.name,
        workload=workload.name,
        device=device,
        clock=kind,
        direction=workload.direction,
        dtype=dtype,
        sizes={**workload.sizes, **({"repeat": workload.repeat} if workload.repeat > 1 else {})},
        seed=seed,
        sides={
            n: SideRecord(
                device_s=sampler.median(n) if kind == "device" else other[n],
                wall_s=sampler.median(n) if kind == "wall" else other[n],
                blocks_s=tuple(sampler.blocks_s[n]),
                peak_bytes=peaks[n],
                host_syncs=counts[n][0] if first and counts and counts[n] is not UNCOUNTED else None,
                launches=counts[n][1] if first and counts and counts[n] is not UNCOUNTED else None,
            )
            for n in runners
        },
        log_ratios={n: tuple(v) for n, v in sampler.log_ratios.items() if n in runners},
        few=tuple(sorted(sampler.few)),
        skipped=skipped,
        limit=limit,
        condition=condition,
        anchors=beside_it,
        seconds=perf_counter() - began,
        evidence=evidence,
    )


# --- before anything is timed --------------------------------------------------------------------------------


def _truth(
    pair: Pair, case: Case, master: Mapping[str, Any], device: str, gradients: bool, home: Path | None
) -> equivalence.Truth:
    elements = sum(t.numel() for _, t in make.tensors_in(dict(master)))
    replicas = equivalence.REPLICAS if elements <= REPLICAS_UP_TO and not pair.is_stateful else 0
    try:
        return equivalence.establish(pair, case, device, gradients=gradients, home=home, replicas=replicas)
    except equivalence.Discard:
        raise PairError(
            f"{pair.name}: the reference overflows on the workload's own inputs; "
            f"bound them with values=floats(low, high)"
        ) from None


def _prove(
    pair: Pair,
    sides: Mapping[str, Side],
    skipped: dict[str, str],
    truth: equivalence.Truth,
    case: Case,
    device: str,
    gradients: bool,
    home: Path | None,
    report: Callable[[str], None],
) -> Evidence:
    tally = equivalence.Tally(draws=1)
    for name, side in sides.items():
        if name == REFERENCE or name in skipped:
            continue
        report(name)
        try:
            produced = equivalence.produce(pair, side, case, device, gradients=gradients, home=home)
            equivalence.judge(
                pair, truth, produced, name=name, tally=tally if name == OPTIMIZED else None, strict_strides=False
            )
        except equivalence.NotEquivalent as error:
            if name in (OPTIMIZED, ACCEPTED):
                if comes_late(pair, side, case, device, truth, gradients=gradients, home=home):
                    text = f"{pair.name}: the {name} side {late_message('its output')}: {error}"
                    raise equivalence.NotEquivalent(text) from None
                raise
            skipped[name] = f"not equal, so not timed: {error}"
        except torch.OutOfMemoryError:
            if name in (OPTIMIZED, ACCEPTED):
                raise
            skipped[name] = "runs out of memory"
        except Exception as error:
            if name in (OPTIMIZED, ACCEPTED):
                raise
            lines = str(error).strip().splitlines() or [""]
            skipped[name] = f"raises {type(error).__name__}: {lines[0][:200]}"
    return tally.evidence(pair, case.dtype, device)


def _warm_up(
    runners: Mapping[str, Runner],
    master: Mapping[str, Any],
    rng: random.Random,
    clock: CpuClock | CudaClock,
    report: Callable[[str], None],
) -> dict[str, float]:
    """Run each side a few times; how many seconds its last call took."""
    seconds = {}
    for name, runner in runners.items():
        report(name)
        runner.allocate(master, rng)
        before = scrutiny.compilations()
        with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
            calls: list[_Call] = []
            while len(calls) < max(WARMUP_CALLS, runner.side.settle):
                calls.append(_called(runner, clock))
                # One more than settle it: the first on new inputs may tune or capture.
                if len(calls) > runner.side.settle and sum(c.seconds for c in calls) > LONG_S:
                    break
            runner.reset()
        seconds[name] = calls[-1].seconds
        # Every one: one alone may have been held up.
        is_long = min(c.seconds for c in calls) > LONG_S and scrutiny.compilations() == before
        if is_long and not runner.pair.is_stateful:
            runner.long = calls[-1]
    return seconds


def _called(runner: Runner, clock: CpuClock | CudaClock) -> _Call:
    on_cuda = isinstance(clock, CudaClock)
    runner.reset()
    clock.synchronize()
    held = 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    called = perf_counter()
    runner.call()
    clock.synchronize()
    took = perf_counter() - called
    return _Call(took, torch.cuda.max_memory_allocated() - held if on_cuda else None)


def _counted(runners: Mapping[str, Runner], seconds: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Host syncs and launches of one call of each side; UNCOUNTED where it takes too long for the profiler."""
    quick = {n: r for n, r in runners.items() if n == OPTIMIZED or seconds[n] <= COUNTED_S}
    with torch.set_grad_enabled(any(r.grad_mode for r in quick.values())):
        counts = count_calls({n: (r.reset, r.call) for n, r in quick.items()})
    return {n: counts.get(n, UNCOUNTED) for n in runners}


def _clock_kind(
    pair: Pair,
    workload: Workload,
    clock: CpuClock | CudaClock,
    counts: Mapping[str, tuple[int, int]] | None,
    runners: Mapping[str, Runner],
    skipped: dict[str, str],
) -> str:
    if isinstance(clock, CpuClock) or counts is None:
        return "wall"
    if workload.clock == "device":
        for name in runners:
            syncs = counts[name][0]
            if not syncs:
                continue
            if name in (REFERENCE, OPTIMIZED, ACCEPTED):
                raise PairError(
                    f"{pair.name}, workload {workload.name!r}: the {name} side makes {syncs} host sync"
                    f"{'s' * (syncs > 1)} a call, so that the device clock has no meaning; say clock='wall'"
                )
            skipped[name] = f"makes {syncs} host syncs a call: it has no time on the device clock"
    return workload.clock


def _peak_bytes(runner: Runner, clock: CpuClock | CudaClock, report: Callable[[str], None]) -> int | None:
    if isinstance(clock, CpuClock):
        return None
    if runner.long is not None:
        return runner.long.peak_bytes
    report(runner.name)
    with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
        return _called(runner, clock).peak_bytes


def _judge_timed(
    pair: Pair, runners: Mapping[str, Runner], truth: equivalence.Truth, master: Mapping[str, Any], repeat: int
) -> None:
    """The outputs of the last timed call, not only those of a separate run, must be right; its inputs untouched."""
    declared = {*pair.mutates, *pair.writes}
    for name, runner in runners.items():
        for given in sorted(set(master) - declared):
            pairs = zip(make.tensors_in(runner.inputs[given], given), make.tensors_in(master[given]), strict=True)
            for (path, after), (_, before) in pairs:
                if not equivalence.identical(after, before):
                    raise equivalence.NotEquivalent(
                        f"{pair.name}: the {name} side changes its input {path} in place while it is timed, which the "
                        f"pair does not declare; add it to mutates="
                    )
        if name == REFERENCE:
            continue
        if repeat > 1 and declared:
            # Repeated in place, the timed calls went on from one another: one more from the start is judged.
            with torch.set_grad_enabled(runner.grad_mode):
                runner.reset()
                runner.call()
        try:
            equivalence.judge(pair, truth, runner.leaves(), name=f"timed {name}", strict_strides=False)
        except equivalence.NotEquivalent as error:
            raise equivalence.NotEquivalent(f"{error}; it was right before it was timed") from None


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
        if device == "cpu":  # whose own products in half precision may be far slower than those of what is widened
            precisions.add(pair.cost.precision)
        rate = max(ceilings.matmul_flops_per_s(device, precision) for precision in precisions)
        bounds.append((operations / rate, "compute", rate))
    if not bounds:
        return None
    seconds, by, rate = max(bounds)
    return Limit(seconds=seconds, by=by, bytes=moved, flops=operations, ceiling=rate)


# --- timing --------------------------------------------------------------------------------------------------


def _in_a_row(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


class _Sampler:
    def __init__(
        self,
        runners: dict[str, Runner],
        master: Mapping[str, Any],
        clock: CpuClock | CudaClock,
        kind: str,
        counts: Mapping[str, tuple[int, int]] | None,
        rng: random.Random,
        repeat: int,
        report: Callable[[str], None],
    ) -> None:
        self.repeat = repeat
        self.runners, self.master, self.clock = runners, master, clock
        self.kind, self.counts, self.rng, self.report = kind, counts, rng, report
        self.blocks_s: dict[str, list[float]] = {n: [] for n in runners}
        self.log_ratios: dict[str, list[float]] = {n: [] for n in runners if n != OPTIMIZED}
        self.calls = dict.fromkeys(runners, 1)
        self.few: set[str] = set()
        self.slow: set[str] = set()
        held = sum(t.numel() * t.element_size() for _, t in make.tensors_in(dict(master)))
        self.small = held <= SMALL_BYTES
        self.work: dict[str, list[float]] = {OPTIMIZED: [], REFERENCE: []}
        """What the timed calls of these sides took, in order, but for those that were interrupted."""
        self.timed_calls = 0
        self.compiled: dict[str, int] = {}

    def run(self, blocks: int, between: Callable[[int], None] = lambda block: None, *, quads: int = QUADS) -> Condition:
        """Time the blocks; `between` is called after each with its number."""
        self._plan()
        index = None if isinstance(self.clock, CpuClock) else torch.cuda.current_device()
        set_aside = done = 0
        collecting = gc.isenabled()
        gc.disable()
        try:
            with Monitor(index) if index is not None else nullcontext() as monitor:
                while done < blocks:
                    kept = (
                        {n: list(v) for n, v in self.blocks_s.items()},
                        {n: list(v) for n, v in self.log_ratios.items()},
                    )
                    self._block(done, quads)
                    if monitor is not None:
                        monitor.sample()
                        if monitor.throttled() and set_aside < EXTRA_BLOCKS:
                            self.blocks_s, self.log_ratios = kept
                            set_aside += 1
                            continue
                    between(done)
                    done += 1
                return monitor.condition(set_aside=set_aside * quads) if monitor is not None else Condition()
        finally:
            if collecting:
                gc.enable()

    def add(self, other: _Sampler) -> None:
        """Take over the sides that only `other` has timed."""
        for name in set(other.runners) - set(self.runners):
            self.runners[name] = other.runners[name]
            self.blocks_s[name] = other.blocks_s[name]
            self.log_ratios[name] = other.log_ratios[name]
            self.calls[name] = other.calls[name]
            self.few |= other.few & {name}
            self.slow |= other.slow & {name}

    def _plan(self) -> None:
        """How long each side takes, and so how many calls make a sample and which sides are too slow to repeat."""
        overhead = FLUSH_S if isinstance(self.clock, CudaClock) else 0.0
        for name in self.runners:
            self.report(name)
            long = self.runners[name].long
            t = self._sample(name) if long is None else long.seconds
            if t < SLOW_S:
                t = min(t, self._sample(name))
            timed = t * self.repeat + overhead
            calls = max(1, min(MAX_CALLS[self.kind], math.ceil(SAMPLE_S[self.kind] / timed)))
            if self.kind == "device" and isinstance(self.clock, CudaClock):
                fewest = FEWEST_CALLS if self.repeat == 1 else FEWEST_CALLS // 2
                host_s = max(self.clock.host_s(name), 1e-6)
                calls = min(calls, max(fewest, int(HOST_S / host_s)))
                calls = CudaClock.calls_within_queue(calls, self._launches(name))
            self.calls[name] = calls
            if name == OPTIMIZED:
                continue
            if t * self.repeat > SLOW_S:
                self.slow.add(name)
            if t * self.repeat > VERY_SLOW_S:
                self.few.add(name)

    def _launches(self, name: str) -> int:
        return self.counts[name][1] * self.repeat if self.counts is not None else 0

    def _sample(self, name: str, kind: str | None = None, calls: int | None = None) -> float:
        runner = self.runners[name]
        call = runner.call if self.repeat == 1 else functools.partial(_in_a_row, runner.call, self.repeat)
        before = scrutiny.compilations()
        with torch.set_grad_enabled(runner.grad_mode):
            seconds = self.clock.sample(
                kind or self.kind, runner.reset, call, calls or self.calls[name], self._launches(name), name
            )
        self.compiled[name] = self.compiled.get(name, 0) + scrutiny.compilations() - before
        return scrutiny.positive(seconds / self.repeat, name)

    def compiling(self) -> dict[str, str]:
        """The sides that compiled inside timed calls, each with that as the reason not to trust its time."""
        return {
            name: f"compiles inside timed calls ({count} times): its time is not that of the function"
            for name, count in self.compiled.items()
            if count and name != OPTIMIZED
        }

    def _block(self, block: int, quads: int) -> None:
        times: dict[str, list[float]] = {n: [] for n in self.runners}
        ratios: dict[str, list[float]] = {n: [] for n in self.log_ratios}
        for quad in range(quads):
            order = [n for n in self.runners if self._joins(n, block, quad)]
            if quad == 0 or self.small:
                self._allocate(order)
            self.report("timing")
            self.rng.shuffle(order)
            total = dict.fromkeys(order, 0.0)
            turns = [*order, *(n for n in reversed(order) if n not in self.few)]
            for name in turns:
                total[name] += self._sample(name)
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
        """Seconds of one call by itself, whatever `repeat` says."""
        runner = self.runners[name]
        with torch.set_grad_enabled(runner.grad_mode):
            return self.clock.sample(
                self.kind, runner.reset, runner.call, 1, self._launches(name) // self.repeat, f"{name}, once"
            )

    def _allocate(self, names: list[str]) -> None:
        """Fresh inputs for these sides, in a random order, and the calls that each needs to settle."""
        for name in self.rng.sample(names, len(names)):
            self.report(name)
            runner = self.runners[name]
            with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
                runner.allocate(self.master, self.rng)
                if runner.long is not None:
                    continue
                for _ in range(runner.side.settle):
                    runner.reset()
                    runner.call()

    def _joins(self, name: str, block: int, quad: int) -> bool:
        if name in self.few:
            return quad == 0 and block < FEW_BLOCKS
        return quad == 0 or name not in self.slow

    def median(self, name: str) -> float | None:
        return statistics.median(self.blocks_s[name]) if self.blocks_s[name] else None

    def other_clock(self, name: str) -> float | None:
        """The clock that the promise is not on, where it has a meaning for this side."""
        if isinstance(self.clock, CpuClock):
            return None
        kind = "wall" if self.kind == "device" else "device"
        if kind == "device" and self.counts is not None and self.counts[name][0]:
            return None
        long = self.runners[name].long
        if kind == "wall" and long is not None:
            return long.seconds
        self.report(name)
        calls = self.calls[name]
        if kind == "device":
            calls = CudaClock.calls_within_queue(calls, self._launches(name))
        repeats = 1 if name in self.slow else OTHER_CLOCK_SAMPLES
        return statistics.median(self._sample(name, kind, calls) for _ in range(repeats))


class _Watch:
    """Looks, between blocks, for what a side does only while it is timed."""

    def __init__(
        self,
        pair: Pair,
        workload: Workload,
        case: Case,
        sampler: _Sampler,
        truth: equivalence.Truth,
        home: Path | None,
        l2_bytes: int | None,
    ) -> None:
        self.pair, self.workload, self.case, self.home = pair, workload, case, home
        self.sampler, self.truth = sampler, truth
        self.fresh: list[tuple[float, float]] = []
        self.l2_bytes = l2_bytes
        self.where = f"{pair.name}: the optimized side"
        self.judged = sampler.rng.randrange(BLOCKS)
        """The block whose outputs are held against the truth: nobody can know which."""

    def between(self, block: int) -> None:
        guard.check()
        scrutiny.keeps_l2(self.l2_bytes, self.where)
        runner = self.sampler.runners[OPTIMIZED]
        if block in (self.judged, BLOCKS - 1) and not self.pair.is_stateful:
            _judge_timed(self.pair, self.sampler.runners, self.truth, self.sampler.master, self.workload.repeat)
        with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
            self._new_values(runner, block)
        if block == 0:
            self._first(runner)

    def _new_values(self, runner: Runner, block: int) -> None:
        """Time a call on values that it cannot have seen, and the same again."""
        stateful = self.pair.is_stateful
        old = runner.step_master if stateful else dict(self.sampler.master)
        warm, values = self._draw(runner), self._draw(runner)
        pairs = zip(make.tensors_in(values), make.tensors_in(old), strict=True)
        if all(equivalence.identical(new, known) for (_, new), (_, known) in pairs):
            return  # constant or recorded inputs: there are no others
        times = []
        # The first is not kept: it finds the processor's caches full of what the harness did before.
        for given in (warm, values, None):
            if (
                given is not None
            ):  # the last time nothing is written: as in the timed calls, a replay finds all as it was
                runner.refill(given)
            times.append(self.sampler.once(OPTIMIZED))
        self.fresh.append((times[1], times[2]))
        if block == self.judged and not stateful and REFERENCE not in self.sampler.few:
            self._judge_new(runner, values)
        runner.refill(old)

    def _draw(self, runner: Runner) -> dict[str, Any]:
        case = replace(self.case, seed=secrets.randbits(31))
        if self.pair.is_stateful:
            return make.build_step(self.pair, case, runner.device, 1)
        return make.build(self.pair, case, runner.device, home=self.home)

    def _judge_new(self, runner: Runner, values: dict[str, Any]) -> None:
        try:
            truth = equivalence.establish(
                self.pair, self.case, runner.device, gradients=runner.grad_mode, replicas=0, drawn=values
            )
        except equivalence.Discard:
            return
        runner.reset()
        runner.call()
        try:
            equivalence.judge(self.pair, truth, runner.leaves(), name="timed optimized", strict_strides=False)
        except equivalence.NotEquivalent as error:
            raise equivalence.NotEquivalent(
                f"{error}; it was right on the values it was proven with, and is not on new ones in the same memory"
            ) from None

    def _first(self, runner: Runner) -> None:
        with execution.quiet(runner.side), torch.set_grad_enabled(runner.grad_mode):
            if not self.pair.is_stateful:
                runner.reset()
                self.sampler.clock.synchronize()
                runner.call()
                scrutiny.returned(runner.leaves(), self.where)
            if self.sampler.kind == "device":
                seen = self.sampler.once(OPTIMIZED)
                unseen = scrutiny.unseen_seconds(self.sampler.clock, runner.reset, runner.call)
                scrutiny.hidden(unseen, seen, self.where)

    def _beside(self, typical: float) -> list[float]:
        reference = self.sampler.work[REFERENCE]
        if len(reference) >= scrutiny.BURST_CALLS or isinstance(self.sampler.clock, CpuClock):
            return reference
        return self.sampler.clock.even_work(typical, 4 * scrutiny.BURST_CALLS)

    def conclude(self) -> None:
        """What only all blocks together show."""
        work = self.sampler.work[OPTIMIZED]
        if scrutiny.is_quiet(work, self.sampler.timed_calls):
            scrutiny.replayed(self.fresh, self.sampler.kind, self.where)
            scrutiny.bursts(work, self.where, self._beside, SETTLES if self.pair.is_stateful else "")
        for name in (REFERENCE, OPTIMIZED, ACCEPTED):
            count = self.sampler.compiled.get(name)
            if count:
                text = f"{self.pair.name}: the {name} side compiles inside timed calls ({count} times)"
                if name == REFERENCE:
                    raise PairError(f"{text}: a slow straw man; give it static shapes, or compile it beforehand")
                raise equivalence.NotEquivalent(f"{text}: its time is not that of the function")
